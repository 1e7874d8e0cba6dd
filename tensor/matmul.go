package tensor

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gemm"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// MatMulConfig are the options of MatMul; nil means their defaults. Tensors among them are on
// the device of the stream, and the zero Tensor means none.
type MatMulConfig struct {
	Alpha *float64 // factor of the product; default 1
	Beta  *float64 // factor of c, or of Add; default 0, or 1 if Add is set. With 0, c may hold anything

	// DeviceAlpha and DeviceBeta replace Alpha and Beta by values that the device reads when
	// the product runs. Both must be set. Each has one element of float32; of float64 for
	// products of float64; of float16 with MatMulSettings.AllowFP16Accumulation. They are not
	// supported if c has one row or one column and Add, Bias or Epilogue is set, because
	// cuBLASLt would write no output for an alpha of 0 and a beta of 1.
	DeviceAlpha, DeviceBeta Tensor

	// Add is the matrix that Beta multiplies, if it is not c itself (the input of
	// torch.addmm and torch.baddbmm). It has the shape and type of c, or shape [m n] for all
	// products of a batch. If c is an 8-bit float, Add is float16 or bfloat16.
	Add Tensor

	// Epilogue is applied to the sum of the product, Add and Bias. See its values for Aux and
	// BiasGrad.
	Epilogue Epilogue
	// Bias is added to each row before the epilogue (torch.nn.functional.linear). It has
	// shape [n], or [b n] for a batch, and the type of c. Exceptions are products of 8-bit
	// floats: if c is float32, Bias is bfloat16, and if c is an 8-bit float, Bias is float16 or
	// bfloat16.
	Bias     Tensor
	Aux      Tensor
	BiasGrad Tensor

	// Scales of 8-bit floats, as in torch._scaled_mm: float32 on the device.
	// c = ScaleResult·epilogue(Alpha·ScaleA·ScaleB·a·b + …). Each has one element. ScaleA of
	// shape [m 1] and ScaleB of shape [1 n] are scales for each row of a and each column of b.
	// Such scales need compute capability 9.0, cuBLASLt 12.9, and a c that is not 8-bit.
	ScaleA, ScaleB Tensor
	ScaleResult    Tensor // only if c is an 8-bit float
	// AMax is one float32 that gets the largest |c| before ScaleResult, if c is an 8-bit float. With
	// Bias it may be larger, up to the largest |Bias|, because cuBLASLt counts Bias alone, too.
	AMax Tensor
	// FastAccum sums products of 8-bit floats with about 22 bits (use_fast_accum). It is
	// faster, and precise enough for the forward pass.
	FastAccum bool

	Settings *MatMulSettings // default: MatMulDefaults
}

