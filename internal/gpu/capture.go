package gpu

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/osthread"
)

// Capturing reports whether the stream is being captured into a graph.
func (s *Stream) Capturing() (bool, error) { return s.dev.Capturing(s.h) }

// BeginCapture captures operations that are enqueued on s from now on into the
// graph (cuStreamBeginCapture), whose memory comes from the pool. In a mode
// other than the relaxed one the goroutine is locked to its thread until
// EndCapture.
func (s *Stream) BeginCapture(mode cudadrv.CaptureMode, graph Holder, pool Holdable) error {
	const op = "stream: begin capture"
	if err := s.Check(op, nil); err != nil {
		return err
	}
	errs := s.dev.sys.errs
	if s.kind == DefaultStream {
		return fmt.Errorf("%s: %s cannot be captured: take one of New or FromPool: %w", op, s,
			errs.Status(cudadrv.ErrorStreamCaptureUnsupported))
	}
	if err := s.RefuseCapture(op, "captures do not nest"); err != nil {
		return err
	}
	if mode != cudadrv.CaptureRelaxed {
		if other := exclusive(); other != nil {
			return errs.Captured(op, "another stream of this goroutine, for "+other.graph.String()+",", "captures do not nest")
		}
	}
	c := &Capture{Stream: s, graph: graph, mode: mode, pool: pool, held: []Holdable{pool}}
	if err := c.register(func() error { return s.begin(c) }); err != nil {
		return err
	}
	pool.Hold(graph)
	return nil
}

// begin begins the capture in the driver.
func (s *Stream) begin(c *Capture) error {
	err := s.dev.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamBeginCapture(s.h, c.mode) })
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
	Held   []Holdable // objects that the graph holds
	Strays []string   // streams that the capturing goroutine used outside of the capture
}

// EndCapture ends the capture that BeginCapture began on s (cuStreamEndCapture). After an
// error the capture has ended too, and x.Held has the objects to release. Unless the mode
// is relaxed, the caller must be on the thread of BeginCapture.
func (s *Stream) EndCapture(graph Holder) (x Captured, err error) {
	x.Graph, err = s.endCapture()
	c := find(func(o *Capture) bool { return o.graph == graph })
	if c == nil {
		return x, err
	}
	c.forget()
	c.mu.Lock()
	defer c.mu.Unlock()
	x.Held, x.Strays = c.held, c.strays()
	return x, err
}

func (s *Stream) endCapture() (g cudadrv.Graph, err error) {
	err = s.dev.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		g, r = drv.StreamEndCapture(s.h)
		return r
	})
	return g, err
}

func (s *Stream) captureInfo() (status cudadrv.CaptureStatus, id uint64, err error) {
	err = s.dev.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, id, r = drv.StreamGetCaptureInfo(s.h)
		return r
	})
	return status, id, err
}

// CaptureID returns the id of the capture that s takes part in, or 0. Ids are unique in
// the System. A capture that an illegal call has invalidated has no id; CaptureID then
// returns CUDA_ERROR_STREAM_CAPTURE_INVALIDATED.
func (s *Stream) CaptureID() (uint64, error) {
	if !AnyCapture() {
		return 0, nil
	}
	status, id, err := s.captureInfo()
	if err == nil && status == cudadrv.CaptureInvalidated {
		return 0, fmt.Errorf("stream: an earlier call has invalidated the capture of %s: end the capture, and capture again without that call: %w",
			s, s.dev.sys.errs.Status(cudadrv.ErrorStreamCaptureInvalidated))
	}
	return id, err
}

// current returns the capture that s takes part in, if Chorus began one.
func (s *Stream) current() (*Capture, error) {
	id, err := s.CaptureID()
	if err != nil || id == 0 {
		return nil, err
	}
	return find(func(o *Capture) bool { return o.ID == id && o.Stream.dev.sys == s.dev.sys }), nil
}

// CapturePool returns the pool of the capture that s takes part in, or nil.
func (s *Stream) CapturePool() (Holdable, error) {
	c, err := s.current()
	if c == nil {
		return nil, err
	}
	return c.pool, nil
}

