package cublasapi

import (
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// fn numbers the functions of libcublas that Lib calls.
type fn int

const (
	fnCreate fn = iota
	fnDestroy
	fnSetStream
	fnGemmEx
	numFns
)

// symbols has the exported name of each function; all are required. GemmEx has
// had its prototype, with cublasComputeType_t, since cuBLAS 11.
var symbols = [numFns]dl.Func{
	fnCreate:    {Name: "cublasCreate_v2"},
	fnDestroy:   {Name: "cublasDestroy_v2"},
	fnSetStream: {Name: "cublasSetStream_v2"},
	fnGemmEx:    {Name: "cublasGemmEx"},
}

const minVersionText = "12.0"

var spec = &dl.Spec{
	Name:    "cuBLAS",
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

var opened = sync.OnceValues(func() (*Lib, error) {
	so, err := dl.Open(spec)
	if err != nil {
		return nil, err
	}
	return newLib(so.Symbol, so.Path())
})

func newLib(find dl.Resolver, path string) (*Lib, error) {
	t, missing := dl.NewTable[fn](find, path, symbols[:], Success)
	if len(missing) > 0 {
		return nil, &dl.VersionError{Library: "cuBLAS", Path: path, Needed: minVersionText, Missing: missing}
	}
	return &Lib{t}, nil
}

// The methods below have no comments of their own: each is the C function of
// its name.

func (l *Lib) Create() (Handle, Result) {
	h, r := l.Call1(fnCreate, dl.Get().Out())
	return Handle(h), r
}

func (l *Lib) Destroy(h Handle) Result { return l.Call(fnDestroy, dl.Get().In(uintptr(h))) }

func (l *Lib) SetStream(h Handle, s cudadrv.Stream) Result {
	return l.Call(fnSetStream, dl.Get().In(uintptr(h), uintptr(s)))
}

func (l *Lib) GemmEx(h Handle, ta, tb Op, m, n, k int32, alpha unsafe.Pointer,
	a cudadrv.DevicePtr, at DType, lda int32, b cudadrv.DevicePtr, bt DType, ldb int32,
	beta unsafe.Pointer, c cudadrv.DevicePtr, ct DType, ldc int32, compute ComputeType, algo int32) Result {
	return l.Call(fnGemmEx, dl.Get().
		In(uintptr(h), uintptr(ta), uintptr(tb), uintptr(m), uintptr(n), uintptr(k)).Ptr(alpha).
		In(uintptr(a), uintptr(at), uintptr(lda), uintptr(b), uintptr(bt), uintptr(ldb)).Ptr(beta).
		In(uintptr(c), uintptr(ct), uintptr(ldc), uintptr(compute), uintptr(algo)))
}
