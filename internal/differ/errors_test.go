package differ

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// The kinds of errors that the model predicts. Those of the driver begin with
// "cuda:", errors of NCCL with "nccl:".
const (
	kClosed   = "closed"   // device.ErrClosed
	kArgument = "argument" // an error without a type
	kCapture  = "capture"  // *device.CaptureError
	kView     = "view"     // memory.ErrView
	kOOM      = "oom"      // *memory.OutOfMemoryError
	kPointer  = "pointer"  // *memory.PointerError
	kUpdate   = "update"   // *graph.UpdateError
	kInUse    = "in use"   // *nccl.InUseError
	kWaits    = "waits"    // device.ErrSynchronizing
	kPanic    = "panic"
	kBody     = "body"    // the error of a function that the program has given
	kAbsent   = "absent"  // an object that was not made
	kSkipped  = "skipped" // a body that was not called
	kCallback = "callback"

	cuInvalidated = "cuda:STREAM_CAPTURE_INVALIDATED"
	cuUnjoined    = "cuda:STREAM_CAPTURE_UNJOINED"
	cuIsolation   = "cuda:STREAM_CAPTURE_ISOLATION"
	cuMerge       = "cuda:STREAM_CAPTURE_MERGE"
	cuUnsupported = "cuda:STREAM_CAPTURE_UNSUPPORTED"
	cuWrongThread = "cuda:STREAM_CAPTURE_WRONG_THREAD"
	cuHandle      = "cuda:INVALID_HANDLE"
	cuValue       = "cuda:INVALID_VALUE"
	cuIllegal     = "cuda:ILLEGAL_ADDRESS"
)

var (
	errBody   = errors.New("the body fails")
	errAbsent = errors.New("no such object")
)

type panicked struct{ value any }

func (p panicked) Error() string { return fmt.Sprintf("panic: %v", p.value) }

// kindOf names the kind of an error by its type and by errors.Is.
func kindOf(err error) string {
	if err == nil {
		return ""
	}
	for _, k := range kindsOfErrors {
		if k.is(err) {
			return k.name
		}
	}
	if e, ok := errors.AsType[*device.Error](err); ok {
		return statusKind(e.Err)
	}
	if s, ok := errors.AsType[device.Status](err); ok {
		return statusKind(s)
	}
	if r, ok := errors.AsType[nccl.Result](err); ok {
		return "nccl:" + r.Error()
	}
	return kArgument
}

func statusKind(s device.Status) string {
	return "cuda:" + strings.TrimPrefix(s.Error(), "CUDA_ERROR_")
}

var kindsOfErrors = []struct {
	name string
	is   func(error) bool
}{
	{kPanic, as[panicked]},
	{kAbsent, func(err error) bool { return errors.Is(err, errAbsent) }},
	{kBody, func(err error) bool { return errors.Is(err, errBody) }},
	{kOOM, as[*memory.OutOfMemoryError]},
	{kPointer, as[*memory.PointerError]},
	{kUpdate, as[*graph.UpdateError]},
	{kCallback, as[*stream.CallbackError]},
	{kInUse, as[*nccl.InUseError]},
	{"mismatch", as[*nccl.MismatchError]},
	{"timeout", as[*nccl.TimeoutError]},
	{"broken", func(err error) bool { return errors.Is(err, comm.ErrBroken) }},
	{kCapture, as[*device.CaptureError]},
	{kView, func(err error) bool { return errors.Is(err, memory.ErrView) }},
	{kWaits, func(err error) bool { return errors.Is(err, device.ErrSynchronizing) }},
	{kClosed, func(err error) bool { return errors.Is(err, device.ErrClosed) }},
	{"capturing", func(err error) bool { return errors.Is(err, stream.ErrCapturing) }},
	{"deadline", func(err error) bool { return errors.Is(err, context.DeadlineExceeded) }},
	{"unsupported", as[*device.UnsupportedError]},
}

func as[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}
