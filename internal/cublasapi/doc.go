// Package cublasapi is the parts of cuBLAS and cuBLASLt that package tensor needs. Products of cuBLAS have few
// options; cuBLASLt has epilogues and scales, and lets the caller choose the algorithm. The two libraries share their
// types and results.
//
// The numbers of cuBLASLt's attributes are not consecutive, and the library refuses an attribute of
// another size than its own; [Attributes] has the sizes.
package cublasapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Handle is cublasHandle_t.
type Handle uintptr

// Op is cublasOperation_t.
type Op int32

// DType is cudaDataType.
type DType int32

// ComputeType is cublasComputeType_t.
type ComputeType int32

// Math is cublasMath_t.
type Math int32

// PointerMode is cublasPointerMode_t.
type PointerMode int32

// Values of cublas_api.h and library_types.h.
const (
	NoTrans Op = 0
	Trans   Op = 1

	R32F    DType = 0
	R64F    DType = 1
	R16F    DType = 2
	R16BF   DType = 14
	R8FE4M3 DType = 28
	R8FE5M2 DType = 29

	Compute16F         ComputeType = 64
	Compute32F         ComputeType = 68
	Compute64F         ComputeType = 70
	Compute32FFastTF32 ComputeType = 77

	DefaultMath                           Math = 0
	MathDisallowReducedPrecisionReduction Math = 16

	PointerModeHost   PointerMode = 0
	PointerModeDevice PointerMode = 1

	GemmDefault int32 = -1
)

// A Scalar is the address of alpha or beta: a value of the scale type in host memory, or in
// device memory if the pointer mode says so.
type Scalar struct {
	Host   unsafe.Pointer
	Device cudadrv.DevicePtr // used if Host is nil
}

// A Matrix is an operand of a product, column-major.
type Matrix struct {
	Ptr    cudadrv.DevicePtr
	Type   DType
	LD     int32
	Stride int64 // elements from one matrix of a batch to the next
}

// API is the part of cuBLAS that Chorus uses. Every call needs the context of
// the handle's device.
type API interface {
	Create() (Handle, Result)
	Destroy(h Handle) Result
	// SetStream also takes away the handle's workspace.
	SetStream(h Handle, s cudadrv.Stream) Result
	// SetWorkspace sets the memory that products use, which is aligned to 256 bytes.
	SetWorkspace(h Handle, p cudadrv.DevicePtr, bytes uintptr) Result
	SetMathMode(h Handle, m Math) Result
	SetPointerMode(h Handle, m PointerMode) Result
	// SetSmCountTarget limits the multiprocessors of products; 0 means no limit.
	SetSmCountTarget(h Handle, n int32) Result
	// GemmEx computes C = alpha·op(A)·op(B) + beta·C. alpha and beta have the scale type of
	// the compute type. Values on the host are read before GemmEx returns.
	GemmEx(h Handle, ta, tb Op, m, n, k int32, alpha Scalar, a, b Matrix, beta Scalar, c Matrix,
		compute ComputeType, algo int32) Result
	// GemmStridedBatchedEx is GemmEx for each matrix of a batch.
	GemmStridedBatchedEx(h Handle, ta, tb Op, m, n, k int32, alpha Scalar, a, b Matrix, beta Scalar, c Matrix,
		batch int32, compute ComputeType, algo int32) Result
}
