package cudadrv

import "strconv"

// Result is CUresult. Its Error text is the C name.
type Result int32

// The results, with the values of cuda.h.
const (
	Success                           Result = 0
	ErrorInvalidValue                 Result = 1
	ErrorOutOfMemory                  Result = 2
	ErrorNotInitialized               Result = 3
	ErrorDeinitialized                Result = 4
	ErrorProfilerDisabled             Result = 5
	ErrorProfilerNotInitialized       Result = 6
	ErrorProfilerAlreadyStarted       Result = 7
	ErrorProfilerAlreadyStopped       Result = 8
	ErrorStubLibrary                  Result = 34
	ErrorCallRequiresNewerDriver      Result = 36
	ErrorDeviceUnavailable            Result = 46
	ErrorNoDevice                     Result = 100
	ErrorInvalidDevice                Result = 101
	ErrorDeviceNotLicensed            Result = 102
	ErrorInvalidImage                 Result = 200
	ErrorInvalidContext               Result = 201
	ErrorContextAlreadyCurrent        Result = 202
	ErrorMapFailed                    Result = 205
	ErrorUnmapFailed                  Result = 206
	ErrorArrayIsMapped                Result = 207
	ErrorAlreadyMapped                Result = 208
	ErrorNoBinaryForGPU               Result = 209
	ErrorAlreadyAcquired              Result = 210
	ErrorNotMapped                    Result = 211
	ErrorNotMappedAsArray             Result = 212
	ErrorNotMappedAsPointer           Result = 213
	ErrorECCUncorrectable             Result = 214
	ErrorUnsupportedLimit             Result = 215
	ErrorContextAlreadyInUse          Result = 216
	ErrorPeerAccessUnsupported        Result = 217
	ErrorInvalidPTX                   Result = 218
	ErrorInvalidGraphicsContext       Result = 219
	ErrorNVLinkUncorrectable          Result = 220
	ErrorJITCompilerNotFound          Result = 221
	ErrorUnsupportedPTXVersion        Result = 222
	ErrorJITCompilationDisabled       Result = 223
	ErrorUnsupportedExecAffinity      Result = 224
	ErrorUnsupportedDevsideSync       Result = 225
	ErrorContained                    Result = 226
	ErrorInvalidSource                Result = 300
	ErrorFileNotFound                 Result = 301
	ErrorSharedObjectSymbolNotFound   Result = 302
	ErrorSharedObjectInitFailed       Result = 303
	ErrorOperatingSystem              Result = 304
	ErrorInvalidHandle                Result = 400
	ErrorIllegalState                 Result = 401
	ErrorLossyQuery                   Result = 402
	ErrorNotFound                     Result = 500
	ErrorNotReady                     Result = 600
	ErrorIllegalAddress               Result = 700
	ErrorLaunchOutOfResources         Result = 701
	ErrorLaunchTimeout                Result = 702
	ErrorLaunchIncompatibleTexturing  Result = 703
	ErrorPeerAccessAlreadyEnabled     Result = 704
	ErrorPeerAccessNotEnabled         Result = 705
	ErrorPrimaryContextActive         Result = 708
	ErrorContextIsDestroyed           Result = 709
	ErrorAssert                       Result = 710
	ErrorTooManyPeers                 Result = 711
	ErrorHostMemoryAlreadyRegistered  Result = 712
	ErrorHostMemoryNotRegistered      Result = 713
	ErrorHardwareStackError           Result = 714
	ErrorIllegalInstruction           Result = 715
	ErrorMisalignedAddress            Result = 716
	ErrorInvalidAddressSpace          Result = 717
	ErrorInvalidPC                    Result = 718
	ErrorLaunchFailed                 Result = 719
	ErrorCooperativeLaunchTooLarge    Result = 720
	ErrorTensorMemoryLeak             Result = 721
	ErrorNotPermitted                 Result = 800
	ErrorNotSupported                 Result = 801
	ErrorSystemNotReady               Result = 802
	ErrorSystemDriverMismatch         Result = 803
	ErrorCompatNotSupportedOnDevice   Result = 804
	ErrorMPSConnectionFailed          Result = 805
	ErrorMPSRPCFailure                Result = 806
	ErrorMPSServerNotReady            Result = 807
	ErrorMPSMaxClientsReached         Result = 808
	ErrorMPSMaxConnectionsReached     Result = 809
	ErrorMPSClientTerminated          Result = 810
	ErrorCDPNotSupported              Result = 811
	ErrorCDPVersionMismatch           Result = 812
	ErrorStreamCaptureUnsupported     Result = 900
	ErrorStreamCaptureInvalidated     Result = 901
	ErrorStreamCaptureMerge           Result = 902
	ErrorStreamCaptureUnmatched       Result = 903
	ErrorStreamCaptureUnjoined        Result = 904
	ErrorStreamCaptureIsolation       Result = 905
	ErrorStreamCaptureImplicit        Result = 906
	ErrorCapturedEvent                Result = 907
	ErrorStreamCaptureWrongThread     Result = 908
	ErrorTimeout                      Result = 909
	ErrorGraphExecUpdateFailure       Result = 910
	ErrorExternalDevice               Result = 911
	ErrorInvalidClusterSize           Result = 912
	ErrorFunctionNotLoaded            Result = 913
	ErrorInvalidResourceType          Result = 914
	ErrorInvalidResourceConfiguration Result = 915
	ErrorKeyRotation                  Result = 916
	ErrorStreamDetached               Result = 917
	ErrorGraphRecaptureFailure        Result = 918
	ErrorUnknown                      Result = 999
)

