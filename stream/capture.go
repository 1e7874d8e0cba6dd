package stream

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/captures"
	"github.com/gochorus/chorus/internal/cudadrv"
)

// A CaptureError is a call that is illegal while a stream is captured into a
// graph. Chorus found it before the driver saw it, so the capture goes on.
type CaptureError = device.CaptureError

// Capturing reports whether the stream is being captured into a graph
// (cuStreamIsCapturing, torch.cuda.is_current_stream_capturing): what is
// enqueued on it is recorded and does not run. It is true of a capture that an
// illegal call has invalidated, until its end.
func (s *Stream) Capturing() (bool, error) {
	if err := s.check("stream: capturing", nil); err != nil {
		return false, err
	}
	return s.capturing()
}

func (s *Stream) capturing() (bool, error) {
	status := cudadrv.CaptureNone
	err := s.dev.Do("cuStreamIsCapturing", func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, r = drv.StreamIsCapturing(s.h)
		return r
	})
	return status != cudadrv.CaptureNone, err
}

// Outside calls fn, unless the process captures a graph on any stream, and keeps
// captures from beginning meanwhile. It reports whether it did. What asks a stream of
// others for its progress would end a capture that it meets. For Chorus's own packages.
func Outside(fn func()) bool { return captures.Outside(fn) }

// AnyCapture reports whether the process captures a graph on any stream. For
// Chorus's own packages.
func AnyCapture() bool { return captures.Any() }

// RefuseCapture returns a *CaptureError if the stream is being captured, and
// costs next to nothing while the process captures nothing. For Chorus's own
// packages.
func (s *Stream) RefuseCapture(op, advice string) error {
	if !captures.Any() {
		return nil
	}
	if yes, err := s.capturing(); err != nil || !yes {
		return nil // the call itself meets the driver's error
	}
	return &CaptureError{Op: op, Object: s.String(), Advice: advice}
}

// notRun says why the host cannot wait for what is captured.
const notRun = "what is captured has not run and cannot be waited for"

// note reports whether what e records on s is captured.
func (e *Event) note(s *Stream) (captured bool, err error) {
	if !captures.Any() {
		return false, nil
	}
	captured, err = s.capturing()
	if captured && e.flags&cudadrv.EventInterprocess != 0 {
		return false, &CaptureError{Op: "stream: record event", Object: s.String(),
			Advice: "an event of several processes cannot be recorded in a capture: record one without Interprocess, or record it behind the launch"}
	}
	return captured, err
}

// checkHost is check for calls of the host about the marked point, which is no
// point in time if it was captured.
func (e *Event) checkHost(op string) error {
	if err := e.check(op); err != nil {
		return err
	}
	if e.captured.Load() {
		return &CaptureError{Op: op, Object: "what the event recorded on " + e.dev.String(), Advice: notRun}
	}
	return refuseHost(op, func() string { return "an event of " + e.dev.String() })
}

// RefuseWait returns a *CaptureError if the goroutine must not wait for the stream nor
// ask for it: because the stream is being captured, or because of a capture in which it
// takes no part, for which see [graph.Mode]. For Chorus's own packages.
func (s *Stream) RefuseWait(op string) error {
	if err := s.RefuseCapture(op, notRun); err != nil {
		return err
	}
	return refuseHost(op, s.String)
}

// refuseHost is RefuseWait for something that takes no part in a capture.
func refuseHost(op string, name func() string) error {
	if !captures.Any() {
		return nil
	}
	c, others := captures.Forbids()
	switch {
	case c == nil:
		return nil
	case others:
		return &CaptureError{Op: op, Object: c.Stream.String(), Advice: fmt.Sprintf(
			"in the mode %s no goroutine may wait for %s or ask for it: do so before or after the capture, or capture in the mode thread_local", c.ModeName(), name())}
	}
	return &CaptureError{Op: op, Object: c.Stream.String(), Advice: fmt.Sprintf(
		"in the mode %s the goroutine that captures must not wait for %s or ask for it: do so before or after the capture, or capture in the mode relaxed", c.ModeName(), name())}
}

// ErrCapturing is what Close of a graph returns while it is being captured.
var ErrCapturing = errors.New("the capture has not ended")

// A Holder is a graph that keeps what it has captured in use. Close returns
// ErrCapturing where it has to wait for the end of the capture.
type Holder interface {
	fmt.Stringer
	Close() error
}

// A Holdable must not be closed while a graph that captured it lives.
type Holdable interface {
	Hold(h Holder)
	LetGo(h Holder)
}

// A Preparer is a Holdable that has something to put before each launch of a
// graph, on the stream of the launch, as random numbers have their place in the
// sequence. After Prepare without an error there is one call of Launched, when
// the launch has been enqueued or has failed; until then other Prepares wait.
type Preparer interface {
	Holdable
	Prepare(s *Stream) error
	Launched(s *Stream)
}

// capture is one capture of this process that has not ended.
type capture struct {
	*captures.Capture
	graph Holder
	pool  Holdable // what package memory allocates from

	mu   sync.Mutex
	held []Holdable // the pool, and what Captured adds
}

