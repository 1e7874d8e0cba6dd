package ncclapi

import "strconv"

// Result is ncclResult_t. Its Error text is the C name.
type Result int32

// The results, with the values of nccl.h. MissingSymbol is Chorus's own: the
// loaded library does not have the function.
const (
	MissingSymbol      Result = -1
	Success            Result = 0
	UnhandledCUDAError Result = 1
	SystemError        Result = 2
	InternalError      Result = 3
	InvalidArgument    Result = 4
	InvalidUsage       Result = 5
	RemoteError        Result = 6
	InProgress         Result = 7
	Timeout            Result = 8
)

var results = map[Result]struct{ name, meaning string }{
	MissingSymbol:      {"missing symbol", "the loaded NCCL does not have this function"},
	Success:            {"ncclSuccess", "no error"},
	UnhandledCUDAError: {"ncclUnhandledCudaError", "a CUDA call inside NCCL failed"},
	SystemError:        {"ncclSystemError", "a call of the operating system failed inside NCCL"},
	InternalError:      {"ncclInternalError", "NCCL failed inside, or its memory was overwritten"},
	InvalidArgument:    {"ncclInvalidArgument", "an argument has an invalid value"},
	InvalidUsage:       {"ncclInvalidUsage", "the call does not fit the state of the communicator or the other ranks"},
	RemoteError:        {"ncclRemoteError", "another rank, or the connection to it, failed"},
	InProgress:         {"ncclInProgress", "the operation is still in progress"},
	Timeout:            {"ncclTimeout", "the operation timed out"},
}

// Error returns the C name, such as ncclInvalidUsage.
func (r Result) Error() string {
	if e, ok := results[r]; ok {
		return e.name
	}
	return "ncclResult " + strconv.Itoa(int(r))
}

// Meaning explains the result in a sentence without a full stop.
func (r Result) Meaning() string { return results[r].meaning }
