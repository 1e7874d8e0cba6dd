package machine

import (
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/osthread"
)

// A Capture is a recording that started on one stream. Other streams join it by
// waiting for its events. m.mu guards it.
type Capture struct {
	id      uint64
	handle  cudadrv.Graph // of the future graph
	objects []*userObject // retained by the future graph
	mode    cudadrv.CaptureMode
	tid     uintptr // the OS thread that started it
	origin  *Stream
	streams []*Stream // that have joined, origin first; the index is a branch of the graph
	nodes   []*node
	invalid bool // an illegal call invalidated it; it can only be ended
	ended   bool
}

// A node is one operation of a graph.
type node struct {
	name   string
	branch int   // of its captured stream
	deps   []int // its predecessors, in ascending order
	run    func(*Op)
	// priority is the stream's priority, which a kernel keeps in its graph.
	priority int32
	// launch is set for a launch on several streams; branches holds their branches.
	launch   Launch
	branches []int
	// check tells at a launch whether the resources of the node still exist.
	check func() cudadrv.Result
	// uses has the device memory of a copy or a fill, which must be mapped when the graph
	// is instantiated.
	uses  [2]cudadrv.DevicePtr
	bytes uint64 // that it moves, if it is a copy or a fill
	// cooperative is an attribute of a kernel that an update cannot change.
	cooperative bool
	at          uint64 // when it was captured
}

// A Launch is an operation on several streams that a library records in a graph. m.mu is
// held when its methods are called.
type Launch interface {
	// Hold adds delta to the number of graphs that have the launch.
	Hold(delta int)
	// Enqueue enqueues the launch for one replay. The streams are those that were given
	// to AddLaunch, in the same order.
	Enqueue(on []*Stream)
}

// AddLaunch records a launch on streams of the capture, with the device memory
// that a copy uses. m.mu is held.
func (c *Capture) AddLaunch(name string, uses [2]cudadrv.DevicePtr, l Launch, on []*Stream) {
	n := &node{name: name, uses: uses, launch: l}
	for _, s := range on {
		n.branches = append(n.branches, c.branch(s))
	}
	c.add(n, on...)
}

// add records an operation after the current tails of its streams. m.mu is held.
func (c *Capture) add(n *node, on ...*Stream) {
	n.branch, n.priority, n.at = c.branch(on[0]), on[0].priority, on[0].dev.m.tick()
	for _, s := range on {
		n.deps = union(n.deps, s.tail)
	}
	c.nodes = append(c.nodes, n)
	for _, s := range on {
		s.tail = []int{len(c.nodes) - 1}
	}
}

func (c *Capture) branch(s *Stream) int { return slices.Index(c.streams, s) }

// union merges ascending lists.
func union(a, b []int) []int {
	sum := slices.Concat(a, b)
	slices.Sort(sum)
	return slices.Compact(sum)
}

// join adds a stream to the capture, after the given nodes. m.mu is held.
func (c *Capture) join(s *Stream, behind []int) {
	if !slices.Contains(c.streams, s) {
		c.streams = append(c.streams, s)
	}
	s.capture, s.tail = c, slices.Clone(behind)
}

