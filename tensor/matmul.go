package tensor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
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
// The result is rounded once to the type of c; 8-bit floats saturate. If
// operands are not aligned to 16 bytes, cuBLASLt may also round before it adds
// the bias and before the epilogue, and BiasGrad may be the sum of rounded
// elements. Integers and products of mixed types are not supported.
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
// In two cases SumA and SumB are a second product, of the input with ones in
// temporary memory. If c has one row or one column, cuBLASLt stores wrong sums,
// and for some layouts it has no algorithm that also makes sums.
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

// MatMulSettings are the settings of matrix products (torch.backends.cuda.matmul). The zero
// value has torch's defaults.
type MatMulSettings struct {
	// Float32Precision is torch.set_float32_matmul_precision; High and Medium are
	// torch.backends.cuda.matmul.allow_tf32.
	Float32Precision Float32Precision
	// FP16Reduction and BF16Reduction say how sums over k that were split may be added, for
	// outputs of float16 and bfloat16
	// (torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction, allow_bf16_….)
	FP16Reduction, BF16Reduction Reduction
	// AllowFP16Accumulation adds products of float16 in float16
	// (torch.backends.cuda.matmul.allow_fp16_accumulation). c must be float16.
	AllowFP16Accumulation bool
	// Deterministic never splits sums over k (torch.use_deterministic_algorithms). The other
	// products are reproducible too, since each stream has its own workspace.
	Deterministic bool
	// SMCarveout is the number of multiprocessors that products leave to other kernels, such
	// as NCCL's (torch._C._set_sm_carveout_experimental).
	SMCarveout int
	// Library is torch.backends.cuda.preferred_blas_library.
	Library BLASLibrary
}

// Float32Precision is the precision of products of float32.
type Float32Precision uint8

// The precisions, with torch's names.
const (
	Highest Float32Precision = iota // float32
	High                            // inputs are rounded to TF32, which has 10 bits after the leading one
	Medium                          // like High, as in torch on CUDA
)

// Reduction says how an algorithm may add the parts of a sum over k that it has split.
type Reduction uint8

// The reductions, with torch's values (allow_reduced_precision, allow_splitk).
const (
	ReducedPrecision Reduction = iota // (True, True): parts may be rounded to the output type first
	FullPrecision                     // (False, True): parts are added in float32
	NoSplitK                          // (False, False): sums are not split; only cuBLASLt can do that
)

// BLASLibrary is a preference between cuBLASLt and cuBLAS.
type BLASLibrary uint8

// The preferences, with torch's names.
const (
	AnyBLAS  BLASLibrary = iota // "default": cuBLASLt, and cuBLAS if it cannot compute a product
	CUBLAS                      // "cublas": cuBLAS, and cuBLASLt if it cannot compute a product
	CUBLASLt                    // "cublaslt": cuBLASLt, without fallback
)

var matMulDefaults atomic.Pointer[MatMulSettings] // nil until the first use

var matMulEnvironment = sync.OnceValues(func() (*MatMulSettings, error) {
	m := new(MatMulSettings)
	tf32, err := env.AllowTF32.OneOf("", "0", "1")
	if err != nil {
		return nil, err
	}
	lt, err := env.PreferCUBLASLt.OneOf("", "0", "1")
	if err != nil {
		return nil, err
	}
	if tf32 == "1" {
		m.Float32Precision = High
	}
	if lt == "1" {
		m.Library = CUBLASLt
	}
	return m, nil
})

// MatMulDefaults returns the settings of products whose configuration has none. They are the
// process's, and come from the environment: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE and
// TORCH_BLAS_PREFER_CUBLASLT.
func MatMulDefaults() (MatMulSettings, error) {
	m, err := matMulSettings(&noConfig)
	if err != nil {
		return MatMulSettings{}, err
	}
	return *m, nil
}

// SetMatMulDefaults changes the settings of MatMulDefaults, for products that
// are enqueued from now on by any goroutine, and returns the previous ones. If
// the settings are invalid, it returns an error and changes nothing.
func SetMatMulDefaults(m MatMulSettings) (before MatMulSettings, err error) {
	if before, err = MatMulDefaults(); err != nil {
		return before, err
	}
	if err := m.check(); err != nil {
		return before, fmt.Errorf("tensor: set matmul defaults: %w", err)
	}
	return *matMulDefaults.Swap(&m), nil
}