// Captured records that operations on s use x: if s is being captured, the graph holds x.
func (s *Stream) Captured(x Holdable) error {
	_, err := s.CapturedBy(x)
	return err
}

// CapturedBy is Captured, and returns the graph, or nil.
func (s *Stream) CapturedBy(x Holdable) (Holder, error) {
	c, err := s.current()
	if c == nil {
		s.use()
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !slices.Contains(c.held, x) {
		c.held = append(c.held, x)
		x.Hold(c.graph)
	}
	return c.graph, nil
}

// This file tracks the captures that the process has begun and not ended: the capturing
// goroutine, the mode and the calls that it forbids, and the other streams that the
// goroutine has used meanwhile. The driver tracks which streams take part.

// A Capture is a capture of this process that has not ended.
type Capture struct {
	ID     uint64  // the driver's, unique in the System
	Stream *Stream // that began it
	graph  Holder
	mode   cudadrv.CaptureMode
	pool   Holdable // the pool for package memory

	goroutine uintptr // that began it
	users     []user  // streams that the goroutine has used, guarded by open.mu

	mu   sync.Mutex
	held []Holdable // the pool, and the objects of Captured
}

// modeName returns torch's name of the mode.
func (c *Capture) modeName() string {
	return map[cudadrv.CaptureMode]string{
		cudadrv.CaptureGlobal: "global", cudadrv.CaptureThreadLocal: "thread_local", cudadrv.CaptureRelaxed: "relaxed",
	}[c.mode]
}

// A user is a stream that the capturing goroutine has used.
type user struct {
	stream *Stream
	joined bool // it took part in the capture
}

var open struct {
	count atomic.Int32 // the number of captures, readable without the lock
	begin sync.RWMutex // held while a capture begins
	mu    sync.Mutex
	list  []*Capture
}

// AnyCapture reports whether the process is capturing a graph on any stream.
func AnyCapture() bool { return open.count.Load() != 0 }

var making atomic.Int32 // graphs that are being instantiated at the end of a capture

// Make calls fn, which ends a capture and makes its graph.
func Make(fn func() error) error {
	making.Add(1)
	defer making.Add(-1)
	return fn()
}

// Pending reports whether the process is capturing a graph, or has captured one that is
// not made yet.
func Pending() bool { return AnyCapture() || making.Load() != 0 }

// Outside calls fn and prevents captures from beginning meanwhile, unless the
// process is capturing a graph on any stream. It reports whether it called fn.
func Outside(fn func()) bool {
	open.begin.RLock()
	defer open.begin.RUnlock()
	if AnyCapture() {
		return false
	}
	fn()
	return true
}

// register calls begin, which begins the capture in the driver for the calling
// goroutine, while no call of Outside is in progress.
func (c *Capture) register(begin func() error) error {
	open.begin.Lock()
	defer open.begin.Unlock()
	if err := begin(); err != nil {
		return err
	}
	c.goroutine = osthread.ID()
	open.mu.Lock()
	defer open.mu.Unlock()
	open.list = append(open.list, c)
	open.count.Add(1)
	return nil
}

// forget removes the capture.
func (c *Capture) forget() {
	open.mu.Lock()
	defer open.mu.Unlock()
	if i := slices.Index(open.list, c); i >= 0 {
		open.list = slices.Delete(open.list, i, i+1)
		open.count.Add(-1)
	}
}

// find returns the first capture that matches, or nil.
func find(match func(*Capture) bool) *Capture {
	open.mu.Lock()
	defer open.mu.Unlock()
	if i := slices.IndexFunc(open.list, match); i >= 0 {
		return open.list[i]
	}
	return nil
}

// exclusive returns the capture that prevents the calling goroutine's thread from
// beginning another one, or nil.
func exclusive() *Capture {
	me := osthread.ID()
	return find(func(c *Capture) bool { return c.goroutine == me && c.mode != cudadrv.CaptureRelaxed })
}

// CaptureOf returns the latest capture of a System that the calling goroutine has begun,
// or nil.
func CaptureOf(sys *System) *Capture {
	if !AnyCapture() {
		return nil
	}
	me := osthread.ID()
	open.mu.Lock()
	defer open.mu.Unlock()
	for _, c := range slices.Backward(open.list) {
		if c.goroutine == me && c.Stream.dev.sys == sys {
			return c
		}
	}
	return nil
}

// use records that the calling goroutine enqueues operations on s, in its capture if it
// has one.
func (s *Stream) use() {
	if !AnyCapture() {
		return
	}
	me := osthread.ID()
	c := find(func(c *Capture) bool {
		return c.goroutine == me && !slices.ContainsFunc(c.users, func(u user) bool { return u.stream == s && u.joined })
	})
	if c == nil {
		return
	}
	yes, err := s.Capturing()
	yes = yes && err == nil
	open.mu.Lock()
	defer open.mu.Unlock()
	if i := slices.IndexFunc(c.users, func(u user) bool { return u.stream == s }); i >= 0 {
		c.users[i].joined = yes
	} else {
		c.users = append(c.users, user{s, yes})
	}
}

// strays returns the streams that the capturing goroutine has used and that did not take
// part in the capture.
func (c *Capture) strays() (names []string) {
	open.mu.Lock()
	defer open.mu.Unlock()
	for _, u := range c.users {
		if !u.joined {
			names = append(names, u.stream.String())
		}
	}
	return names
}

// notRun explains why the host cannot wait for captured operations.
const notRun = "captured operations have not run and cannot be waited for"

// RefuseCapture returns an error if the stream is being captured. It costs almost nothing
// while the process captures nothing.
func (s *Stream) RefuseCapture(op, advice string) error {
	if !AnyCapture() {
		return nil
	}
	if yes, err := s.Capturing(); err != nil || !yes {
		return nil // the call itself gets the driver's error
	}
	return s.dev.sys.errs.Captured(op, s.String(), advice)
}

// RefuseWait returns an error if the goroutine must not wait for the stream or query it:
// because the stream is being captured, or because of a capture that the stream is not
// part of.
func (s *Stream) RefuseWait(op string) error {
	if err := s.RefuseCapture(op, notRun); err != nil {
		return err
	}
	return refuseHost(op, s.String)
}

// RefuseCaptured returns an error if the goroutine must not wait for an event of d or
// query it: because the event was captured, or because of another capture.
func (d *Device) RefuseCaptured(op string, captured bool) error {
	if captured {
		return d.sys.errs.Captured(op, "what the event recorded on "+d.String(), notRun)
	}
	return refuseHost(op, func() string { return "an event of " + d.String() })
}

// RefuseSync returns an error if a stream of the device has begun a capture.
func (d *Device) RefuseSync(op string) error {
	if c := find(func(c *Capture) bool { return c.Stream.dev == d }); c != nil {
		return d.sys.errs.Captured(op, c.Stream.String(), notRun+": synchronize the device before or after the capture")
	}
	return nil
}

// refuseHost is RefuseWait for an object that is not part of a capture.
func refuseHost(op string, name func() string) error {
	if !AnyCapture() {
		return nil
	}
	c, others := forbids()
	if c == nil {
		return nil
	}
	who, mode := "the goroutine that captures must not", "relaxed"
	if others {
		who, mode = "no goroutine may", "thread_local"
	}
	return c.Stream.dev.sys.errs.Captured(op, c.Stream.String(), fmt.Sprintf(
		"in the mode %s %s wait for %s or ask for it: do so before or after the capture, or capture in the mode %s", c.modeName(), who, name(), mode))
}

// forbids returns the capture that forbids the calling goroutine calls that
// CUDA considers unsafe in a capture, such as querying a stream, and whether
// another goroutine captures. If there is none, it returns nil.
func forbids() (c *Capture, others bool) {
	me := osthread.ID()
	c = find(func(c *Capture) bool { return c.mode != cudadrv.CaptureRelaxed && c.goroutine == me })
	if c != nil {
		return c, false
	}
	c = find(func(c *Capture) bool { return c.mode == cudadrv.CaptureGlobal })
	return c, c != nil
}