// BeginCapture records what is enqueued on s from now on for the graph
// (cuStreamBeginCapture), whose memory comes from the pool. In a mode other than
// the relaxed one the goroutine is locked to its thread until EndCapture. For
// Chorus's own packages.
func (s *Stream) BeginCapture(mode cudadrv.CaptureMode, graph Holder, pool Holdable) error {
	const op = "stream: begin capture"
	if err := s.Check(op, nil); err != nil {
		return err
	}
	if s.kind == legacy {
		return fmt.Errorf("%s: %s cannot be captured: take one of New or FromPool: %w", op, s,
			device.Status(cudadrv.ErrorStreamCaptureUnsupported))
	}
	if err := s.RefuseCapture(op, "captures do not nest"); err != nil {
		return err
	}
	if mode != cudadrv.CaptureRelaxed {
		if other := captures.Exclusive(); other != nil {
			return &CaptureError{Op: op, Object: "another stream of this goroutine, for " + other.Graph.String() + ",", Advice: "captures do not nest"}
		}
	}
	c := &capture{graph: graph, pool: pool, held: []Holdable{pool}}
	c.Capture = &captures.Capture{System: s.dev.System(), Device: s.dev, Stream: s, Graph: graph, Mode: mode, Owner: c}
	if err := captures.Begin(c.Capture, func() error { return s.begin(c) }); err != nil {
		return err
	}
	pool.Hold(graph)
	return nil
}

// begin begins the capture at the driver.
func (s *Stream) begin(c *capture) error {
	err := s.dev.Do("cuStreamBeginCapture", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamBeginCapture(s.h, c.Mode) })
	if err != nil {
		return err
	}
	if _, c.ID, err = s.captureInfo(); err != nil {
		_, _ = s.endCapture()
	}
	return err
}

// A Captured is what EndCapture returns.
type Captured struct {
	Graph  cudadrv.Graph
	Held   []Holdable // what the graph holds
	Strays []string   // streams that the capturing goroutine used and that took no part
}

// EndCapture ends what BeginCapture began on s (cuStreamEndCapture). After an error
// there is no capture any more, but what was held is. The caller is on the thread of
// BeginCapture, unless the mode is relaxed. For Chorus's own packages.
func (s *Stream) EndCapture(graph Holder) (x Captured, err error) {
	x.Graph, err = s.endCapture()
	c := captureOf(func(o *capture) bool { return o.graph == graph })
	if c == nil {
		return x, err
	}
	captures.End(c.Capture)
	c.mu.Lock()
	defer c.mu.Unlock()
	x.Held, x.Strays = c.held, c.Strays()
	return x, err
}

func (s *Stream) endCapture() (g cudadrv.Graph, err error) {
	err = s.dev.Do("cuStreamEndCapture", func(drv cudadrv.Driver) (r cudadrv.Result) {
		g, r = drv.StreamEndCapture(s.h)
		return r
	})
	return g, err
}

func (s *Stream) captureInfo() (status cudadrv.CaptureStatus, id uint64, err error) {
	err = s.dev.Do("cuStreamGetCaptureInfo", func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, id, r = drv.StreamGetCaptureInfo(s.h)
		return r
	})
	return status, id, err
}

// CaptureID returns a number for the capture that s takes part in, which no other
// capture of the system has, or 0. A capture that an illegal call has invalidated has no
// number any more, and CaptureID returns CUDA_ERROR_STREAM_CAPTURE_INVALIDATED. For
// Chorus's own packages.
func (s *Stream) CaptureID() (uint64, error) {
	if !captures.Any() {
		return 0, nil
	}
	status, id, err := s.captureInfo()
	if err == nil && status == cudadrv.CaptureInvalidated {
		return 0, fmt.Errorf("stream: an earlier call has invalidated the capture of %s: end the capture, and capture again without that call: %w",
			s, device.Status(cudadrv.ErrorStreamCaptureInvalidated))
	}
	return id, err
}

// Capturer returns the stream on which the calling goroutine has begun the capture that it
// is in, and the number that CaptureID has for that, or nil. For Chorus's own packages.
func Capturer(sys *device.System) (s *Stream, id uint64) {
	c := captures.Mine(sys)
	if c == nil {
		return nil, 0
	}
	return c.Stream.(*Stream), c.ID
}

// current returns the capture that s takes part in, if Chorus began one.
func (s *Stream) current() (*capture, error) {
	id, err := s.CaptureID()
	if err != nil || id == 0 {
		return nil, err
	}
	return captureOf(func(o *capture) bool { return o.ID == id && o.System == s.dev.System() }), nil
}

// CapturePool returns the pool of the capture that s takes part in, or nil. For
// Chorus's own packages.
func (s *Stream) CapturePool() (Holdable, error) {
	c, err := s.current()
	if c == nil {
		return nil, err
	}
	return c.pool, nil
}

// Captured tells that work on s uses x: if s is being captured, x is held by the
// graph. For Chorus's own packages.
func (s *Stream) Captured(x Holdable) error {
	c, err := s.current()
	if c == nil {
		s.use()
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Contains(c.held, x) {
		c.held = append(c.held, x)
		x.Hold(c.graph)
	}
	return nil
}

// use tells the capture of the calling goroutine, if there is one, that work is
// enqueued on s.
func (s *Stream) use() {
	if captures.Any() {
		captures.Use(s, func() bool { yes, err := s.capturing(); return yes && err == nil })
	}
}

func captureOf(match func(*capture) bool) *capture {
	c := captures.Find(func(c *captures.Capture) bool {
		o, ours := c.Owner.(*capture)
		return ours && match(o)
	})
	if c == nil {
		return nil
	}
	return c.Owner.(*capture)
}
