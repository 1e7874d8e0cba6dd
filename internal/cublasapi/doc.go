// Package cublasapi is cuBLAS as far as package tensor needs it: matrix
// products on a stream.
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

// Values of cublas_api.h and library_types.h.
const (
	NoTrans Op = 0
	Trans   Op = 1

	R32F  DType = 0
	R64F  DType = 1
	R16F  DType = 2
	R16BF DType = 14

	Compute32F ComputeType = 68
	Compute64F ComputeType = 70

	GemmDefault int32 = -1
)

// API is the part of cuBLAS that Chorus uses. Every call needs the context of
// the handle's device.
type API interface {
	Create() (Handle, Result)
	Destroy(h Handle) Result
	SetStream(h Handle, s cudadrv.Stream) Result
	// GemmEx computes C = alpha·op(A)·op(B) + beta·C, column-major. alpha and
	// beta point at host values of the compute type and are read before it
	// returns.
	GemmEx(h Handle, ta, tb Op, m, n, k int32, alpha unsafe.Pointer,
		a cudadrv.DevicePtr, at DType, lda int32, b cudadrv.DevicePtr, bt DType, ldb int32,
		beta unsafe.Pointer, c cudadrv.DevicePtr, ct DType, ldc int32, compute ComputeType, algo int32) Result
}
