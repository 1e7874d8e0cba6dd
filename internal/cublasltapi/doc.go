// Package cublasltapi is the part of cuBLASLt that Chorus uses: matrix products with
// epilogues and scales, and the choice of their algorithms.
//
// The numbers of attributes are not consecutive, and the library refuses an attribute of
// another size than its own; [Attributes] has the sizes.
package cublasltapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// Types that cuBLASLt shares with cuBLAS.
type (
	Op          = cublasapi.Op
	DType       = cublasapi.DType
	ComputeType = cublasapi.ComputeType
	Result      = cublasapi.Result
	Scalar      = cublasapi.Scalar
)

// The opaque objects. Descriptors, layouts and preferences are in host memory.
type (
	Handle       uintptr // cublasLtHandle_t
	MatmulDesc   uintptr // cublasLtMatmulDesc_t
	MatrixLayout uintptr // cublasLtMatrixLayout_t
	Preference   uintptr // cublasLtMatmulPreference_t
)

// Algo is cublasLtMatmulAlgo_t. It may be copied within a process.
type Algo [8]uint64

// A HeuristicResult is cublasLtMatmulHeuristicResult_t.
type HeuristicResult struct {
	Algo          Algo
	WorkspaceSize uintptr
	State         Result
	WavesCount    float32
	_             [4]int32
}

// A Matrix is an operand of Matmul.
type Matrix struct {
	Ptr    cudadrv.DevicePtr
	Layout MatrixLayout
}

// API is the part of cuBLASLt that Chorus uses. Create, the functions that have a Handle, and
// MatmulAlgoInit need the context of the handle's device; the other functions need none.
type API interface {
	// GetVersion returns a number such as 130002 for 13.0.2.
	GetVersion() uintptr
	Create() (Handle, Result)
	Destroy(h Handle) Result

	MatmulDescCreate(compute ComputeType, scale DType) (MatmulDesc, Result)
	MatmulDescDestroy(d MatmulDesc) Result
	// MatmulDescSetAttribute copies the value at p.
	MatmulDescSetAttribute(d MatmulDesc, a DescAttribute, p unsafe.Pointer, bytes uintptr) Result
	MatrixLayoutCreate(t DType, rows, cols uint64, ld int64) (MatrixLayout, Result)
	MatrixLayoutDestroy(l MatrixLayout) Result
	MatrixLayoutSetAttribute(l MatrixLayout, a LayoutAttribute, p unsafe.Pointer, bytes uintptr) Result
	MatmulPreferenceCreate() (Preference, Result)
	MatmulPreferenceDestroy(p Preference) Result
	MatmulPreferenceSetAttribute(p Preference, a PreferenceAttribute, v unsafe.Pointer, bytes uintptr) Result

	// MatmulAlgoGetHeuristic fills results with at most len(results) algorithms, the
	// fastest first by the library's estimate, and returns their number.
	MatmulAlgoGetHeuristic(h Handle, o *Operation, p Preference, results []HeuristicResult) (int32, Result)
	// MatmulAlgoCheck sets the WorkspaceSize of x for the algorithm.
	MatmulAlgoCheck(h Handle, o *Operation, algo *Algo, x *HeuristicResult) Result
	MatmulAlgoInit(h Handle, t *Types, id int32, algo *Algo) Result
	MatmulAlgoConfigSetAttribute(algo *Algo, a ConfigAttribute, p unsafe.Pointer, bytes uintptr) Result
	MatmulAlgoConfigGetAttribute(algo *Algo, a ConfigAttribute, p unsafe.Pointer, bytes uintptr) (written uintptr, r Result)
	MatmulAlgoCapGetAttribute(algo *Algo, a CapAttribute, p unsafe.Pointer, bytes uintptr) (written uintptr, r Result)

	// Matmul enqueues D = alpha·op(A)·op(B) + beta·C with the descriptor's epilogue on a
	// stream. The workspace is aligned to 256 bytes. Values of alpha and beta on the host are
	// read before Matmul returns.
	Matmul(h Handle, d MatmulDesc, alpha Scalar, a, b Matrix, beta Scalar, c, out Matrix, algo *Algo,
		workspace cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) Result
}

// An Operation has the descriptor and the layouts of a product.
type Operation struct {
	Desc       MatmulDesc
	A, B, C, D MatrixLayout
}

// Types has the types of a product.
type Types struct {
	Compute           ComputeType
	Scale, A, B, C, D DType
}
