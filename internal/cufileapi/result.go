package cufileapi

import (
	"strconv"
	"syscall"

	"github.com/gochorus/chorus/internal/cudadrv"
)

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