// joined reports whether all nodes precede the tail of the first stream.
func (c *Capture) joined() bool {
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

// Refused invalidates the capture of the stream and returns the result of the
// call, which is illegal during a capture. m.mu is held.
func (s *Stream) Refused() cudadrv.Result {
	s.capture.invalid = true
	return cudadrv.ErrorStreamCaptureUnsupported
}

// capturing reports whether a stream of the device is being captured. It
// invalidates such captures, because the call concerns all streams. m.mu is held.
func (d *Device) capturing() bool {
	found := false
	for _, s := range d.m.streams {
		if s.dev == d && s.capture != nil {
			s.capture.invalid, found = true, true
		}
	}
	return found
}

// unsafeCalls lists the calls that may wait for, or change, resources of captured
// streams. They invalidate captures in the modes global and thread-local.
var unsafeCalls = callSet(`cuMemAlloc cuMemFree cuMemHostAlloc cuMemFreeHost cuMemHostRegister cuMemHostUnregister
	cuMemPoolGetAttribute cuMemPoolSetAttribute cuMemPoolSetAccess cuMemPoolTrimTo
	cuModuleLoadData cuModuleUnload cuCtxSynchronize cublasCreate cublasLtCreate cuStreamSynchronize cuStreamQuery
	cuGraphInstantiateWithFlags cuGraphExecDestroy cuProfilerStart cuProfilerStop
	cuFileHandleRegister cuFileBufRegister cuFileBufDeregister cuFileRead cuFileWrite`)

// Permits tells whether the calling thread may make a call now. m.mu is held.
func (m *Machine) Permits(name string) cudadrv.Result {
	if !unsafeCalls[name] {
		return cudadrv.Success
	}
	return m.PermitsUnsafe()
}

// InvalidateGlobalCaptures invalidates the captures that no thread may disturb. m.mu is held.
func (m *Machine) InvalidateGlobalCaptures() {
	for _, x := range m.captures {
		x.invalid = x.invalid || x.mode == cudadrv.CaptureGlobal
	}
}

// PermitsUnsafe invalidates the captures that forbid unsafe calls on the calling
// thread. m.mu is held.
func (m *Machine) PermitsUnsafe() cudadrv.Result {
	if len(m.captures) == 0 {
		return cudadrv.Success
	}
	tid := osthread.Thread()
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
	x := &Capture{id: d.m.lastCapture, handle: cudadrv.Graph(d.m.Handle()), mode: mode, tid: osthread.Thread(), origin: s}
	x.join(s, nil)
	d.m.captures = append(d.m.captures, x)
	return cudadrv.Success
}

func (d driver) StreamEndCapture(h cudadrv.Stream) (cudadrv.Graph, cudadrv.Result) {
	c, r := d.beginEnding("cuStreamEndCapture")
	if r != cudadrv.Success {
		if c.planned {
			d.abandonCapture(c.dev, h)
		}
		return 0, r
	}
	defer c.end()
	s, r := d.m.Stream(c.dev, h)
	if r != cudadrv.Success {
		return 0, r
	}
	x := s.capture
	switch {
	case x == nil:
		return 0, cudadrv.ErrorIllegalState
	case x.mode != cudadrv.CaptureRelaxed && x.tid != osthread.Thread():
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

// abandonCapture ends the capture of a stream because of a fault of the plan: the driver ends a capture even if
// cuStreamEndCapture fails.
func (d driver) abandonCapture(dev *Device, h cudadrv.Stream) {
	d.m.mu.Lock()
	defer d.m.mu.Unlock()
	if s, r := d.m.Stream(dev, h); r == cudadrv.Success && s.capture != nil {
		x := s.capture
		d.m.endCapture(x)
		letGo(x.objects)
	}
}

// endCapture ends the capture and detaches its streams. m.mu is held.
func (m *Machine) endCapture(x *Capture) {
	x.ended = true
	for _, s := range x.streams {
		s.capture, s.tail = nil, nil
	}
	m.captures = slices.DeleteFunc(m.captures, func(c *Capture) bool { return c == x })
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
	s, r := d.m.Stream(c.dev, h)
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
	tid := osthread.Thread()
	previous := d.m.captureModes[tid]
	d.m.captureModes[tid] = mode
	if mode == cudadrv.CaptureGlobal { // the default mode
		delete(d.m.captureModes, tid)
	}
	return previous, cudadrv.Success
}

// A capturedMark is the state of an event recorded in a capture: the nodes that
// precede it. It is not a point in time, so only streams can wait for it.
type capturedMark struct {
	capture *Capture
	nodes   []int
}

// recordCaptured implements EventRecord on a captured stream. m.mu is held.
func (e *event) recordCaptured(s *Stream) {
	e.captured = &capturedMark{s.capture, slices.Clone(s.tail)}
}

// spoils returns the result of a host call on an event that was recorded in a
// capture, and invalidates that capture. It returns Success for any other
// event. m.mu is held.
func (e *event) spoils() cudadrv.Result {
	if e.captured == nil {
		return cudadrv.Success
	}
	e.captured.capture.invalid = true
	return cudadrv.ErrorCapturedEvent
}

// waitCaptured implements StreamWaitEvent if the stream is being captured or the
// event was recorded in a capture. m.mu is held.
func (s *Stream) waitCaptured(e *event) cudadrv.Result {
	k := e.captured
	switch {
	case k == nil && e.mark() == nil:
		return cudadrv.Success // never recorded
	case k == nil:
		s.capture.invalid = true
		return cudadrv.ErrorStreamCaptureIsolation
	case k.capture.invalid && s.capture == k.capture:
		return cudadrv.ErrorStreamCaptureInvalidated
	case k.capture.ended || k.capture.invalid:
		if s.capture != nil {
			s.capture.invalid = true
		}
		return cudadrv.ErrorInvalidValue
	case s == s.dev.legacy:
		k.capture.invalid = true
		return cudadrv.ErrorStreamCaptureImplicit
	case s.capture == nil:
		k.capture.join(s, k.nodes)
	case s.capture != k.capture:
		s.capture.invalid, k.capture.invalid = true, true
		return cudadrv.ErrorStreamCaptureMerge
	default:
		s.tail = union(s.tail, k.nodes)
	}
	return cudadrv.Success
}

// addExternal records an operation on an event that each launch of the graph performs: a record,
// or a wait for the latest record at that time. m.mu is held.
func (s *Stream) addExternal(name string, h cudadrv.Event, l Launch) {
	m, x := s.dev.m, s.capture
	x.AddLaunch(name, [2]cudadrv.DevicePtr{}, l, []*Stream{s})
	x.nodes[len(x.nodes)-1].check = func() cudadrv.Result {
		if m.event(h) == nil {
			return cudadrv.ErrorInvalidValue
		}
		return cudadrv.Success
	}
}

// An externalRecord is a record of an event by a graph.
type externalRecord struct{ e *event }

func (externalRecord) Hold(int) {}

func (r externalRecord) Enqueue(on []*Stream) { r.e.record("cuEventRecord", on[0]) }

// An externalWait is a wait of a graph for an event.
type externalWait struct{ e *event }

func (externalWait) Hold(int) {}

func (w externalWait) Enqueue(on []*Stream) {
	if k := w.e.mark(); k != nil {
		on[0].Wait("cuStreamWaitEvent", k)
	}
}
