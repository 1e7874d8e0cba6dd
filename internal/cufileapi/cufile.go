package cufileapi

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
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
