package tensor

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// MatMulConfig are the options of MatMul; nil means their defaults.
type MatMulConfig struct {
	Alpha *float64 // factor of the product; default 1
	Beta  *float64 // factor of what c holds before; default 0, and then c may hold anything
}

// MatMul enqueues c = alpha·a·b + beta·c on s (cublasGemmEx), for a of shape
// [m k], b of [k n] and c of [m n], all of one type: float16, bfloat16, float32
// or float64. Products of the narrow types are summed in float32. a and b may
// be transposed views; c is row-major and overlaps neither.
func MatMul(s *stream.Stream, c, a, b Tensor, cfg *MatMulConfig) error {
	const op = "tensor: matmul"
	if err := checkMatMul(op, s, c, a, b); err != nil {
		return err
	}
	m, n, k := c.shape[0], c.shape[1], a.shape[1]
	if m == 0 || n == 0 {
		return nil
	}
	types, ok := gemmTypes[c.dtype]
	if !ok {
		return fmt.Errorf("%s: %s is not a type of matrix products", op, c.dtype)
	}
	blas, h, err := handleOf(s)
	if err != nil {
		return err
	}
	// cuBLAS is column-major, so it is asked for cᵀ = bᵀ·aᵀ.
	left, err := operandOf(b)
	if err != nil {
		return fmt.Errorf("%s: b: %w", op, err)
	}
	right, err := operandOf(a)
	if err != nil {
		return fmt.Errorf("%s: a: %w", op, err)
	}
	out, err := operandOf(c)
	if err != nil || out.op != cublasapi.NoTrans {
		return fmt.Errorf("%s: c of shape %v and strides %v is not row-major", op, c.shape, c.strides)
	}
	f := factorsOf(cfg, c.dtype)
	var r cublasapi.Result
	call := func() error {
		r = blas.GemmEx(h, left.op, right.op, int32(n), int32(m), int32(k), f.alpha(),
			left.ptr, types.elem, left.ld, right.ptr, types.elem, right.ld,
			f.beta(), out.ptr, types.elem, out.ld, types.compute, cublasapi.GemmDefault)
		return nil
	}
	if stream.AnyCapture() { // the first product of a handle makes what it needs, which does no capture harm
		err = s.Device().Bound(func() error { return s.Device().Relaxed(call) })
	} else {
		err = s.Device().Bound(call)
	}
	if err != nil {
		return err
	}
	if r != cublasapi.Success {
		return s.Device().Because(fmt.Errorf("%s: [%d %d]·[%d %d] of %s on %s: cublasGemmEx: %w", op, m, k, k, n, c.dtype, s.Device(), r))
	}
	return nil
}

var gemmTypes = map[memory.DType]struct {
	elem    cublasapi.DType
	compute cublasapi.ComputeType
}{
	memory.Float16T:  {cublasapi.R16F, cublasapi.Compute32F},
	memory.BFloat16T: {cublasapi.R16BF, cublasapi.Compute32F},
	memory.Float32:   {cublasapi.R32F, cublasapi.Compute32F},
	memory.Float64:   {cublasapi.R64F, cublasapi.Compute64F},
}

func checkMatMul(op string, s *stream.Stream, c, a, b Tensor) error {
	for _, t := range []Tensor{c, a, b} {
		if len(t.shape) != 2 {
			return fmt.Errorf("%s: a tensor of shape %v: want two dimensions", op, t.shape)
		}
		if t.dtype != c.dtype {
			return fmt.Errorf("%s: %s and %s: want one type", op, t.dtype, c.dtype)
		}
		if err := s.Check(op, t.Device()); err != nil {
			return err
		}
	}
	if a.shape[1] != b.shape[0] || c.shape[0] != a.shape[0] || c.shape[1] != b.shape[1] {
		return fmt.Errorf("%s: shapes %v = %v · %v do not fit", op, c.shape, a.shape, b.shape)
	}
	return nil
}

// An operand is a row-major matrix as cuBLAS sees it: transposed, unless it is
// transposed already.
type operand struct {
	ptr cudadrv.DevicePtr
	op  cublasapi.Op
	ld  int32
}

func operandOf(t Tensor) (operand, error) {
	p, err := t.raw()
	if err != nil {
		return operand{}, err
	}
	rows, cols := t.shape[0], t.shape[1]
	switch {
	case t.strides[1] == 1 && t.strides[0] >= max(1, cols):
		return operand{p, cublasapi.NoTrans, int32(t.strides[0])}, nil
	case t.strides[0] == 1 && t.strides[1] >= max(1, rows):
		return operand{p, cublasapi.Trans, int32(t.strides[1])}, nil
	}
	return operand{}, fmt.Errorf("shape %v with strides %v: one of the strides must be 1", t.shape, t.strides)
}

// factors holds alpha and beta in the compute type.
type factors struct {
	f64    [2]float64
	f32    [2]float32
	double bool
}

func factorsOf(cfg *MatMulConfig, t memory.DType) *factors {
	f := &factors{f64: [2]float64{1, 0}, double: t == memory.Float64}
	if cfg != nil && cfg.Alpha != nil {
		f.f64[0] = *cfg.Alpha
	}
	if cfg != nil && cfg.Beta != nil {
		f.f64[1] = *cfg.Beta
	}
	f.f32 = [2]float32{float32(f.f64[0]), float32(f.f64[1])}
	return f
}

func (f *factors) at(i int) unsafe.Pointer {
	if f.double {
		return unsafe.Pointer(&f.f64[i])
	}
	return unsafe.Pointer(&f.f32[i])
}

func (f *factors) alpha() unsafe.Pointer { return f.at(0) }
func (f *factors) beta() unsafe.Pointer  { return f.at(1) }

var handleKey kept.Key

// handleOf returns the stream's cuBLAS handle. A handle of its own for each
// stream keeps their workspaces apart.
func handleOf(s *stream.Stream) (cublasapi.API, cublasapi.Handle, error) {
	blas, err := s.Device().System().CUBLAS()
	if err != nil {
		return nil, 0, err
	}
	v, err := s.Keep(&handleKey, func() (any, func() error, error) {
		var h cublasapi.Handle
		if err := s.RefuseCapture("tensor: first matrix product on the stream", "compute one before the capture"); err != nil {
			return nil, nil, err
		}
		if err := call(s, "cublasCreate", func() (r cublasapi.Result) { h, r = blas.Create(); return r }); err != nil {
			return nil, nil, err
		}
		destroy := func() error {
			return call(s, "cublasDestroy", func() cublasapi.Result { return blas.Destroy(h) })
		}
		if err := call(s, "cublasSetStream", func() cublasapi.Result { return blas.SetStream(h, s.Raw()) }); err != nil {
			return nil, nil, err
		}
		return h, destroy, nil
	})
	if err != nil {
		return nil, 0, err
	}
	return blas, v.(cublasapi.Handle), nil
}

func call(s *stream.Stream, op string, f func() cublasapi.Result) error {
	return s.Device().Bound(func() error {
		return s.Device().Relaxed(func() error { // cuBLAS allocates and frees
			if r := f(); r != cublasapi.Success {
				return fmt.Errorf("tensor: %s on %s: %w", op, s.Device(), r)
			}
			return nil
		})
	})
}