// MatMul enqueues c = epilogue(alpha·a·b + beta·c + bias) on s (torch.mm, torch.bmm,
// torch.addmm, torch.baddbmm, torch._scaled_mm), for a of shape [m k], b of [k n] and c of
// [m n]. For a batch c has shape [b m n], and a and b have three dimensions or two: a matrix
// of two dimensions, or a first dimension of 1, is used for the whole batch. torch.matmul of
// other shapes is a View of such a product.
//
// Types of a and b, of c, and the type of the sums:
//
//	float64                          float64                 float64
//	float32                          float32                 float32, of inputs rounded to TF32 if Float32Precision allows it
//	float16 or bfloat16              the same, or float32    float32
//	float16, AllowFP16Accumulation   float16                 float16
//	8-bit floats, not both e5m2      bfloat16, float16,      float32
//	                                 float32, e4m3fn; e5m2 if an input is e5m2
//
// The result is rounded once to the type of c; 8-bit floats saturate. If operands are not
// aligned to 16 bytes, cuBLASLt may also round before it adds the bias and before the
// epilogue. BiasGrad may be the sum of rounded elements. Integers and products of mixed types
// are not supported.
//
// cuBLASLt loads a kernel at its first use, and the driver may wait for all work of the device
// then. If a collective waits for a rank that is not enqueued yet, such a product hangs, so compute
// a product of the same types and shapes before.
//
// MatMul does not copy operands. In a, b, c and Add one of the last two strides is 1, and the
// other one is not smaller than the matrix's side. So they may be views, transposed views and
// slices of rows and columns. b and a may repeat, with strides of 0 between matrices of a
// batch. c may be a transposed view if Bias, Aux and BiasGrad are not set. An output (c,
// BiasGrad, AMax, and Aux of ReLU and GELU) must not share memory with another tensor of the
// product, except that Add may be c.
//
// Products of 8-bit floats need compute capability 8.9. Except on 10.x, a must be contiguous in
// rows and b in columns, as in MatMul(s, c, a, b.T(), cfg). k, n, strides and addresses are
// multiples of 16 bytes, and n is a multiple of 16 elements.
//
// MatMul uses cuBLASLt. It falls back to cuBLAS if cuBLASLt is missing or has no algorithm,
// and the product has no epilogue, bias, scales or separate Add. If neither can compute the
// product, the error matches errors.ErrUnsupported. The arguments are validated before
// anything is enqueued. If c has no elements, MatMul enqueues nothing. If k is 0, the product is 0,
// and MatMul still adds beta·c or Add and Bias, and applies the epilogue.
//
// In two cases SumA and SumB are a second product, of the input with ones in temporary memory. If
// c has one row or one column, cuBLASLt stores wrong sums. For some layouts it has no algorithm
// that also makes sums.
//
// MatMul returns when the product is enqueued. The first product of a kind on a stream
// chooses an algorithm; later ones with the same shapes and alignments are enqueued without
// allocating. Algorithms use a workspace that belongs to the stream; see
// CUBLAS_WORKSPACE_CONFIG in docs/ENVIRONMENT.md. While s is captured, the workspace comes
// from the pool of the capture and belongs to the graph. MatMul may be called by several
// goroutines.
//
// Results are reproducible for the same device model, library versions, shapes, alignments,
// settings and workspace. On virtual devices sums are made in the same types, in an
// unspecified order.
func MatMul(s *stream.Stream, c, a, b Tensor, cfg *MatMulConfig) error {
	if cfg == nil {
		cfg = &noConfig
	}
	if err := gpu.CheckStream("tensor: matmul", s, nil); err != nil {
		return err
	}
	var m multiplication
	err := m.set(s, &c, &a, &b, cfg)
	switch {
	case err != nil || m.empty():
	case m.sumsOfVector(cfg):
		return multiplyAndSum(s, c, a, b, cfg)
	default:
		err = gemm.Enqueue(s, &m.Product)
		if cfg.sums() && !float8(a.DType()) && errors.Is(err, errors.ErrUnsupported) {
			return multiplyAndSum(s, c, a, b, cfg)
		}
	}
	if err == nil {
		return nil
	}
	return matMulError(s, c, a, b, err)
}

var noConfig MatMulConfig

// matMulError names the operation, the operands and the device.
func matMulError(s *stream.Stream, c, a, b Tensor, err error) error {
	text := fmt.Sprintf("tensor: matmul: %s %v = %s %v · %s %v on %s", c.at().DType, c.at().Shape, a.at().DType, a.at().Shape, b.at().DType, b.at().Shape, s.Device())
	if _, ok := errors.AsType[*device.CaptureError](err); ok {
		return err // it names the call
	}
	if _, ok := errors.AsType[*gemm.Status](err); ok {
		return fmt.Errorf("%s: %w: every argument is valid: CUBLASLT_LOG_LEVEL=5 and CUBLAS_LOGINFO_DBG=1 print the call", text, err)
	}
	return fmt.Errorf("%s: %w", text, err)
}

// float8 reports whether t is an 8-bit float.
func float8(t memory.DType) bool { return t == memory.Float8E4M3 || t == memory.Float8E5M2 }

// requireFloat8 checks the device for products of 8-bit floats. anyLayout reports whether it
// accepts other layouts than Hopper.
func requireFloat8(dev *device.Device) (anyLayout bool, err error) {
	if err := dev.Require(device.Float8); err != nil {
		return false, err
	}
	major, _, err := dev.Capability()
	return major == 10, err
}
