package cudacc

import (
	"strconv"
	"unsafe"

	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// fn numbers the functions of libnvrtc that Lib calls.
type fn int

const (
	fnVersion fn = iota
	fnGetNumSupportedArchs
	fnGetSupportedArchs
	fnCreateProgram
	fnCompileProgram
	fnGetCUBINSize
	fnGetCUBIN
	fnGetPTXSize
	fnGetPTX
	fnGetProgramLogSize
	fnGetProgramLog
	fnDestroyProgram
	numFns
)

// symbols has the exported name of each function; all are required.
var symbols = [numFns]dl.Func{
	fnVersion:              {Name: "nvrtcVersion"},
	fnGetNumSupportedArchs: {Name: "nvrtcGetNumSupportedArchs"},
	fnGetSupportedArchs:    {Name: "nvrtcGetSupportedArchs"},
	fnCreateProgram:        {Name: "nvrtcCreateProgram"},
	fnCompileProgram:       {Name: "nvrtcCompileProgram"},
	fnGetCUBINSize:         {Name: "nvrtcGetCUBINSize"},
	fnGetCUBIN:             {Name: "nvrtcGetCUBIN"},
	fnGetPTXSize:           {Name: "nvrtcGetPTXSize"},
	fnGetPTX:               {Name: "nvrtcGetPTX"},
	fnGetProgramLogSize:    {Name: "nvrtcGetProgramLogSize"},
	fnGetProgramLog:        {Name: "nvrtcGetProgramLog"},
	fnDestroyProgram:       {Name: "nvrtcDestroyProgram"},
}

var spec = &dl.Spec{
	Name:    "NVRTC",
	Needed:  "12.0",
	Env:     env.LibNVRTC,
	Sonames: []string{"libnvrtc.so.13", "libnvrtc.so.12"},
	Folders: dl.Toolkit,
	Wheels:  []string{"cu13/lib", "cuda_nvrtc/lib"},
}

// Lib is the loaded NVRTC. It implements NVRTC.
type Lib struct{ dl.Table[fn, Result] }

var _ NVRTC = (*Lib)(nil)

// OpenNVRTC loads NVRTC, once per process. The error is a *dl.Error when there is
// none and a *dl.VersionError when it lacks functions; both match
// errors.ErrUnsupported.
func OpenNVRTC() (*Lib, error) { return opened() }

var opened = dl.Once(spec, newLib)

func newLib(find dl.Resolver, path string) (*Lib, error) {
	t, err := dl.Require[fn](find, path, spec, symbols[:], Success)
	return &Lib{t}, err
}

// The methods below have no comments: each is the C function of
// its name.

func (l *Lib) Version() (major, minor int32, r Result) {
	v, w, r := l.Call2(fnVersion, dl.Get().Out().Out())
	return int32(v), int32(w), r
}

func (l *Lib) SupportedArchs() ([]int32, Result) {
	n, r := l.Call1(fnGetNumSupportedArchs, dl.Get().Out())
	if r != Success || n == 0 {
		return nil, r
	}
	archs := make([]int32, int32(n))
	return archs, l.Call(fnGetSupportedArchs, dl.Get().Ptr(unsafe.Pointer(&archs[0])))
}

func (l *Lib) CreateProgram(source, name string) (NVRTCProgram, Result) {
	p, r := l.Call1(fnCreateProgram, dl.Get().Out().String(source).String(name).In(0, 0, 0)) // no headers
	return NVRTCProgram(p), r
}

func (l *Lib) CompileProgram(p NVRTCProgram, options []string) Result {
	f := dl.Get().In(uintptr(p))
	return l.Call(fnCompileProgram, f.Strings(options))
}

func (l *Lib) GetCUBIN(p NVRTCProgram) ([]byte, Result) { return l.get(p, fnGetCUBINSize, fnGetCUBIN) }

func (l *Lib) GetPTX(p NVRTCProgram) ([]byte, Result) { return l.get(p, fnGetPTXSize, fnGetPTX) }

func (l *Lib) GetProgramLog(p NVRTCProgram) (string, Result) {
	b, r := l.get(p, fnGetProgramLogSize, fnGetProgramLog)
	return dl.CString(b), r
}

func (l *Lib) DestroyProgram(p NVRTCProgram) Result {
	return l.Call(fnDestroyProgram, dl.Get().InOut(uint64(p))) // it zeroes the handle
}

// get fetches a result of a size that C tells.
func (l *Lib) get(p NVRTCProgram, size, data fn) ([]byte, Result) {
	n, r := l.Call1(size, dl.Get().In(uintptr(p)).Out())
	if r != Success || n == 0 {
		return nil, r
	}
	b := make([]byte, n)
	return b, l.Call(data, dl.Get().In(uintptr(p)).Ptr(unsafe.Pointer(&b[0])))
}

// Result is nvrtcResult. Its Error text is the C name.
type Result int32

// The results that Chorus tells apart.
const (
	Success            Result = 0
	ErrorInvalidOption Result = 5
	ErrorCompilation   Result = 6
)

// names has the C names as nvrtc.h numbers them, from 0.
var names = []string{"NVRTC_SUCCESS", "NVRTC_ERROR_OUT_OF_MEMORY", "NVRTC_ERROR_PROGRAM_CREATION_FAILURE",
	"NVRTC_ERROR_INVALID_INPUT", "NVRTC_ERROR_INVALID_PROGRAM", "NVRTC_ERROR_INVALID_OPTION",
	"NVRTC_ERROR_COMPILATION", "NVRTC_ERROR_BUILTIN_OPERATION_FAILURE",
	"NVRTC_ERROR_NO_NAME_EXPRESSIONS_AFTER_COMPILATION", "NVRTC_ERROR_NO_LOWERED_NAMES_BEFORE_COMPILATION",
	"NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID", "NVRTC_ERROR_INTERNAL_ERROR", "NVRTC_ERROR_TIME_FILE_WRITE_FAILED",
	"NVRTC_ERROR_NO_PCH_CREATE_ATTEMPTED", "NVRTC_ERROR_PCH_CREATE_HEAP_EXHAUSTED", "NVRTC_ERROR_PCH_CREATE",
	"NVRTC_ERROR_CANCELLED", "NVRTC_ERROR_TIME_TRACE_FILE_WRITE_FAILED"}

// Error returns the C name, such as NVRTC_ERROR_COMPILATION.
func (r Result) Error() string {
	if r >= 0 && int(r) < len(names) {
		return names[r]
	}
	return "nvrtcResult " + strconv.Itoa(int(r))
}

// NVRTCProgram is nvrtcProgram.
type NVRTCProgram uintptr

// NVRTC is the part of NVRTC that Chorus uses. None of its calls needs a context.
type NVRTC interface {
	Version() (major, minor int32, r Result)
	SupportedArchs() ([]int32, Result) // in ascending order; 90 is sm_90
	CreateProgram(source, name string) (NVRTCProgram, Result)
	CompileProgram(p NVRTCProgram, options []string) Result
	GetCUBIN(p NVRTCProgram) ([]byte, Result)
	GetPTX(p NVRTCProgram) ([]byte, Result)
	GetProgramLog(p NVRTCProgram) (string, Result)
	DestroyProgram(p NVRTCProgram) Result
}
