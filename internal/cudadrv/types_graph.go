package cudadrv

// Handles of graphs.
type (
	Graph      uintptr
	GraphExec  uintptr
	UserObject uintptr
)

// CaptureMode is CUstreamCaptureMode: whose calls may spoil a capture.
type CaptureMode int32

// CaptureStatus is CUstreamCaptureStatus.
type CaptureStatus int32

// GraphExecUpdateResult is CUgraphExecUpdateResult: why an update failed.
type GraphExecUpdateResult int32

// The capture modes and the capture states of a stream.
const (
	CaptureGlobal      CaptureMode = 0
	CaptureThreadLocal CaptureMode = 1
	CaptureRelaxed     CaptureMode = 2

	CaptureNone        CaptureStatus = 0
	CaptureActive      CaptureStatus = 1
	CaptureInvalidated CaptureStatus = 2
)

// Flags of the graph calls, with the values of cuda.h.
const (
	GraphInstantiateAutoFree     uint64 = 1
	GraphInstantiateNodePriority uint64 = 8

	GraphDotVerbose uint32 = 1

	// GraphUserObjectMove gives the caller's references to the graph.
	GraphUserObjectMove uint32 = 1

	userObjectNoDestructorSync = 1 // the only flag, and required
)

// The reasons of GraphExecUpdate.
const (
	GraphUpdateSuccess                   GraphExecUpdateResult = 0
	GraphUpdateError                     GraphExecUpdateResult = 1
	GraphUpdateTopologyChanged           GraphExecUpdateResult = 2
	GraphUpdateNodeTypeChanged           GraphExecUpdateResult = 3
	GraphUpdateFunctionChanged           GraphExecUpdateResult = 4
	GraphUpdateParametersChanged         GraphExecUpdateResult = 5
	GraphUpdateNotSupported              GraphExecUpdateResult = 6
	GraphUpdateUnsupportedFunctionChange GraphExecUpdateResult = 7
	GraphUpdateAttributesChanged         GraphExecUpdateResult = 8
)

var graphUpdateMeanings = [...]string{
	"", "an unspecified error", "the graphs differ in their nodes or dependencies", "a node is of another type",
	"a kernel is of another device or context", "a parameter changed in a way that updates do not support",
	"something in the graph cannot be updated", "a kernel changed in a way that updates do not support",
	"a node's attributes changed in a way that updates do not support",
}

// Meaning explains why an update failed, in a clause without a full stop.
func (r GraphExecUpdateResult) Meaning() string {
	if r < 0 || int(r) >= len(graphUpdateMeanings) {
		return ""
	}
	return graphUpdateMeanings[r]
}

// graphExecUpdateResultInfo is CUgraphExecUpdateResultInfo.
type graphExecUpdateResultInfo struct {
	Result        GraphExecUpdateResult
	ErrorNode     uintptr
	ErrorFromNode uintptr
}
