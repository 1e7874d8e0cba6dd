package cublasapi

import (
	"maps"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
)

// signatures has the arguments of each C function as cublas_api.h declares
// them.
var signatures = dltest.Signatures{
	"cublasCreate_v2":            "o8",
	"cublasDestroy_v2":           "w",
	"cublasSetStream_v2":         "w w",
	"cublasSetWorkspace_v2":      "w w w",
	"cublasSetMathMode":          "w i",
	"cublasSetPointerMode_v2":    "w i",
	"cublasSetSmCountTarget":     "w i",
	"cublasGemmEx":               "w i i i i i p4 w i i w i i p4 w i i i i",
	"cublasGemmStridedBatchedEx": "w i i i i i p4 w i i w w i i w p4 w i i w i i i",
}

var alpha, beta float32 = 0.5, 2

func TestRecordedCalls(t *testing.T) {
	rec := dltest.NewRecorder(t, signatures, 0x1234_0000_0001) // the upper half is noise
	lib, err := newLib(rec.Resolve, "recorded")
	require.NoError(t, err)
	c := dltest.NewCalls(rec, MathDisallowReducedPrecisionReduction, PointerModeDevice, Compute16F)
	dltest.Methods[API](c, lib)
	onDevice := func(p *float32) Scalar { return Scalar{Device: cudadrv.DevicePtr(uintptr(unsafe.Pointer(p)))} }
	c.Call("GemmEx, scalars of the device", lib.GemmEx, Handle(1), Trans, NoTrans, int32(2), int32(3), int32(4), onDevice(&alpha),
		Matrix{Type: R16F}, Matrix{Type: R16BF}, onDevice(&beta), Matrix{Type: R64F}, Compute32F, GemmDefault)
	dltest.Golden(t, "testdata/record.golden", c.Text())
	one, m := Scalar{Host: unsafe.Pointer(&alpha)}, Matrix{Ptr: 1, LD: 1}
	require.Zero(t, testing.AllocsPerRun(200, func() {
		lib.GemmEx(1, NoTrans, NoTrans, 1, 1, 1, one, m, m, one, m, Compute32F, GemmDefault)
	}))
}

func TestOpenRefusesOtherLibrary(t *testing.T) {
	lib := dltest.Load(t, "int cublasCreate(void **h) { return 0; }")
	_, err := newLib(lib.Symbol, "/lib/libcublas.so.12")
	var e *dl.VersionError
	require.ErrorAs(t, err, &e)
	require.Len(t, e.Missing, len(symbols))
}

func TestTables(t *testing.T) {
	signatures.Require(t, symbols[:])
	for r, name := range names {
		require.Equal(t, name, r.Error())
		require.True(t, strings.HasPrefix(name, "CUBLAS_STATUS_"), name)
	}
	require.Equal(t, "cublasStatus 99", Result(99).Error())
}

func TestEveryResultIsNamed(t *testing.T) {
	constants := dltest.Constants(t, "cublas.go", "Result")
	for name, v := range constants {
		require.Contains(t, names, Result(v), name)
	}
	require.Len(t, names, len(constants))
}

const gemmEx = `cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void *,` +
	` const void *, cudaDataType, int, const void *, cudaDataType, int, const void *,` +
	` void *, cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t)`

const gemmStridedBatchedEx = `cublasStatus_t (*)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void *,` +
	` const void *, cudaDataType, int, long long int, const void *, cudaDataType, int, long long int, const void *,` +
	` void *, cudaDataType, int, long long int, int, cublasComputeType_t, cublasGemmAlgo_t)`

func TestHeader(t *testing.T) {
	h := dltest.FindHeader(t, "cublas_api.h", "cuda_runtime.h")
	// In C++ the header overloads cublasGemmEx, so its prototype is spelt out.
	plain := maps.Clone(signatures)
	delete(plain, "cublasGemmEx")
	delete(plain, "cublasGemmStridedBatchedEx")
	h.RequirePrototypes(plain)
	h.RequireValues(map[string]int64{"sizeof(static_cast<" + gemmEx + ">(cublasGemmEx))": 8,
		"sizeof(static_cast<" + gemmStridedBatchedEx + ">(cublasGemmStridedBatchedEx))": 8})

	table := map[string]int64{}
	for v, name := range names {
		table[name] = int64(v)
	}
	h.RequireResults(`CUBLAS_STATUS_[A-Z_]+`, table)
	h.RequireValues(map[string]int64{
		"CUBLAS_OP_N": int64(NoTrans), "CUBLAS_OP_T": int64(Trans),
		"CUDA_R_32F": int64(R32F), "CUDA_R_64F": int64(R64F), "CUDA_R_16F": int64(R16F), "CUDA_R_16BF": int64(R16BF),
		"CUBLAS_COMPUTE_32F": int64(Compute32F), "CUBLAS_COMPUTE_64F": int64(Compute64F),
		"CUDA_R_8F_E4M3": int64(R8FE4M3), "CUDA_R_8F_E5M2": int64(R8FE5M2),
		"CUBLAS_COMPUTE_16F": int64(Compute16F), "CUBLAS_COMPUTE_32F_FAST_TF32": int64(Compute32FFastTF32),
		"CUBLAS_DEFAULT_MATH": int64(DefaultMath), "CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION": int64(MathDisallowReducedPrecisionReduction),
		"CUBLAS_POINTER_MODE_HOST": int64(PointerModeHost), "CUBLAS_POINTER_MODE_DEVICE": int64(PointerModeDevice),
		"CUBLAS_GEMM_DEFAULT": int64(GemmDefault),
	})
}

func TestInstalledLibrary(t *testing.T) {
	lib, err := Open()
	if err != nil {
		t.Skip(err)
	}
	t.Log(lib.Path())
	require.Equal(t, NotInitialized, lib.Destroy(0))
}
