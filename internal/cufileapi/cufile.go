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
	"strconv"
	"syscall"
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

// Result is CUfileError_t as it comes back in a register: cuFile's code in the low
// half and CUDA's result, if it has one, in the high half. Its Error text is the C
// name. errors.Is compares cuFile's code with the constants, and CUDA's with those
// of package cudadrv.
type Result uint64

// The results, with the values of cufile.h. MissingSymbol is Chorus's own: the
// loaded library does not have the function.
const (
	MissingSymbol            Result = 0xffffffff
	Success                  Result = 0
	DriverNotInitialized     Result = 5001
	DriverInvalidProps       Result = 5002
	DriverUnsupportedLimit   Result = 5003
	DriverVersionMismatch    Result = 5004
	DriverVersionReadError   Result = 5005
	DriverClosing            Result = 5006
	PlatformNotSupported     Result = 5007
	IONotSupported           Result = 5008
	DeviceNotSupported       Result = 5009
	NvfsDriverError          Result = 5010
	CUDADriverError          Result = 5011
	CUDAPointerInvalid       Result = 5012
	CUDAMemoryTypeInvalid    Result = 5013
	CUDAPointerRangeError    Result = 5014
	CUDAContextMismatch      Result = 5015
	InvalidMappingSize       Result = 5016
	InvalidMappingRange      Result = 5017
	InvalidFileType          Result = 5018
	InvalidFileOpenFlag      Result = 5019
	DIONotSet                Result = 5020
	InvalidValue             Result = 5022
	MemoryAlreadyRegistered  Result = 5023
	MemoryNotRegistered      Result = 5024
	PermissionDenied         Result = 5025
	DriverAlreadyOpen        Result = 5026
	HandleNotRegistered      Result = 5027
	HandleAlreadyRegistered  Result = 5028
	DeviceNotFound           Result = 5029
	InternalError            Result = 5030
	GetNewFDFailed           Result = 5031
	NvfsSetupError           Result = 5033
	IODisabled               Result = 5034
	BatchSubmitFailed        Result = 5035
	GPUMemoryPinningFailed   Result = 5036
	BatchFull                Result = 5037
	AsyncNotSupported        Result = 5038
	InternalBatchSetUpError  Result = 5039
	InternalBatchSubmitError Result = 5040
	InternalBatchStatusError Result = 5041
	InternalBatchCancelError Result = 5042
	NoMemError               Result = 5043
	IOError                  Result = 5044
	InternalBufRegisterError Result = 5045
	HashOprError             Result = 5046
	InvalidContextError      Result = 5047
	NvfsInternalDriverError  Result = 5048
	BatchNoCompatError       Result = 5049
	IOMaxError               Result = 5050
)

// baseErr is CUFILEOP_BASE_ERR: cuFile's codes are above it, and every errno below.
const baseErr = 5000

