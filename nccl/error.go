package nccl

import (
	"fmt"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// A Result is a status code of NCCL (ncclResult_t). errors.Is compares against
// its constants; its text is the C name.
type Result int32

// The status codes of NCCL.
const (
	ErrorUnhandledCUDA   = Result(ncclapi.UnhandledCUDAError)
	ErrorSystem          = Result(ncclapi.SystemError)
	ErrorInternal        = Result(ncclapi.InternalError)
	ErrorInvalidArgument = Result(ncclapi.InvalidArgument)
	ErrorInvalidUsage    = Result(ncclapi.InvalidUsage)
	ErrorRemote          = Result(ncclapi.RemoteError)
	ErrorTimeout         = Result(ncclapi.Timeout)
)

// Error returns the C name, such as ncclRemoteError.
func (r Result) Error() string { return ncclapi.Result(r).Error() }

// meaning explains the status in a sentence without a full stop.
func (r Result) meaning() string { return ncclapi.Result(r).Meaning() }

// An Error is a call of NCCL that failed, or an operation that failed later.
type Error struct {
	Op     string // the C function, such as ncclAllReduce
	Rank   int    // -1 if the call is not for a rank
	Size   int
	Device string // such as "cuda:3"
	Err    Result
	Detail string // NCCL's own last message (ncclGetLastError), or ""
	Async  bool   // the operation failed after it was enqueued
}

func (e *Error) Error() string {
	who := ""
	if e.Rank >= 0 {
		who = fmt.Sprintf(" on rank %d of %d (%s)", e.Rank, e.Size, e.Device)
	}
	text := fmt.Sprintf("nccl: %s%s: %s (%s)", e.Op, who, e.Err, e.Err.meaning())
	if e.Async {
		text = fmt.Sprintf("nccl: an earlier operation failed%s: %s (%s)", who, e.Err, e.Err.meaning())
	}
	switch {
	case e.Detail != "":
		text += ": " + e.Detail
	case e.Err == ErrorUnhandledCUDA || e.Err == ErrorSystem || e.Err == ErrorInternal:
		text += "; NCCL_DEBUG=WARN in the environment makes NCCL print the cause"
	}
	return text
}

// Unwrap returns the status, for errors.Is.
func (e *Error) Unwrap() error { return e.Err }
