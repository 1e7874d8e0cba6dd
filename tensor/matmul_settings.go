package tensor

import (
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gemm"
)

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

// SetMatMulDefaults changes the settings of MatMulDefaults, for products that are enqueued
// from now on by any goroutine, and returns the previous ones. Invalid settings are an error,
// and change nothing.
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
