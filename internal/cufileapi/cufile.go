// Package cufileapi is the API of cuFile (GPUDirect Storage): one method for each C
// function, with the C names without their cuFile prefix, C types and no policy.
//
// API is the interface that package gds programs against. Lib calls the loaded
// libcufile.so.0; the virtual devices implement the same interface over virtual device
// memory and real files. A function that the loaded library lacks returns MissingSymbol.
//
// This package configures nothing. cuFile is configured by parameters that are set before
// DriverOpen, by the environment (CUFILE_ENV_PATH_JSON and others) and by
// /etc/cufile.json, in this order of precedence. Unless one of these sets another path,
// the library writes cufile.log into the working directory of the process.
//
// Calls may be made from any thread at the same time. Calls with device memory need the
// context of its device bound to the calling thread. No call is ordered with streams.
package cufileapi

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/env"
)

// Descr is CUfileDescr_t of a file descriptor.
type Descr struct {
	Type  int32
	_     int32
	FD    int32 // of a union with a pointer
	_     int32
	FSOps uintptr // of file systems in user space
}

// The kinds of a Descr.
const (
	OpaqueFD    int32 = 1
	OpaqueWin32 int32 = 2
	UserspaceFS int32 = 3
)

// Flags of BufRegister.
const (
	RDMARegister        int32 = 1
	RDMARelaxedOrdering int32 = 2
)

// StringParam is CUFileStringConfigParameter_t.
type StringParam int32

// The parameters that are texts.
const (
	LoggingLevel StringParam = iota // ERROR, WARN, NOTICE, INFO, DEBUG or TRACE
	EnvLogfilePath
	LogDir
	NumStringParams
)

// Handle is CUfileHandle_t, a registered file.
type Handle uintptr

// API is the part of cuFile that Chorus uses. Device memory is given by its address; sizes
// and offsets are in bytes.
type API interface {
	GetVersion() (int32, Result) // 1000·major + 10·minor: 1150 is 1.15

	// The driver is reference-counted by DriverOpen and DriverClose. Registering a file or a
	// buffer opens it if it is closed.
	DriverOpen() Result
	DriverClose() Result // cuFileDriverClose_v2
	// SetParameterString sets a parameter of the next DriverOpen, while the driver is closed.
	SetParameterString(p StringParam, v string) Result

	// A file descriptor is registered by its number, once. It must stay open until
	// HandleDeregister, which must not be called while the handle is in use.
	HandleRegister(d *Descr) (Handle, Result)
	HandleDeregister(h Handle)
	// Registering memory is optional. Registered memory must be deregistered before it is
	// freed.
	BufRegister(p cudadrv.DevicePtr, bytes uintptr, flags int32) Result
	BufDeregister(p cudadrv.DevicePtr) Result

	// Read and Write return when the bytes have arrived. They are not ordered with any
	// stream: the caller must have waited for other uses of the memory. For registered
	// memory, base is the registered address. A transfer that ends early, for example at
	// the end of the file, is not an error. The error is a syscall.Errno or a Result.
	Read(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error)
	Write(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error)
}

// Func names a function of cuFile, for Has and the symbol table.
type Func int

// The functions, ordered as in cufile.h.
const (
	FuncHandleRegister Func = iota
	FuncHandleDeregister
	FuncBufRegister
	FuncBufDeregister
	FuncRead
	FuncWrite
	FuncDriverOpen
	FuncDriverClose
	FuncGetVersion
	FuncSetParameterString
	NumFuncs
)

// symbols has the C name and the cuFile version that first had the function. Those
// of 1.4 and before are required; Open fails without them.
var symbols = [NumFuncs]dl.Versioned{
	FuncHandleRegister:     {"cuFileHandleRegister", 1000},
	FuncHandleDeregister:   {"cuFileHandleDeregister", 1000},
	FuncBufRegister:        {"cuFileBufRegister", 1000},
	FuncBufDeregister:      {"cuFileBufDeregister", 1000},
	FuncRead:               {"cuFileRead", 1000},
	FuncWrite:              {"cuFileWrite", 1000},
	FuncDriverOpen:         {"cuFileDriverOpen", 1000},
	FuncDriverClose:        {"cuFileDriverClose_v2", 1040},
	FuncGetVersion:         {"cuFileGetVersion", 1080},
	FuncSetParameterString: {"cuFileSetParameterString", 1140},
}

