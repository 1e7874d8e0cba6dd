package cublasltapi

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// fn numbers the functions of libcublasLt that Lib calls.
type fn int

const (
	fnGetVersion fn = iota
	fnCreate
	fnDestroy
	fnMatmulDescCreate
	fnMatmulDescDestroy
	fnMatmulDescSetAttribute
	fnMatrixLayoutCreate
	fnMatrixLayoutDestroy
	fnMatrixLayoutSetAttribute
	fnMatmulPreferenceCreate
	fnMatmulPreferenceDestroy
	fnMatmulPreferenceSetAttribute
	fnMatmulAlgoGetHeuristic
	fnMatmulAlgoCheck
	fnMatmulAlgoInit
	fnMatmulAlgoConfigSetAttribute
	fnMatmulAlgoConfigGetAttribute
	fnMatmulAlgoCapGetAttribute
	fnMatmul
	numFns
)

// symbols has the exported name of each function; all are required.
var symbols = [numFns]dl.Func{
	fnGetVersion:                   {Name: "cublasLtGetVersion"},
	fnCreate:                       {Name: "cublasLtCreate"},
	fnDestroy:                      {Name: "cublasLtDestroy"},
	fnMatmulDescCreate:             {Name: "cublasLtMatmulDescCreate"},
	fnMatmulDescDestroy:            {Name: "cublasLtMatmulDescDestroy"},
	fnMatmulDescSetAttribute:       {Name: "cublasLtMatmulDescSetAttribute"},
	fnMatrixLayoutCreate:           {Name: "cublasLtMatrixLayoutCreate"},
	fnMatrixLayoutDestroy:          {Name: "cublasLtMatrixLayoutDestroy"},
	fnMatrixLayoutSetAttribute:     {Name: "cublasLtMatrixLayoutSetAttribute"},
	fnMatmulPreferenceCreate:       {Name: "cublasLtMatmulPreferenceCreate"},
	fnMatmulPreferenceDestroy:      {Name: "cublasLtMatmulPreferenceDestroy"},
	fnMatmulPreferenceSetAttribute: {Name: "cublasLtMatmulPreferenceSetAttribute"},
	fnMatmulAlgoGetHeuristic:       {Name: "cublasLtMatmulAlgoGetHeuristic"},
	fnMatmulAlgoCheck:              {Name: "cublasLtMatmulAlgoCheck"},
	fnMatmulAlgoInit:               {Name: "cublasLtMatmulAlgoInit"},
	fnMatmulAlgoConfigSetAttribute: {Name: "cublasLtMatmulAlgoConfigSetAttribute"},
	fnMatmulAlgoConfigGetAttribute: {Name: "cublasLtMatmulAlgoConfigGetAttribute"},
	fnMatmulAlgoCapGetAttribute:    {Name: "cublasLtMatmulAlgoCapGetAttribute"},
	fnMatmul:                       {Name: "cublasLtMatmul"},
}

var spec = &dl.Spec{
	Name:    "cuBLASLt",
	Needed:  "12.0",
	Env:     env.LibCUBLASLt,
	Sonames: []string{"libcublasLt.so.13", "libcublasLt.so.12"},
	Folders: dl.Toolkit,
	Wheels:  []string{"cu13/lib", "cublas/lib"},
}

// Lib is the loaded cuBLASLt. It implements API.
type Lib struct{ dl.Table[fn, Result] }

var _ API = (*Lib)(nil)

// Open loads cuBLASLt, once per process. The error is a *dl.Error when there is none and a
// *dl.VersionError when it lacks functions; both match errors.ErrUnsupported.
func Open() (*Lib, error) { return opened() }

var opened = dl.Once(spec, newLib)

func newLib(find dl.Resolver, path string) (*Lib, error) {
	t, err := dl.Require[fn](find, path, spec, symbols[:], cublasapi.NotSupported)
	return &Lib{t}, err
}

// The methods below have no comments: each one calls the C function of the same name.

// GetVersion returns a size_t, whose low half has the number.
func (l *Lib) GetVersion() uintptr { return uintptr(uint32(l.Call(fnGetVersion, dl.Get()))) }

func (l *Lib) Create() (Handle, Result) {
	h, r := l.Call1(fnCreate, dl.Get().Out())
	return Handle(h), r
}

func (l *Lib) Destroy(h Handle) Result { return l.Call(fnDestroy, dl.Get().In(uintptr(h))) }

func (l *Lib) MatmulDescCreate(compute ComputeType, scale DType) (MatmulDesc, Result) {
	d, r := l.Call1(fnMatmulDescCreate, dl.Get().Out().In(uintptr(compute), uintptr(scale)))
	return MatmulDesc(d), r
}

func (l *Lib) MatmulDescDestroy(d MatmulDesc) Result {
	return l.Call(fnMatmulDescDestroy, dl.Get().In(uintptr(d)))
}

func (l *Lib) MatmulDescSetAttribute(d MatmulDesc, a DescAttribute, p unsafe.Pointer, bytes uintptr) Result {
	return l.Call(fnMatmulDescSetAttribute, dl.Get().In(uintptr(d), uintptr(a)).Ptr(p).In(bytes))
}