var results = map[Result]struct{ name, meaning string }{
	MissingSymbol:            {"missing symbol", "the loaded cuFile does not have this function"},
	Success:                  {"CU_FILE_SUCCESS", "no error"},
	DriverNotInitialized:     {"CU_FILE_DRIVER_NOT_INITIALIZED", "cuFile's driver is not open, or could not be opened"},
	DriverInvalidProps:       {"CU_FILE_DRIVER_INVALID_PROPS", "a property of the driver is invalid"},
	DriverUnsupportedLimit:   {"CU_FILE_DRIVER_UNSUPPORTED_LIMIT", "a property of the driver is out of its range"},
	DriverVersionMismatch:    {"CU_FILE_DRIVER_VERSION_MISMATCH", "the nvidia-fs kernel driver does not fit this cuFile"},
	DriverVersionReadError:   {"CU_FILE_DRIVER_VERSION_READ_ERROR", "the version of the nvidia-fs kernel driver cannot be read"},
	DriverClosing:            {"CU_FILE_DRIVER_CLOSING", "cuFile's driver is being closed"},
	PlatformNotSupported:     {"CU_FILE_PLATFORM_NOT_SUPPORTED", "GPUDirect Storage does not support this machine"},
	IONotSupported:           {"CU_FILE_IO_NOT_SUPPORTED", "GPUDirect Storage does not support this file or its file system"},
	DeviceNotSupported:       {"CU_FILE_DEVICE_NOT_SUPPORTED", "GPUDirect Storage does not support this GPU"},
	NvfsDriverError:          {"CU_FILE_NVFS_DRIVER_ERROR", "the nvidia-fs kernel driver refused the request"},
	CUDADriverError:          {"CU_FILE_CUDA_DRIVER_ERROR", "a call of the CUDA driver failed"},
	CUDAPointerInvalid:       {"CU_FILE_CUDA_POINTER_INVALID", "the address is not in device memory"},
	CUDAMemoryTypeInvalid:    {"CU_FILE_CUDA_MEMORY_TYPE_INVALID", "this kind of memory is not supported"},
	CUDAPointerRangeError:    {"CU_FILE_CUDA_POINTER_RANGE_ERROR", "the range runs past the end of the allocation"},
	CUDAContextMismatch:      {"CU_FILE_CUDA_CONTEXT_MISMATCH", "the memory does not belong to the current context"},
	InvalidMappingSize:       {"CU_FILE_INVALID_MAPPING_SIZE", "the range is larger than the limit for pinned memory"},
	InvalidMappingRange:      {"CU_FILE_INVALID_MAPPING_RANGE", "the range runs past the end of the registered memory"},
	InvalidFileType:          {"CU_FILE_INVALID_FILE_TYPE", "it is neither a regular file nor a block device"},
	InvalidFileOpenFlag:      {"CU_FILE_INVALID_FILE_OPEN_FLAG", "the file was opened with flags that do not allow this"},
	DIONotSet:                {"CU_FILE_DIO_NOT_SET", "the file was not opened with O_DIRECT"},
	InvalidValue:             {"CU_FILE_INVALID_VALUE", "an argument is invalid"},
	MemoryAlreadyRegistered:  {"CU_FILE_MEMORY_ALREADY_REGISTERED", "the memory is registered already"},
	MemoryNotRegistered:      {"CU_FILE_MEMORY_NOT_REGISTERED", "no memory was registered at this address"},
	PermissionDenied:         {"CU_FILE_PERMISSION_DENIED", "the process may not use the driver or the file"},
	DriverAlreadyOpen:        {"CU_FILE_DRIVER_ALREADY_OPEN", "cuFile's driver is open already"},
	HandleNotRegistered:      {"CU_FILE_HANDLE_NOT_REGISTERED", "the file descriptor is not registered"},
	HandleAlreadyRegistered:  {"CU_FILE_HANDLE_ALREADY_REGISTERED", "the file descriptor is registered already"},
	DeviceNotFound:           {"CU_FILE_DEVICE_NOT_FOUND", "there is no such GPU"},
	InternalError:            {"CU_FILE_INTERNAL_ERROR", "cuFile failed inside: its log may say why"},
	GetNewFDFailed:           {"CU_FILE_GETNEWFD_FAILED", "cuFile could not open the file once more"},
	NvfsSetupError:           {"CU_FILE_NVFS_SETUP_ERROR", "the nvidia-fs kernel driver could not be set up"},
	IODisabled:               {"CU_FILE_IO_DISABLED", "cuFile's configuration disables GPUDirect Storage for this file"},
	BatchSubmitFailed:        {"CU_FILE_BATCH_SUBMIT_FAILED", "a batch could not be submitted"},
	GPUMemoryPinningFailed:   {"CU_FILE_GPU_MEMORY_PINNING_FAILED", "device memory could not be pinned"},
	BatchFull:                {"CU_FILE_BATCH_FULL", "the batch has no room for more transfers"},
	AsyncNotSupported:        {"CU_FILE_ASYNC_NOT_SUPPORTED", "stream-ordered transfers need parallel I/O and I/O threads, set before the driver is opened"},
	InternalBatchSetUpError:  {"CU_FILE_INTERNAL_BATCH_SETUP_ERROR", "a batch could not be set up"},
	InternalBatchSubmitError: {"CU_FILE_INTERNAL_BATCH_SUBMIT_ERROR", "a batch was refused: an argument is invalid, or it has no room"},
	InternalBatchStatusError: {"CU_FILE_INTERNAL_BATCH_GETSTATUS_ERROR", "the status of a batch could not be read"},
	InternalBatchCancelError: {"CU_FILE_INTERNAL_BATCH_CANCEL_ERROR", "a batch could not be canceled"},
	NoMemError:               {"CU_FILE_NOMEM_ERROR", "cuFile is out of memory"},
	IOError:                  {"CU_FILE_IO_ERROR", "reading or writing the file failed"},
	InternalBufRegisterError: {"CU_FILE_INTERNAL_BUF_REGISTER_ERROR", "memory could not be registered"},
	HashOprError:             {"CU_FILE_HASH_OPR_ERROR", "a table of cuFile's own failed"},
	InvalidContextError:      {"CU_FILE_INVALID_CONTEXT_ERROR", "the current context is invalid"},
	NvfsInternalDriverError:  {"CU_FILE_NVFS_INTERNAL_DRIVER_ERROR", "the nvidia-fs kernel driver failed inside"},
	BatchNoCompatError:       {"CU_FILE_BATCH_NOCOMPAT_ERROR", "the batch needs the compatibility mode, which is off"},
	IOMaxError:               {"CU_FILE_IO_MAX_ERROR", "the greatest of cuFile's codes, which no call returns"},
}

// CUDAFailed returns the result of a call of cuFile that failed for a call of the
// CUDA driver.
func CUDAFailed(r cudadrv.Result) Result { return CUDADriverError | Result(uint32(r))<<32 }

// Code is cuFile's half, which compares with the constants.
func (r Result) Code() Result { return r & 0xffffffff }

// CUDA is CUDA's half.
func (r Result) CUDA() cudadrv.Result { return cudadrv.Result(int32(r >> 32)) }

// Error returns the C name, such as CU_FILE_IO_NOT_SUPPORTED, with CUDA's where
// there is one.
func (r Result) Error() string {
	name := "cufile error " + strconv.Itoa(int(int32(r)))
	if e, ok := results[r.Code()]; ok {
		name = e.name
	}
	if c := r.CUDA(); c != cudadrv.Success {
		name += ": " + c.Error()
	}
	return name
}

// Meaning explains cuFile's code in a sentence without a full stop.
func (r Result) Meaning() string { return results[r.Code()].meaning }

// Is reports whether target is this code of cuFile.
func (r Result) Is(target error) bool {
	t, ok := target.(Result)
	return ok && t == r.Code()
}

// Unwrap returns CUDA's result, or nil.
func (r Result) Unwrap() error {
	if c := r.CUDA(); c != cudadrv.Success {
		return c
	}
	return nil
}

// transferred decodes the result of Read and Write. -1 means that the cause is in errno,
// which may also be one of the library's codes.
func transferred(n int64, errno syscall.Errno) (int64, error) {
	switch {
	case n >= 0:
		return n, nil
	case n < -1:
		return 0, Result(uint32(-n))
	case errno == 0:
		return 0, syscall.EIO
	}
	return 0, failure(int64(errno))
}

func failure(n int64) error {
	if n > baseErr {
		return Result(uint32(n))
	}
	return syscall.Errno(n)
}