// Name is the C name, such as cuFileRead.
func (f Func) Name() string { return symbols[f].Name }

// Since is the version code of the first cuFile that has the function.
func (f Func) Since() int32 { return symbols[f].Since }

// minVersion is the oldest supported cuFile, the version in CUDA 11.7. Every function of
// that version is required.
const (
	minVersion     = 1040
	minVersionText = "1.4"
)

var spec = &dl.Spec{
	Name:    "cuFile",
	Env:     env.LibCUFILE,
	Sonames: []string{"libcufile.so.0", "libcufile.so"},
	Folders: dl.Toolkit,
	Wheels:  []string{"cu13/lib", "cufile/lib"},
}

// Lib is the loaded libcufile.so.0. It implements API.
type Lib struct {
	dl.Table[Func, Result]
	version int32
}

// Open loads cuFile, once per process. The error is a *dl.Error when there is none
// and a *dl.VersionError when it is too old; both match errors.ErrUnsupported.
func Open() (*Lib, error) { return opened() }

var opened = dl.Once(spec, newLib)

func newLib(find dl.Resolver, path string) (*Lib, error) {
	t, missing := dl.NewTable[Func](find, path, dl.Since(symbols[:], minVersion), MissingSymbol)
	l := &Lib{Table: t, version: minVersion} // which could not tell it
	if len(missing) > 0 {
		return nil, &dl.VersionError{Library: "cuFile", Path: path, Needed: minVersionText, Missing: missing}
	}
	if v, r := l.GetVersion(); r == Success {
		l.version = v
	}
	return l, nil
}

// Version returns the version code of the loaded library.
func (l *Lib) Version() int32 { return l.version }

// VersionText writes a version code: 1150 is "1.15".
func VersionText(code int32) string { return fmt.Sprintf("%d.%d", code/1000, code%1000/10) }

func (l *Lib) GetVersion() (int32, Result) {
	v, r := l.Call1(FuncGetVersion, dl.Get().Out())
	return int32(v), r
}

func (l *Lib) DriverOpen() Result { return l.Call(FuncDriverOpen, dl.Get()) }

func (l *Lib) DriverClose() Result { return l.Call(FuncDriverClose, dl.Get()) }

func (l *Lib) SetParameterString(p StringParam, v string) Result {
	return l.Call(FuncSetParameterString, dl.Get().In(uintptr(p)).String(v))
}

var _ API = (*Lib)(nil)

// The methods of Lib have no comments: each is the C function of its
// name.

func (l *Lib) HandleRegister(d *Descr) (Handle, Result) {
	h, r := l.Call1(FuncHandleRegister, dl.Get().Out().Ptr(unsafe.Pointer(d)))
	return Handle(h), r
}

func (l *Lib) HandleDeregister(h Handle) { l.Call(FuncHandleDeregister, dl.Get().In(uintptr(h))) }

func (l *Lib) BufRegister(p cudadrv.DevicePtr, bytes uintptr, flags int32) Result {
	return l.Call(FuncBufRegister, dl.Get().In(uintptr(p), bytes, uintptr(flags)))
}

func (l *Lib) BufDeregister(p cudadrv.DevicePtr) Result {
	return l.Call(FuncBufDeregister, dl.Get().In(uintptr(p)))
}

func (l *Lib) Read(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	n, errno := l.CallErrno(FuncRead, transfer(h, base, bytes, fileOffset, devOffset))
	return transferred(int64(n), errno)
}

func (l *Lib) Write(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) (int64, error) {
	n, errno := l.CallErrno(FuncWrite, transfer(h, base, bytes, fileOffset, devOffset))
	return transferred(int64(n), errno)
}

func transfer(h Handle, base cudadrv.DevicePtr, bytes uintptr, fileOffset, devOffset int64) *dl.Frame {
	return dl.Get().In(uintptr(h), uintptr(base), bytes, uintptr(fileOffset), uintptr(devOffset))
}