var results = map[Result]struct{ name, meaning string }{
	Success:                           {"CUDA_SUCCESS", "no error"},
	ErrorInvalidValue:                 {"CUDA_ERROR_INVALID_VALUE", "an argument is outside its range"},
	ErrorOutOfMemory:                  {"CUDA_ERROR_OUT_OF_MEMORY", "the device or host has not enough free memory"},
	ErrorNotInitialized:               {"CUDA_ERROR_NOT_INITIALIZED", "cuInit was not called or failed"},
	ErrorDeinitialized:                {"CUDA_ERROR_DEINITIALIZED", "the driver is shutting down with the process"},
	ErrorProfilerDisabled:             {"CUDA_ERROR_PROFILER_DISABLED", "the profiler is disabled for this run"},
	ErrorProfilerNotInitialized:       {"CUDA_ERROR_PROFILER_NOT_INITIALIZED", "the profiler was not initialised"},
	ErrorProfilerAlreadyStarted:       {"CUDA_ERROR_PROFILER_ALREADY_STARTED", "the profiler runs already"},
	ErrorProfilerAlreadyStopped:       {"CUDA_ERROR_PROFILER_ALREADY_STOPPED", "the profiler was stopped already"},
	ErrorStubLibrary:                  {"CUDA_ERROR_STUB_LIBRARY", "the loaded libcuda is a stub of the toolkit, not a driver"},
	ErrorCallRequiresNewerDriver:      {"CUDA_ERROR_CALL_REQUIRES_NEWER_DRIVER", "the call needs a newer driver"},
	ErrorDeviceUnavailable:            {"CUDA_ERROR_DEVICE_UNAVAILABLE", "the device is in use in exclusive mode or being reset"},
	ErrorNoDevice:                     {"CUDA_ERROR_NO_DEVICE", "no CUDA device is visible to this process"},
	ErrorInvalidDevice:                {"CUDA_ERROR_INVALID_DEVICE", "no device with that ordinal"},
	ErrorDeviceNotLicensed:            {"CUDA_ERROR_DEVICE_NOT_LICENSED", "the device has no licence for this use"},
	ErrorInvalidImage:                 {"CUDA_ERROR_INVALID_IMAGE", "the module image is not valid for any device"},
	ErrorInvalidContext:               {"CUDA_ERROR_INVALID_CONTEXT", "no context is bound to the calling thread, or it is not valid"},
	ErrorContextAlreadyCurrent:        {"CUDA_ERROR_CONTEXT_ALREADY_CURRENT", "the context is bound to the calling thread already"},
	ErrorMapFailed:                    {"CUDA_ERROR_MAP_FAILED", "mapping failed"},
	ErrorUnmapFailed:                  {"CUDA_ERROR_UNMAP_FAILED", "unmapping failed"},
	ErrorArrayIsMapped:                {"CUDA_ERROR_ARRAY_IS_MAPPED", "the array is mapped and cannot be destroyed"},
	ErrorAlreadyMapped:                {"CUDA_ERROR_ALREADY_MAPPED", "the resource is mapped already"},
	ErrorNoBinaryForGPU:               {"CUDA_ERROR_NO_BINARY_FOR_GPU", "the module has no code for this device's compute capability"},
	ErrorAlreadyAcquired:              {"CUDA_ERROR_ALREADY_ACQUIRED", "the resource is acquired already"},
	ErrorNotMapped:                    {"CUDA_ERROR_NOT_MAPPED", "the resource is not mapped"},
	ErrorNotMappedAsArray:             {"CUDA_ERROR_NOT_MAPPED_AS_ARRAY", "the resource is not mapped as an array"},
	ErrorNotMappedAsPointer:           {"CUDA_ERROR_NOT_MAPPED_AS_POINTER", "the resource is not mapped as a pointer"},
	ErrorECCUncorrectable:             {"CUDA_ERROR_ECC_UNCORRECTABLE", "an uncorrectable memory error happened on the device"},
	ErrorUnsupportedLimit:             {"CUDA_ERROR_UNSUPPORTED_LIMIT", "the limit is not supported by the device"},
	ErrorContextAlreadyInUse:          {"CUDA_ERROR_CONTEXT_ALREADY_IN_USE", "the context is bound to another thread"},
	ErrorPeerAccessUnsupported:        {"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "the two devices cannot reach each other's memory"},
	ErrorInvalidPTX:                   {"CUDA_ERROR_INVALID_PTX", "the PTX does not compile"},
	ErrorInvalidGraphicsContext:       {"CUDA_ERROR_INVALID_GRAPHICS_CONTEXT", "the graphics context is not valid"},
	ErrorNVLinkUncorrectable:          {"CUDA_ERROR_NVLINK_UNCORRECTABLE", "an uncorrectable NVLink error happened"},
	ErrorJITCompilerNotFound:          {"CUDA_ERROR_JIT_COMPILER_NOT_FOUND", "the driver's PTX compiler library is missing"},
	ErrorUnsupportedPTXVersion:        {"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the PTX is newer than the driver understands"},
	ErrorJITCompilationDisabled:       {"CUDA_ERROR_JIT_COMPILATION_DISABLED", "compiling PTX at run time is disabled"},
	ErrorUnsupportedExecAffinity:      {"CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY", "the device does not support this execution affinity"},
	ErrorUnsupportedDevsideSync:       {"CUDA_ERROR_UNSUPPORTED_DEVSIDE_SYNC", "the code waits for kernels on the device, which is not supported any more"},
	ErrorContained:                    {"CUDA_ERROR_CONTAINED", "a hardware error was contained to this process; start it again"},
	ErrorInvalidSource:                {"CUDA_ERROR_INVALID_SOURCE", "the source is not valid"},
	ErrorFileNotFound:                 {"CUDA_ERROR_FILE_NOT_FOUND", "the file does not exist"},
	ErrorSharedObjectSymbolNotFound:   {"CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND", "a shared object lacks a symbol"},
	ErrorSharedObjectInitFailed:       {"CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", "a shared object could not be initialised"},
	ErrorOperatingSystem:              {"CUDA_ERROR_OPERATING_SYSTEM", "a call of the operating system failed"},
	ErrorInvalidHandle:                {"CUDA_ERROR_INVALID_HANDLE", "the handle is not valid, or its object was destroyed"},
	ErrorIllegalState:                 {"CUDA_ERROR_ILLEGAL_STATE", "the resource is not in a state that allows this"},
	ErrorLossyQuery:                   {"CUDA_ERROR_LOSSY_QUERY", "the query would lose part of the value"},
	ErrorNotFound:                     {"CUDA_ERROR_NOT_FOUND", "a named symbol or object was not found"},
	ErrorNotReady:                     {"CUDA_ERROR_NOT_READY", "the work before it has not completed"},
	ErrorIllegalAddress:               {"CUDA_ERROR_ILLEGAL_ADDRESS", "a kernel or copy used an address that is not mapped for the device"},
	ErrorLaunchOutOfResources:         {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "the launch needs more registers or threads than the device has"},
	ErrorLaunchTimeout:                {"CUDA_ERROR_LAUNCH_TIMEOUT", "the kernel ran longer than the system allows"},
	ErrorLaunchIncompatibleTexturing:  {"CUDA_ERROR_LAUNCH_INCOMPATIBLE_TEXTURING", "a kernel uses another texturing mode than the context"},
	ErrorPeerAccessAlreadyEnabled:     {"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is enabled already"},
	ErrorPeerAccessNotEnabled:         {"CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access is not enabled"},
	ErrorPrimaryContextActive:         {"CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE", "the primary context is active already"},
	ErrorContextIsDestroyed:           {"CUDA_ERROR_CONTEXT_IS_DESTROYED", "the bound context was destroyed"},
	ErrorAssert:                       {"CUDA_ERROR_ASSERT", "a device-side assert failed"},
	ErrorTooManyPeers:                 {"CUDA_ERROR_TOO_MANY_PEERS", "the device has no room for another peer"},
	ErrorHostMemoryAlreadyRegistered:  {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "the host memory is registered already"},
	ErrorHostMemoryNotRegistered:      {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "the host memory is not registered"},
	ErrorHardwareStackError:           {"CUDA_ERROR_HARDWARE_STACK_ERROR", "the device's call stack is corrupt"},
	ErrorIllegalInstruction:           {"CUDA_ERROR_ILLEGAL_INSTRUCTION", "a kernel executed an illegal instruction"},
	ErrorMisalignedAddress:            {"CUDA_ERROR_MISALIGNED_ADDRESS", "a kernel used a misaligned address"},
	ErrorInvalidAddressSpace:          {"CUDA_ERROR_INVALID_ADDRESS_SPACE", "a kernel used an address of the wrong space"},
	ErrorInvalidPC:                    {"CUDA_ERROR_INVALID_PC", "a kernel jumped to an invalid address"},
	ErrorLaunchFailed:                 {"CUDA_ERROR_LAUNCH_FAILED", "a kernel failed"},
	ErrorCooperativeLaunchTooLarge:    {"CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", "a cooperative kernel has more blocks than fit on the device at once"},
	ErrorTensorMemoryLeak:             {"CUDA_ERROR_TENSOR_MEMORY_LEAK", "a kernel ended without freeing its tensor memory"},
	ErrorNotPermitted:                 {"CUDA_ERROR_NOT_PERMITTED", "the operation is not permitted"},
	ErrorNotSupported:                 {"CUDA_ERROR_NOT_SUPPORTED", "the operation is not supported on this system or device"},
	ErrorSystemNotReady:               {"CUDA_ERROR_SYSTEM_NOT_READY", "the system is not ready; is nvidia-fabricmanager running?"},
	ErrorSystemDriverMismatch:         {"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "the kernel driver and libcuda are of different versions"},
	ErrorCompatNotSupportedOnDevice:   {"CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "the compatibility driver does not support this device"},
	ErrorMPSConnectionFailed:          {"CUDA_ERROR_MPS_CONNECTION_FAILED", "the MPS server cannot be reached"},
	ErrorMPSRPCFailure:                {"CUDA_ERROR_MPS_RPC_FAILURE", "a call to the MPS server failed"},
	ErrorMPSServerNotReady:            {"CUDA_ERROR_MPS_SERVER_NOT_READY", "the MPS server takes no new clients now"},
	ErrorMPSMaxClientsReached:         {"CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", "the MPS server has as many clients as it takes"},
	ErrorMPSMaxConnectionsReached:     {"CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED", "the device has as many MPS connections as it takes"},
	ErrorMPSClientTerminated:          {"CUDA_ERROR_MPS_CLIENT_TERMINATED", "the MPS server ended this client"},
	ErrorCDPNotSupported:              {"CUDA_ERROR_CDP_NOT_SUPPORTED", "a kernel launches kernels, which is not supported here"},
	ErrorCDPVersionMismatch:           {"CUDA_ERROR_CDP_VERSION_MISMATCH", "modules launch kernels from kernels by different versions"},
	ErrorStreamCaptureUnsupported:     {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "the operation is not allowed while a stream is captured"},
	ErrorStreamCaptureInvalidated:     {"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture was invalidated by an earlier error"},
	ErrorStreamCaptureMerge:           {"CUDA_ERROR_STREAM_CAPTURE_MERGE", "the call would merge two captures"},
	ErrorStreamCaptureUnmatched:       {"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not begun on this stream"},
	ErrorStreamCaptureUnjoined:        {"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", "the capture has work that was not joined to its first stream"},
	ErrorStreamCaptureIsolation:       {"CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "a dependency would cross the border of a capture"},
	ErrorStreamCaptureImplicit:        {"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "the legacy stream would depend on a captured stream"},
	ErrorCapturedEvent:                {"CUDA_ERROR_CAPTURED_EVENT", "the event was recorded in a capture"},
	ErrorStreamCaptureWrongThread:     {"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "the capture was begun on another thread"},
	ErrorTimeout:                      {"CUDA_ERROR_TIMEOUT", "the wait timed out"},
	ErrorGraphExecUpdateFailure:       {"CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE", "the graph differs too much to update"},
	ErrorExternalDevice:               {"CUDA_ERROR_EXTERNAL_DEVICE", "an external device failed"},
	ErrorInvalidClusterSize:           {"CUDA_ERROR_INVALID_CLUSTER_SIZE", "the cluster size does not fit the kernel or the device"},
	ErrorFunctionNotLoaded:            {"CUDA_ERROR_FUNCTION_NOT_LOADED", "the function was not loaded yet and the call does not load it"},
	ErrorInvalidResourceType:          {"CUDA_ERROR_INVALID_RESOURCE_TYPE", "a resource has a type that the call does not take"},
	ErrorInvalidResourceConfiguration: {"CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION", "the resources do not suffice or do not apply"},
	ErrorKeyRotation:                  {"CUDA_ERROR_KEY_ROTATION", "changing the keys of confidential computing failed"},
	ErrorStreamDetached:               {"CUDA_ERROR_STREAM_DETACHED", "the stream is detached, which the operation does not permit"},
	ErrorGraphRecaptureFailure:        {"CUDA_ERROR_GRAPH_RECAPTURE_FAILURE", "capturing into the graph again failed"},
	ErrorUnknown:                      {"CUDA_ERROR_UNKNOWN", "an unknown error of the driver"},
}

// Error returns the C name, such as CUDA_ERROR_OUT_OF_MEMORY.
func (r Result) Error() string {
	if e, ok := results[r]; ok {
		return e.name
	}
	return "CUDA_ERROR_" + strconv.Itoa(int(r))
}

// Meaning explains the result in a sentence without a full stop.
func (r Result) Meaning() string { return results[r].meaning }

// Sticky reports whether the result means that the context is lost: every
// later call on the device fails until the process ends.
func (r Result) Sticky() bool {
	switch r {
	case ErrorIllegalAddress, ErrorLaunchTimeout, ErrorAssert, ErrorHardwareStackError,
		ErrorIllegalInstruction, ErrorMisalignedAddress, ErrorInvalidAddressSpace,
		ErrorInvalidPC, ErrorLaunchFailed, ErrorECCUncorrectable, ErrorNVLinkUncorrectable,
		ErrorContextIsDestroyed, ErrorContained, ErrorTensorMemoryLeak, ErrorMPSClientTerminated, ErrorExternalDevice:
		return true
	}
	return false
}