// matMulSettings returns the settings of a product.
func matMulSettings(cfg *MatMulConfig) (*MatMulSettings, error) {
	if m := cfg.Settings; m != nil {
		return m, m.check()
	}
	if m := matMulDefaults.Load(); m != nil {
		return m, nil
	}
	m, err := matMulEnvironment()
	if err != nil {
		return nil, err
	}
	matMulDefaults.CompareAndSwap(nil, m)
	return matMulDefaults.Load(), nil
}

func (m *MatMulSettings) check() error {
	switch {
	case m.Float32Precision > Medium:
		return fmt.Errorf("unknown Float32Precision %d: choose Highest, High or Medium", m.Float32Precision)
	case m.FP16Reduction > NoSplitK || m.BF16Reduction > NoSplitK:
		return fmt.Errorf("unknown Reduction %d: choose ReducedPrecision, FullPrecision or NoSplitK", max(m.FP16Reduction, m.BF16Reduction))
	case m.Library > CUBLASLt:
		return fmt.Errorf("unknown Library %d: choose AnyBLAS, CUBLAS or CUBLASLt", m.Library)
	case m.SMCarveout < 0:
		return fmt.Errorf("SMCarveout is %d: want 0 or more", m.SMCarveout)
	}
	return nil
}

// libraries has the names of gemm.
var libraries = [...]gemm.Library{AnyBLAS: gemm.Any, CUBLAS: gemm.CUBLAS, CUBLASLt: gemm.CUBLASLt}

// TuneConfig are the options of tuning matrix products; nil means their defaults, which are
// torch's where torch has them.
type TuneConfig struct {
	// MaxDuration limits the last measurement of each algorithm
	// (torch.cuda.tunable.set_max_tuning_duration). Default 30 ms.
	MaxDuration time.Duration
	// MaxIterations limits the products in that measurement
	// (set_max_tuning_iterations). Default 100.
	MaxIterations int
	// Candidates is the largest number of algorithms to measure. Default 32.
	Candidates int
	// RotatingBytes is the size of the copies of the operands that are used in turns, so that
	// they are not in the cache (set_rotating_buffer_size). Default 64 MiB; -1 means one copy.
	RotatingBytes int64
	// NumericalCheck drops algorithms whose results differ from the default's by more than
	// ATol + RTol·|result| (set_numerical_check_tolerances). The default tolerances are 1e-5.
	NumericalCheck bool
	ATol, RTol     float64
}

// A TuneResult is the outcome of tuning one product.
type TuneResult struct {
	Op, Params    string        // the product in the terms of cuBLASLt, as in files of results
	Solution      string        // the algorithm, or "Default"
	Time, Default time.Duration // of one product, with Solution and without tuning; Default is 0 in results of files
	Measured      int           // algorithms that were measured
	Dropped       int           // algorithms that failed, or had other results
}

func tuneOptions(cfg *TuneConfig) (*gemm.TuneOptions, error) {
	c := *cmp.Or(cfg, new(TuneConfig))
	if c.MaxDuration < 0 || c.MaxIterations < 0 || c.Candidates < 0 || c.RotatingBytes < -1 {
		return nil, fmt.Errorf("tensor: tune: MaxDuration is %v, MaxIterations %d, Candidates %d and RotatingBytes %d: they must not be negative, except that RotatingBytes may be -1", c.MaxDuration, c.MaxIterations, c.Candidates, c.RotatingBytes)
	}
	if !(c.ATol >= 0 && c.RTol >= 0) { // also if one is NaN
		return nil, fmt.Errorf("tensor: tune: ATol is %v and RTol is %v: want 0 or more", c.ATol, c.RTol)
	}
	o := &gemm.TuneOptions{Duration: 30 * time.Millisecond, Iterations: 100, Candidates: 32, Rotating: 64 << 20, Check: c.NumericalCheck, ATol: 1e-5, RTol: 1e-5}
	if c.MaxDuration > 0 {
		o.Duration = c.MaxDuration
	}
	if c.MaxIterations > 0 {
		o.Iterations = c.MaxIterations
	}
	if c.Candidates > 0 {
		o.Candidates = c.Candidates
	}
	if c.RotatingBytes != 0 {
		o.Rotating = max(0, c.RotatingBytes)
	}
	if c.ATol > 0 || c.RTol > 0 {
		o.ATol, o.RTol = c.ATol, c.RTol
	}
	return o, nil
}

