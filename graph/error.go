package graph

import (
	"fmt"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// The status codes of captures, for errors.Is.
const (
	ErrorUnsupported = device.Status(cudadrv.ErrorStreamCaptureUnsupported) // also matched by a *device.CaptureError
	ErrorInvalidated = device.Status(cudadrv.ErrorStreamCaptureInvalidated)
	ErrorMerge       = device.Status(cudadrv.ErrorStreamCaptureMerge)
	ErrorUnjoined    = device.Status(cudadrv.ErrorStreamCaptureUnjoined)
	ErrorIsolation   = device.Status(cudadrv.ErrorStreamCaptureIsolation)
	ErrorWrongThread = device.Status(cudadrv.ErrorStreamCaptureWrongThread)
	ErrorUpdate      = device.Status(cudadrv.ErrorGraphExecUpdateFailure)
)

// An UpdateError reports why a graph cannot get the operations of another graph.
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

// A NothingCapturedError reports that a capture is empty because the capturing goroutine
// used other streams.
type NothingCapturedError struct {
	Graph  string
	Stream string   // the captured stream
	Used   []string // the streams that were used instead
}

func (e *NothingCapturedError) Error() string {
	return fmt.Sprintf("graph: end the capture of %s on %s: nothing was captured: the function used %s, which took no part: capture these streams, or let them wait for %[2]s first",
		e.Graph, e.Stream, strings.Join(e.Used, ", "))
}
