package graph

import (
	"fmt"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// The status codes of captures, for errors.Is.
const (
	ErrorUnsupported   = device.Status(cudadrv.ErrorStreamCaptureUnsupported) // what a *stream.CaptureError matches too
	ErrorInvalidated   = device.Status(cudadrv.ErrorStreamCaptureInvalidated)
	ErrorMerge         = device.Status(cudadrv.ErrorStreamCaptureMerge)
	ErrorUnjoined      = device.Status(cudadrv.ErrorStreamCaptureUnjoined)
	ErrorIsolation     = device.Status(cudadrv.ErrorStreamCaptureIsolation)
	ErrorCapturedEvent = device.Status(cudadrv.ErrorCapturedEvent)
	ErrorWrongThread   = device.Status(cudadrv.ErrorStreamCaptureWrongThread)
	ErrorUpdate        = device.Status(cudadrv.ErrorGraphExecUpdateFailure)
)

// An UpdateError says why one graph cannot take the operations of another.
type UpdateError struct {
	Graph, Other string
	Reason       string // such as "a node is of another type"
	Err          error
}

func (e *UpdateError) Error() string {
	return fmt.Sprintf("graph: update %s from %s: %s: %v", e.Graph, e.Other, e.Reason, e.Err)
}

// Unwrap returns the driver's error.
func (e *UpdateError) Unwrap() error { return e.Err }

// A NothingCapturedError says that a capture recorded nothing, because the goroutine that
// captured used other streams.
type NothingCapturedError struct {
	Graph  string
	Stream string   // that was captured
	Used   []string // the streams that were used instead
}

func (e *NothingCapturedError) Error() string {
	return fmt.Sprintf("graph: end the capture of %s on %s: nothing was captured: the function used %s, which took no part: capture these streams, or let them wait for %[2]s first",
		e.Graph, e.Stream, strings.Join(e.Used, ", "))
}
