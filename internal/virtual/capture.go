package virtual

import (
	"slices"
	"syscall"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A capture is a recording that began on one stream and that other streams
// joined by waiting for its events. m.mu guards it.
type capture struct {
	id      uint64
	handle  cudadrv.Graph // that the graph will have
	objects []*userObject // that it will keep
	mode    cudadrv.CaptureMode
	tid     int // the OS thread that began it
	origin  *stream
	streams []*stream // that have joined, origin first; a place here is a lane of the graph
	nodes   []*node
	invalid bool // an illegal call spoiled it; only its end is left
	ended   bool
}

// A node is one operation of a graph.
type node struct {
	name string
	lane int   // of the stream that it was captured on
	deps []int // the nodes that come before it, in ascending order
	run  func(*op)
	// priority is that of the stream, which a kernel keeps in its graph.
	priority int32
	// works makes it a launch of NCCL instead; lanes has those of the works.
	works []*work
	lanes []int
	// check says at a launch whether what the node uses still exists.
	check func() cudadrv.Result
}

// add records an operation behind what its streams have waited for. m.mu is
// held.
func (c *capture) add(n *node, on ...*stream) {
	n.lane, n.priority = c.lane(on[0]), on[0].priority
	for _, s := range on {
		n.deps = union(n.deps, s.tail)
	}
	c.nodes = append(c.nodes, n)
	for _, s := range on {
		s.tail = []int{len(c.nodes) - 1}
	}
}

func (c *capture) lane(s *stream) int { return slices.Index(c.streams, s) }

// union merges ascending lists.
func union(a, b []int) []int {
	sum := slices.Concat(a, b)
	slices.Sort(sum)
	return slices.Compact(sum)
}

// join makes a stream part of the capture, behind the nodes. m.mu is held.
func (c *capture) join(s *stream, behind []int) {
	if !slices.Contains(c.streams, s) {
		c.streams = append(c.streams, s)
	}
	s.capture, s.tail = c, slices.Clone(behind)
}

// joined reports whether all nodes come before what follows on the first
// stream.
func (c *capture) joined() bool {
	before := make([]bool, len(c.nodes))
	for _, i := range c.origin.tail {
		before[i] = true
	}
	for i := len(c.nodes) - 1; i >= 0; i-- {
		if !before[i] {
			return false
		}
		for _, d := range c.nodes[i].deps {
			before[d] = true
		}
	}
	return true
}

// refused is the result of a call that is illegal while the stream is captured,
// and spoils the capture. m.mu is held.
func (s *stream) refused() cudadrv.Result {
	s.capture.invalid = true
	return cudadrv.ErrorStreamCaptureUnsupported
}

// capturing reports whether one of the device's streams is being captured, and
// spoils its capture: the call concerns all streams. m.mu is held.
func (d *device) capturing() bool {
	found := false
	for _, s := range d.m.streams {
		if s.dev == d && s.capture != nil {
			s.capture.invalid, found = true, true
		}
	}
	return found
}

// unsafeCalls has the calls that may wait for or change what captured streams use.
// In the modes global and thread-local they spoil captures.
var unsafeCalls = nameSet(`cuMemAlloc cuMemFree cuMemHostAlloc cuMemFreeHost cuMemHostRegister cuMemHostUnregister
	cuMemPoolCreate cuMemPoolDestroy cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolSetAccess cuMemPoolTrimTo
	cuModuleLoadData cuModuleUnload cuCtxSynchronize cublasCreate cuStreamSynchronize cuStreamQuery
	cuGraphInstantiateWithFlags cuGraphExecDestroy cuProfilerStart cuProfilerStop
	cuFileHandleRegister cuFileBufRegister cuFileBufDeregister cuFileRead cuFileWrite cuFileStreamRegister cuFileStreamDeregister
	cuFileBatchIOSetUp cuFileBatchIOSubmit`)

// permits says whether the calling thread may make a call now. m.mu is held.
func (m *Machine) permits(name string) cudadrv.Result {
	if !unsafeCalls[name] {
		return cudadrv.Success
	}
	return m.permitsUnsafe()
}

// permitsUnsafe spoils the captures that forbid an unsafe call to the calling
// thread. m.mu is held.
func (m *Machine) permitsUnsafe() cudadrv.Result {
	if len(m.captures) == 0 {
		return cudadrv.Success
	}
	tid := syscall.Gettid()
	mode := m.captureModes[tid]
	r := cudadrv.Success
	for _, c := range m.captures {
		own := c.tid == tid && c.mode != cudadrv.CaptureRelaxed && mode != cudadrv.CaptureRelaxed
		other := c.tid != tid && c.mode == cudadrv.CaptureGlobal && mode == cudadrv.CaptureGlobal
		if own || other {
			c.invalid = true
			r = cudadrv.ErrorStreamCaptureUnsupported
		}
	}
	return r
}

func (d driver) StreamBeginCapture(h cudadrv.Stream, mode cudadrv.CaptureMode) cudadrv.Result {
	c, s, r := d.beginStream("cuStreamBeginCapture", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	switch {
	case mode < cudadrv.CaptureGlobal || mode > cudadrv.CaptureRelaxed:
		return cudadrv.ErrorInvalidValue
	case s.capture != nil:
		return cudadrv.ErrorIllegalState
	case h == 0:
		return cudadrv.ErrorStreamCaptureUnsupported
	}
	d.m.lastCapture++
	x := &capture{id: d.m.lastCapture, handle: cudadrv.Graph(d.m.handle()), mode: mode, tid: syscall.Gettid(), origin: s}
	x.join(s, nil)
	d.m.captures = append(d.m.captures, x)
	return cudadrv.Success
}

func (d driver) StreamEndCapture(h cudadrv.Stream) (cudadrv.Graph, cudadrv.Result) {
	c, r := d.beginEnding("cuStreamEndCapture")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	s, r := d.m.stream(c.dev, h)
	if r != cudadrv.Success {
		return 0, r
	}
	x := s.capture
	switch {
	case x == nil:
		return 0, cudadrv.ErrorIllegalState
	case x.mode != cudadrv.CaptureRelaxed && x.tid != syscall.Gettid():
		x.invalid = true
		return 0, cudadrv.ErrorStreamCaptureWrongThread
	case x.origin != s:
		x.invalid = true
		return 0, cudadrv.ErrorStreamCaptureUnmatched
	}
	joined := x.joined()
	d.m.endCapture(x)
	switch {
	case s.dev.status != cudadrv.Success:
		r = s.dev.status
	case x.invalid:
		r = cudadrv.ErrorStreamCaptureInvalidated
	case !joined:
		r = cudadrv.ErrorStreamCaptureUnjoined
	}
	if r != cudadrv.Success {
		letGo(x.objects)
		return 0, r
	}
	return d.m.newGraph(x), cudadrv.Success
}

// endCapture takes the streams out of the capture. m.mu is held.
func (m *Machine) endCapture(x *capture) {
	x.ended = true
	for _, s := range x.streams {
		s.capture, s.tail = nil, nil
	}
	m.captures = slices.DeleteFunc(m.captures, func(c *capture) bool { return c == x })
}

func (d driver) StreamIsCapturing(h cudadrv.Stream) (cudadrv.CaptureStatus, cudadrv.Result) {
	status, _, r := d.captureInfo("cuStreamIsCapturing", h)
	return status, r
}

func (d driver) StreamGetCaptureInfo(h cudadrv.Stream) (status cudadrv.CaptureStatus, id uint64, r cudadrv.Result) {
	return d.captureInfo("cuStreamGetCaptureInfo", h)
}

func (d driver) StreamGetCaptureGraph(h cudadrv.Stream) (cudadrv.Graph, cudadrv.Result) {
	c, s, r := d.beginStream("cuStreamGetCaptureInfo", h)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if s.capture == nil {
		return 0, cudadrv.Success
	}
	return s.capture.handle, cudadrv.Success
}

func (d driver) captureInfo(name string, h cudadrv.Stream) (status cudadrv.CaptureStatus, id uint64, r cudadrv.Result) {
	c, r := d.begin(name)
	if r != cudadrv.Success {
		return 0, 0, r
	}
	defer c.end()
	s, r := d.m.stream(c.dev, h)
	switch {
	case r != cudadrv.Success:
		return 0, 0, r
	case s.capture == nil:
		return cudadrv.CaptureNone, 0, cudadrv.Success
	case s.capture.invalid:
		return cudadrv.CaptureInvalidated, 0, cudadrv.Success
	}
	return cudadrv.CaptureActive, s.capture.id, cudadrv.Success
}

func (d driver) ThreadExchangeStreamCaptureMode(mode cudadrv.CaptureMode) (cudadrv.CaptureMode, cudadrv.Result) {
	c, r := d.beginFree("cuThreadExchangeStreamCaptureMode")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if mode < cudadrv.CaptureGlobal || mode > cudadrv.CaptureRelaxed {
		return 0, cudadrv.ErrorInvalidValue
	}
	tid := syscall.Gettid()
	previous := d.m.captureModes[tid]
	d.m.captureModes[tid] = mode
	if mode == cudadrv.CaptureGlobal { // the mode of every thread at first
		delete(d.m.captureModes, tid)
	}
	return previous, cudadrv.Success
}
