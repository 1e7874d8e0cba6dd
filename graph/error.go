package graph

import (
	"fmt"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// The status codes of captures that this package distinguishes.
const (
	errorInvalidated = device.Status(cudadrv.ErrorStreamCaptureInvalidated)
	errorUnjoined    = device.Status(cudadrv.ErrorStreamCaptureUnjoined)
	errorWrongThread = device.Status(cudadrv.ErrorStreamCaptureWrongThread)
	errorUpdate      = device.Status(cudadrv.ErrorGraphExecUpdateFailure)
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

// A nothingCapturedError reports that a capture is empty because the capturing goroutine
// used other streams.
type nothingCapturedError struct {
	graph, stream string
	used          []string // the streams that were used instead
}

func (e *nothingCapturedError) Error() string {
	return fmt.Sprintf("graph: end the capture of %s on %s: nothing was captured: the function used %s, which took no part: capture these streams, or let them wait for %[2]s first",
		e.graph, e.stream, strings.Join(e.used, ", "))
}