// TuneMatMul measures the algorithms of cuBLASLt for the product that MatMul would enqueue
// with the same arguments, and uses the fastest one for such products on the device from now
// on. It measures copies of the operands on s and writes neither c nor another output. A
// product that was tuned before is not measured again. The host waits for the stream. If ctx
// ends first, TuneMatMul returns its cause and changes nothing.
func TuneMatMul(ctx context.Context, s *stream.Stream, c, a, b Tensor, cfg *MatMulConfig, tune *TuneConfig) (TuneResult, error) {
	const op = "tensor: tune"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return TuneResult{}, err
	}
	o, err := tuneOptions(tune)
	if err != nil {
		return TuneResult{}, err
	}
	if cfg == nil {
		cfg = &noConfig
	}
	var m multiplication
	if err := m.set(s, &c, &a, &b, cfg); err != nil {
		return TuneResult{}, matMulError(s, c, a, b, err)
	}
	if m.empty() {
		return TuneResult{}, matMulError(s, c, a, b, fmt.Errorf("a product without elements has no algorithm"))
	}
	r, err := gemm.Tune(ctx, s, &m.Product, o)
	if err != nil {
		return TuneResult{}, matMulError(s, c, a, b, err)
	}
	return TuneResult(r), nil
}

// SetMatMulTuning enables tuning of every product at its first use, except during
// captures (torch.cuda.tunable.enable, tuning_enable); nil disables it. The first MatMul of
// a kind then waits for its stream. If a tuning fails, the default algorithm is used.
func SetMatMulTuning(tune *TuneConfig) error {
	if tune == nil {
		gemm.SetOnline(nil)
		return nil
	}
	o, err := tuneOptions(tune)
	if err == nil {
		gemm.SetOnline(o)
	}
	return err
}

// TuneResults returns the results of a device, of this process and of files
// (torch.cuda.tunable.get_results).
func TuneResults(dev *device.Device) ([]TuneResult, error) {
	if dev == nil {
		return nil, errors.New("tensor: tune results: no device given")
	}
	list, err := gemm.Results(dev)
	out := make([]TuneResult, len(list))
	for i, r := range list {
		out[i] = TuneResult(r)
	}
	return out, err
}

// WriteTuneResults writes the results of a device in torch's format
// (torch.cuda.tunable.write_file): lines "Validator,KEY,VALUE" with the version of cuBLASLt,
// the device and the workspace, and a line "Op,Params,Solution,milliseconds" for each product.
func WriteTuneResults(dev *device.Device, w io.Writer) error {
	if dev == nil {
		return errors.New("tensor: write tune results: no device given")
	}
	if err := gemm.WriteResults(dev, w); err != nil {
		return fmt.Errorf("tensor: write tune results: %w", err)
	}
	return nil
}

// ReadTuneResults reads results for a device, which products use from now on
// (torch.cuda.tunable.read_file). A file with other validators, or an invalid
// line, is an error and changes nothing. An algorithm that cuBLASLt does not
// accept for its product is ignored, and results that the device already has
// stay.
func ReadTuneResults(dev *device.Device, r io.Reader) error {
	if dev == nil {
		return errors.New("tensor: read tune results: no device given")
	}
	if err := gemm.ReadResults(dev, r); err != nil {
		return fmt.Errorf("tensor: read tune results: %w", err)
	}
	return nil
}

// RecordMatMuls records the products of a device that were not tuned, until stop
// (torch.cuda.tunable.record_untuned_enable). stop writes a line for each kind of product, for
// TuneRecorded. A second call of stop is an error and writes nothing.
func RecordMatMuls(dev *device.Device) (stop func(w io.Writer) error, err error) {
	if dev == nil {
		return nil, errors.New("tensor: record matmuls: no device given")
	}
	if stop, err = gemm.Record(dev); err != nil {
		return nil, fmt.Errorf("tensor: record matmuls of %s: %w", dev, err)
	}
	return stop, nil
}

// TuneRecorded tunes the products that RecordMatMuls has written, on random
// operands that it allocates on s (torch.cuda.tunable.tune_gemm_in_file). The
// host waits for the stream. TuneRecorded stops at the first product that
// cannot be tuned, and returns the results so far.
func TuneRecorded(ctx context.Context, s *stream.Stream, r io.Reader, tune *TuneConfig) ([]TuneResult, error) {
	const op = "tensor: tune recorded"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return nil, err
	}
	o, err := tuneOptions(tune)
	if err != nil {
		return nil, err
	}
	list, err := gemm.TuneRecorded(ctx, s, r, o)
	out := make([]TuneResult, len(list))
	for i, r := range list {
		out[i] = TuneResult(r)
	}
	if err != nil {
		err = fmt.Errorf("%s on %s: %w", op, s.Device(), err)
	}
	return out, err
}
