// Package cublasapi is the parts of cuBLAS and cuBLASLt that package tensor needs. Products of cuBLAS have few
// options; cuBLASLt has epilogues and scales, and lets the caller choose the algorithm. The two libraries share their
// types and results.
//
// The numbers of cuBLASLt's attributes are not consecutive, and the library refuses an attribute of
// another size than its own; [Attributes] has the sizes.
package cublasapi

import (
	"strconv"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
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

// fn numbers the functions of libcublas that Lib calls.
type fn int

const (
	fnCreate fn = iota
	fnDestroy
	fnSetStream
	fnSetWorkspace
	fnSetMathMode
	fnSetPointerMode
	fnSetSmCountTarget
	fnGemmEx
	fnGemmStridedBatchedEx
	numFns
)

// symbols has the exported name of each function; all are required. GemmEx has
// had its prototype, with cublasComputeType_t, since cuBLAS 11.
var symbols = [numFns]dl.Func{
	fnCreate:               {Name: "cublasCreate_v2"},
	fnDestroy:              {Name: "cublasDestroy_v2"},
	fnSetStream:            {Name: "cublasSetStream_v2"},
	fnSetWorkspace:         {Name: "cublasSetWorkspace_v2"},
	fnSetMathMode:          {Name: "cublasSetMathMode"},
	fnSetPointerMode:       {Name: "cublasSetPointerMode_v2"},
	fnSetSmCountTarget:     {Name: "cublasSetSmCountTarget"},
	fnGemmEx:               {Name: "cublasGemmEx"},
	fnGemmStridedBatchedEx: {Name: "cublasGemmStridedBatchedEx"},
}

var spec = &dl.Spec{
	Name:    "cuBLAS",
	Needed:  "12.0",
	Env:     env.LibCUBLAS,
	Sonames: []string{"libcublas.so.13", "libcublas.so.12"},
	Deps:    []string{"libcublasLt.so.13", "libcublasLt.so.12"},
	Folders: dl.Toolkit,
	Wheels:  []string{"cu13/lib", "cublas/lib"},
}

// Lib is the loaded cuBLAS. It implements API.
type Lib struct{ dl.Table[fn, Result] }

var _ API = (*Lib)(nil)

// Open loads cuBLAS, once per process. The error is a *dl.Error when there is
// none and a *dl.VersionError when it lacks functions; both match
// errors.ErrUnsupported.
func Open() (*Lib, error) { return opened() }

var opened = dl.Once(spec, newLib)

func newLib(find dl.Resolver, path string) (*Lib, error) {
	t, err := dl.Require[fn](find, path, spec, symbols[:], Success)
	return &Lib{t}, err
}

// The methods below have no comments: each is the C function of
// its name.

func (l *Lib) Create() (Handle, Result) {
	h, r := l.Call1(fnCreate, dl.Get().Out())
	return Handle(h), r
}

func (l *Lib) Destroy(h Handle) Result { return l.Call(fnDestroy, dl.Get().In(uintptr(h))) }

func (l *Lib) SetStream(h Handle, s cudadrv.Stream) Result {
	return l.Call(fnSetStream, dl.Get().In(uintptr(h), uintptr(s)))
}

func (l *Lib) SetWorkspace(h Handle, p cudadrv.DevicePtr, bytes uintptr) Result {
	return l.Call(fnSetWorkspace, dl.Get().In(uintptr(h), uintptr(p), bytes))
}

func (l *Lib) SetMathMode(h Handle, m Math) Result {
	return l.Call(fnSetMathMode, dl.Get().In(uintptr(h), uintptr(m)))
}

func (l *Lib) SetPointerMode(h Handle, m PointerMode) Result {
	return l.Call(fnSetPointerMode, dl.Get().In(uintptr(h), uintptr(m)))
}

func (l *Lib) SetSmCountTarget(h Handle, n int32) Result {
	return l.Call(fnSetSmCountTarget, dl.Get().In(uintptr(h), uintptr(n)))
}

func (l *Lib) GemmEx(h Handle, ta, tb Op, m, n, k int32, alpha Scalar, a, b Matrix, beta Scalar, c Matrix,
	compute ComputeType, algo int32) Result {
	f := dl.Get().In(uintptr(h), uintptr(ta), uintptr(tb), uintptr(m), uintptr(n), uintptr(k))
	alpha.Add(f).In(uintptr(a.Ptr), uintptr(a.Type), uintptr(a.LD), uintptr(b.Ptr), uintptr(b.Type), uintptr(b.LD))
	beta.Add(f).In(uintptr(c.Ptr), uintptr(c.Type), uintptr(c.LD), uintptr(compute), uintptr(algo))
	return l.Call(fnGemmEx, f)
}

func (l *Lib) GemmStridedBatchedEx(h Handle, ta, tb Op, m, n, k int32, alpha Scalar, a, b Matrix, beta Scalar, c Matrix,
	batch int32, compute ComputeType, algo int32) Result {
	f := dl.Get().In(uintptr(h), uintptr(ta), uintptr(tb), uintptr(m), uintptr(n), uintptr(k))
	alpha.Add(f).In(uintptr(a.Ptr), uintptr(a.Type), uintptr(a.LD), uintptr(a.Stride),
		uintptr(b.Ptr), uintptr(b.Type), uintptr(b.LD), uintptr(b.Stride))
	beta.Add(f).In(uintptr(c.Ptr), uintptr(c.Type), uintptr(c.LD), uintptr(c.Stride), uintptr(batch),
		uintptr(compute), uintptr(algo))
	return l.Call(fnGemmStridedBatchedEx, f)
}

// Add appends the address to the arguments of a call.
func (s Scalar) Add(f *dl.Frame) *dl.Frame {
	if s.Host != nil {
		return f.Ptr(s.Host)
	}
	return f.In(uintptr(s.Device))
}

// Result is cublasStatus_t. Its Error text is the C name.
type Result int32

// The results, with the values of cublas_api.h.
const (
	Success         Result = 0
	NotInitialized  Result = 1
	AllocFailed     Result = 3
	InvalidValue    Result = 7
	ArchMismatch    Result = 8
	MappingError    Result = 11
	ExecutionFailed Result = 13
	InternalError   Result = 14
	NotSupported    Result = 15
	LicenseError    Result = 16
)

var names = map[Result]string{
	Success: "CUBLAS_STATUS_SUCCESS", NotInitialized: "CUBLAS_STATUS_NOT_INITIALIZED",
	AllocFailed: "CUBLAS_STATUS_ALLOC_FAILED", InvalidValue: "CUBLAS_STATUS_INVALID_VALUE",
	ArchMismatch: "CUBLAS_STATUS_ARCH_MISMATCH", MappingError: "CUBLAS_STATUS_MAPPING_ERROR",
	ExecutionFailed: "CUBLAS_STATUS_EXECUTION_FAILED", InternalError: "CUBLAS_STATUS_INTERNAL_ERROR",
	NotSupported: "CUBLAS_STATUS_NOT_SUPPORTED", LicenseError: "CUBLAS_STATUS_LICENSE_ERROR",
}

// Error returns the C name, such as CUBLAS_STATUS_ALLOC_FAILED.
func (r Result) Error() string {
	if s, ok := names[r]; ok {
		return s
	}
	return "cublasStatus " + strconv.Itoa(int(r))
}
