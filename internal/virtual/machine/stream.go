package machine

import (
	"math/rand/v2"
	"runtime"
	"strings"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
	"github.com/gochorus/chorus/internal/timeline"
)

// The priorities of an H200.
const (
	leastPriority    = 0
	greatestPriority = -5
)

// A Stream runs its operations in order, in a goroutine that exists while there
// are operations. m.mu guards it.
type Stream struct {
	dev       *Device
	handle    cudadrv.Stream
	queue     []*Op
	working   bool
	marked    bool // the running operation is a mark that is already set
	destroyed bool
	now       sanitizer.Stamp
	rng       *rand.Rand
	priority  int32          // recorded only: virtual streams run with equal priority
	released  bool           // its slot was released
	capture   *Capture       // the capture of the stream, or nil
	tail      []int          // predecessors of the next node
	branch    bool           // of an executable graph
	hardware  *hardwareQueue // nil for branches
	running   *Op            // nil between operations

	launcher     cudadrv.Stream // of a branch: the stream that has launched the running operations; 0 is none
	lastLauncher cudadrv.Stream // and the operations that were enqueued last
	captured     uint64         // when the node was captured whose operations are being enqueued; 0 outside of a graph
}

// An Op is one operation of a stream.
type Op struct {
	Name string
	s    *Stream
	host sanitizer.Clock // the host's clock when it enqueued the operation
	run  func(*Op)       // called without m.mu
	// held keeps memory mapped until the operation is done, even if it is freed.
	held []*region
	// always runs it on a lost device, too, because the host may wait for it.
	always bool
	wrong  bool             // the fault plan makes it deliver a wrong byte
	ticket *timeline.Ticket // nil unless the timeline records the operation
	// blocked says what the operation waits for while it cannot proceed on its own; "" while it
	// works. m.mu guards it.
	blocked  string
	remote   bool          // it waits for other processes, whose progress is not known here
	captured uint64        // when a graph captured it; 0 outside of a graph
	at       uint64        // when it was enqueued
	audited  uint64        // when the allocator made the call; 0 if it is none of an allocator
	call     *KernelCall   // that is running, or nil
	queued   bool          // it is in the stream's hardware queue
	turn     chan struct{} // closed when it is the first of the hardware queue; nil if nothing waits
}

func (s *Stream) String() string { return sanitizer.NameOf(s.reported()) }

// reported returns the stream that reports name: for a branch of a graph, the stream of its launch. m.mu is held.
func (s *Stream) reported() cudadrv.Stream {
	if s.launcher != 0 {
		return s.launcher
	}
	return s.handle
}

// Enqueue appends an operation. m.mu is held.
func (s *Stream) Enqueue(name string, run func(*Op)) { s.enqueueBytes(name, 0, run) }

// enqueueBytes is Enqueue for an operation that moves bytes.
func (s *Stream) enqueueBytes(name string, bytes uint64, run func(*Op)) {
	s.push(&Op{Name: name, run: run, ticket: s.ticket(name, bytes), blocked: waitsIn(name)})
}

func (s *Stream) push(o *Op) {
	o.s, o.host, o.captured, o.at = s, s.dev.m.host, s.captured, s.dev.m.tick()
	s.queue = append(s.queue, o)
	s.hardware.push(o)
	if !s.working {
		s.working = true
		s.dev.m.working[s] = struct{}{}
		go s.work()
	}
}

// enqueue is Stream.Enqueue for a driver call that the fault plan may make hang.
func (c *call) enqueue(s *Stream, run func(*Op)) {
	if c.hang {
		c.append(s, func(*Op) { c.m.faults.Hang() })
	}
	if c.wrong || c.slow > 0 {
		wrong, slow, inner := c.wrong, c.slow, run
		run = func(o *Op) {
			time.Sleep(slow)
			o.wrong = wrong
			inner(o)
		}
	}
	c.append(s, run)
}

// append enqueues the operation, or records it if the stream is being captured.
func (c *call) append(s *Stream, run func(*Op)) {
	if s.capture != nil {
		s.capture.add(&node{name: c.name, run: run, check: c.check, uses: c.uses, bytes: c.bytes, cooperative: c.cooperative}, s)
		return
	}
	s.AwaitRoom()
	s.enqueueBytes(c.name, c.bytes, run)
}