func (l *Lib) MatrixLayoutCreate(t DType, rows, cols uint64, ld int64) (MatrixLayout, Result) {
	x, r := l.Call1(fnMatrixLayoutCreate, dl.Get().Out().In(uintptr(t), uintptr(rows), uintptr(cols), uintptr(ld)))
	return MatrixLayout(x), r
}

func (l *Lib) MatrixLayoutDestroy(x MatrixLayout) Result {
	return l.Call(fnMatrixLayoutDestroy, dl.Get().In(uintptr(x)))
}

func (l *Lib) MatrixLayoutSetAttribute(x MatrixLayout, a LayoutAttribute, p unsafe.Pointer, bytes uintptr) Result {
	return l.Call(fnMatrixLayoutSetAttribute, dl.Get().In(uintptr(x), uintptr(a)).Ptr(p).In(bytes))
}

func (l *Lib) MatmulPreferenceCreate() (Preference, Result) {
	p, r := l.Call1(fnMatmulPreferenceCreate, dl.Get().Out())
	return Preference(p), r
}

func (l *Lib) MatmulPreferenceDestroy(p Preference) Result {
	return l.Call(fnMatmulPreferenceDestroy, dl.Get().In(uintptr(p)))
}

func (l *Lib) MatmulPreferenceSetAttribute(p Preference, a PreferenceAttribute, v unsafe.Pointer, bytes uintptr) Result {
	return l.Call(fnMatmulPreferenceSetAttribute, dl.Get().In(uintptr(p), uintptr(a)).Ptr(v).In(bytes))
}

// with returns the first arguments of a call for an operation.
func with(h Handle, o *Operation) *dl.Frame {
	return dl.Get().In(uintptr(h), uintptr(o.Desc), uintptr(o.A), uintptr(o.B), uintptr(o.C), uintptr(o.D))
}

func (l *Lib) MatmulAlgoGetHeuristic(h Handle, o *Operation, p Preference, results []HeuristicResult) (int32, Result) {
	n, r := l.Call1(fnMatmulAlgoGetHeuristic, with(h, o).In(uintptr(p), uintptr(len(results))).
		Ptr(unsafe.Pointer(unsafe.SliceData(results))).Out())
	return int32(n), r
}

func (l *Lib) MatmulAlgoCheck(h Handle, o *Operation, algo *Algo, x *HeuristicResult) Result {
	return l.Call(fnMatmulAlgoCheck, with(h, o).Ptr(unsafe.Pointer(algo)).Ptr(unsafe.Pointer(x)))
}

// in appends the types to the arguments of a call.
func (t *Types) in(f *dl.Frame) *dl.Frame {
	return f.In(uintptr(t.Compute), uintptr(t.Scale), uintptr(t.A), uintptr(t.B), uintptr(t.C), uintptr(t.D))
}

func (l *Lib) MatmulAlgoInit(h Handle, t *Types, id int32, algo *Algo) Result {
	return l.Call(fnMatmulAlgoInit, t.in(dl.Get().In(uintptr(h))).In(uintptr(id)).Ptr(unsafe.Pointer(algo)))
}

func (l *Lib) MatmulAlgoConfigSetAttribute(algo *Algo, a ConfigAttribute, p unsafe.Pointer, bytes uintptr) Result {
	return l.Call(fnMatmulAlgoConfigSetAttribute, dl.Get().Ptr(unsafe.Pointer(algo)).In(uintptr(a)).Ptr(p).In(bytes))
}

func (l *Lib) MatmulAlgoConfigGetAttribute(algo *Algo, a ConfigAttribute, p unsafe.Pointer, bytes uintptr) (uintptr, Result) {
	n, r := l.Call1(fnMatmulAlgoConfigGetAttribute, dl.Get().Ptr(unsafe.Pointer(algo)).In(uintptr(a)).Ptr(p).In(bytes).Out())
	return uintptr(n), r
}

func (l *Lib) MatmulAlgoCapGetAttribute(algo *Algo, a CapAttribute, p unsafe.Pointer, bytes uintptr) (uintptr, Result) {
	n, r := l.Call1(fnMatmulAlgoCapGetAttribute, dl.Get().Ptr(unsafe.Pointer(algo)).In(uintptr(a)).Ptr(p).In(bytes).Out())
	return uintptr(n), r
}

func (l *Lib) Matmul(h Handle, d MatmulDesc, alpha Scalar, a, b Matrix, beta Scalar, c, out Matrix, algo *Algo,
	workspace cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) Result {
	f := dl.Get().In(uintptr(h), uintptr(d))
	alpha.Add(f).In(uintptr(a.Ptr), uintptr(a.Layout), uintptr(b.Ptr), uintptr(b.Layout))
	beta.Add(f).In(uintptr(c.Ptr), uintptr(c.Layout), uintptr(out.Ptr), uintptr(out.Layout)).
		Ptr(unsafe.Pointer(algo)).In(uintptr(workspace), bytes, uintptr(s))
	return l.Call(fnMatmul, f)
}