func (s *Stream) work() {
	m := s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for len(s.queue) > 0 {
		o := s.queue[0]
		s.queue[0] = nil
		if s.queue = s.queue[1:]; len(s.queue) == LaunchDepth-1 {
			m.room.Broadcast()
		}
		s.marked, s.running = false, o
		o.awaitQueue()
		o.awaitTurn()
		s.now.Seen = s.now.Seen.Join(o.host)
		s.now.Epoch++
		lost := s.dev.status != cudadrv.Success
		o.occupy(+1)
		m.mu.Unlock()
		s.dawdle()
		if !lost || o.always {
			o.time(o.run)
			runtime.KeepAlive(o) // whose memory stays mapped until here
		} else {
			o.ticket.Cancel()
		}
		m.mu.Lock()
		s.running = nil
		o.occupy(-1)
		if o.counts() {
			m.progress++
		}
	}
	s.queue = nil
	s.working = false
	delete(m.working, s)
	s.release()
}

// Idle reports whether all enqueued operations have completed, so that a caller
// that waited for the last mark finds the stream idle even before its goroutine
// has ended. m.mu is held.
func (s *Stream) Idle() bool { return !s.working || s.marked && len(s.queue) == 0 }

// dawdle keeps streams out of step: it often yields to other goroutines and
// sometimes sleeps.
func (s *Stream) dawdle() {
	switch x := s.rng.Uint32(); {
	case x%128 == 0:
		time.Sleep(time.Duration(x>>16%50) * time.Microsecond)
	case x%4 == 0:
		for range 1 + x>>16%4 {
			runtime.Gosched()
		}
	}
}

// release releases the slot of a destroyed stream after it has drained. m.mu is
// held.
func (s *Stream) release() {
	if s.destroyed && s.Idle() && !s.released {
		s.released = true
		s.dev.m.slots.Put(s.now)
	}
}

// Wait orders the work enqueued on the stream from now on after a mark. m.mu is
// held.
func (s *Stream) Wait(name string, k *Mark) {
	lost := s.dev.lost
	s.push(&Op{Name: name, always: true, blocked: "an event that is not reached", run: func(o *Op) {
		select {
		case <-k.done:
		case <-lost:
			return
		}
		m := s.dev.m
		m.mu.Lock()
		s.now.Seen = s.now.Seen.JoinStamp(k.at)
		m.mu.Unlock()
	}})
}

// Stream returns the live stream of a handle; 0 is the device's legacy stream.
// m.mu is held.
func (m *Machine) Stream(dev *Device, h cudadrv.Stream) (*Stream, cudadrv.Result) {
	if h == 0 {
		return dev.legacyStream(), cudadrv.Success
	}
	if s := m.streams[h]; s != nil {
		return s, cudadrv.Success
	}
	return nil, cudadrv.ErrorInvalidHandle
}

// legacyStream returns the device's stream 0. In CUDA it synchronizes with the
// blocking streams of its context, but Chorus creates only non-blocking
// streams, so here it is an ordinary stream. m.mu is held.
func (d *Device) legacyStream() *Stream {
	if d.legacy == nil {
		h := cudadrv.Stream(d.m.Handle()) // a key among the streams, and a seed
		d.legacy = &Stream{dev: d, now: d.m.slots.Take(), rng: rand.New(rand.NewPCG(d.m.seed, uint64(h))), hardware: d.queueFor(leastPriority)}
		d.m.streams[h] = d.legacy
	}
	return d.legacy
}

// beginStream is begin for calls that enqueue on a stream.
func (d driver) beginStream(name string, h cudadrv.Stream) (call, *Stream, cudadrv.Result) {
	c, r := d.begin(name)
	if r != cudadrv.Success {
		return c, nil, r
	}
	s, r := d.m.Stream(c.dev, h)
	if r == cudadrv.Success {
		r = s.dev.status
	}
	if r == cudadrv.Success && s.capture != nil && s.capture.invalid {
		r = cudadrv.ErrorStreamCaptureInvalidated
	}
	if r != cudadrv.Success {
		c.end()
	}
	return c, s, r
}

func (d driver) StreamCreateWithPriority(flags uint32, priority int32) (cudadrv.Stream, cudadrv.Result) {
	c, r := d.begin("cuStreamCreateWithPriority")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	if flags&^cudadrv.StreamNonBlocking != 0 {
		return 0, cudadrv.ErrorInvalidValue
	}
	h := cudadrv.Stream(d.m.Handle())
	priority = min(max(priority, greatestPriority), leastPriority)
	d.m.streams[h] = &Stream{
		dev: c.dev, handle: h, now: d.m.slots.Take(),
		rng:      rand.New(rand.NewPCG(d.m.seed, uint64(h))),
		priority: priority, hardware: c.dev.queueFor(priority),
	}
	return h, cudadrv.Success
}

func (d driver) StreamDestroy(h cudadrv.Stream) cudadrv.Result {
	c, r := d.beginEnding("cuStreamDestroy")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	s, r := d.m.Stream(c.dev, h)
	if r != cudadrv.Success {
		return r
	}
	if h == 0 {
		return cudadrv.ErrorInvalidHandle
	}
	if s.capture != nil {
		return s.Refused()
	}
	s.dev.ended = append(s.dev.unseen(), s.Mark())
	delete(d.m.streams, h)
	s.destroyed = true
	s.hardware.streams--
	s.release()
	return cudadrv.Success
}

func (d driver) StreamSynchronize(h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuStreamSynchronize", h)
	if r != cudadrv.Success {
		return r
	}
	if s.capture != nil {
		defer c.end()
		return s.Refused()
	}
	k := s.Mark()
	c.end()
	return d.m.Await(s.dev, k)
}

func (d driver) StreamQuery(h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuStreamQuery", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if s.capture != nil {
		return s.Refused()
	}
	if !s.Idle() {
		return cudadrv.ErrorNotReady
	}
	d.m.host = d.m.host.JoinStamp(s.now)
	return cudadrv.Success
}

func (d driver) StreamWaitEvent(h cudadrv.Stream, e cudadrv.Event, flags uint32) cudadrv.Result {
	c, s, r := d.beginStream("cuStreamWaitEvent", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	ev := d.m.event(e)
	if ev == nil {
		return cudadrv.ErrorInvalidHandle
	}
	if flags&^cudadrv.EventExternal != 0 || flags != 0 && s.capture == nil {
		return cudadrv.ErrorInvalidValue
	}
	if flags != 0 {
		s.addExternal(c.name, e, externalWait{ev})
		return cudadrv.Success
	}
	if s.capture != nil || ev.captured != nil {
		return s.waitCaptured(ev)
	}
	if c.hang {
		s.Enqueue(c.name, func(*Op) { c.m.faults.Hang() })
	}
	if k := ev.mark(); k != nil {
		s.Wait(c.name, k)
	}
	return cudadrv.Success
}

func (d driver) StreamGetPriority(h cudadrv.Stream) (int32, cudadrv.Result) {
	c, s, r := d.beginStream("cuStreamGetPriority", h)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	return s.priority, cudadrv.Success
}

func (d driver) StreamGetCtx(h cudadrv.Stream) (cudadrv.Context, cudadrv.Result) {
	c, s, r := d.beginStream("cuStreamGetCtx", h)
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	return s.dev.context, cudadrv.Success
}

// LaunchDepth is the number of operations that a stream holds before a launch
// waits for space, as in CUDA's driver.
const LaunchDepth = 1024

// AwaitRoom waits until the stream has space for one more operation. Meanwhile no
// other call on the device enters the driver, not even a query, because CUDA
// holds the lock of the context while a launch waits. m.mu is held, except during
// the wait.
func (s *Stream) AwaitRoom() {
	if len(s.queue) < LaunchDepth {
		return
	}
	m, dev := s.dev.m, s.dev
	dev.waiting++
	for len(s.queue) >= LaunchDepth {
		m.room.Wait()
	}
	dev.waiting--
	m.room.Broadcast()
}

// enter waits until no launch on the device waits for space. m.mu is held, except during the wait.
func (m *Machine) enter(dev *Device) {
	for dev != nil && dev.waiting > 0 {
		m.room.Wait()
	}
}

// kindsOfNames are the kinds of operations in the timeline, by the beginnings of their names.
var kindsOfNames = []struct{ prefix, kind string }{
	{"kernel ", timeline.Kernel}, {"cuMemcpy", timeline.Copy}, {"cuMemset", timeline.Fill}, {"nccl", timeline.Collective},
	{"cublas", timeline.Kernel}, {"cuFile", timeline.Copy}, {"cuGraphLaunch", timeline.Graph}, {"cuLaunchHostFunc", timeline.Callback},
}

// ticket announces an operation to the timeline. It returns nil if no timeline is recorded, or if
// timelines do not show the operation. m.mu is held.
func (s *Stream) ticket(name string, bytes uint64) *timeline.Ticket {
	r := timeline.Current()
	if r == nil {
		return nil
	}
	for _, k := range kindsOfNames {
		if strings.HasPrefix(name, k.prefix) {
			on := timeline.Stream{Device: int(s.dev.ordinal), Handle: uint64(s.handle), Branch: s.branch}
			return r.Enqueue(k.kind, strings.TrimPrefix(name, "kernel "), on, bytes)
		}
	}
	return nil
}

// time runs the operation and records its time.
func (o *Op) time(run func(*Op)) {
	if o.ticket == nil {
		run(o)
		return
	}
	begin := time.Now()
	run(o)
	o.ticket.Done(begin, time.Now())
}

// timeSince ends a ticket when the stream arrives here, for an operation that began at a mark.
// m.mu is held.
func (s *Stream) timeSince(name string, start *Mark, t *timeline.Ticket) {
	if t != nil {
		s.push(&Op{Name: name, always: true, run: func(*Op) { t.Done(start.when, time.Now()) }})
	}
}
