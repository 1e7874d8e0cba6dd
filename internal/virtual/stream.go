package virtual

import (
	"math/rand/v2"
	"runtime"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// The priorities of an H200.
const (
	leastPriority    = 0
	greatestPriority = -5
)

// A stream runs its operations one after the other in a goroutine that exists
// while there are any. m.mu guards it.
type stream struct {
	dev       *device
	handle    cudadrv.Stream
	queue     []*op
	working   bool
	marked    bool // the operation that runs is a mark, which has been set
	destroyed bool
	now       stamp
	rng       *rand.Rand
	priority  int32    // all virtual streams are equal nevertheless
	released  bool     // its slot was given back
	capture   *capture // that it takes part in, or nil
	tail      []int    // the nodes that the next one comes after
}

// An op is one operation of a stream.
type op struct {
	name string
	s    *stream
	host clock     // what the host had waited for when it enqueued the operation
	run  func(*op) // without m.mu
	// held keeps the memory that it uses mapped until it is done, freed or not.
	held []*region
	// always makes it run on a lost device too: the host may wait for it.
	always bool
}

func (s *stream) String() string { return nameOf(s.handle) }

// enqueue appends an operation. m.mu is held.
func (s *stream) enqueue(name string, run func(*op)) { s.push(&op{name: name, run: run}) }

func (s *stream) push(o *op) {
	o.s, o.host = s, s.dev.m.host
	s.queue = append(s.queue, o)
	if !s.working {
		s.working = true
		go s.work()
	}
}

// enqueue is stream.enqueue for a driver call that the fault plan may hang.
func (c *call) enqueue(s *stream, run func(*op)) {
	if c.hang {
		c.append(s, func(*op) { forever(nil) })
	}
	c.append(s, run)
}

// append enqueues the operation, or records it where the stream is captured.
func (c *call) append(s *stream, run func(*op)) {
	if s.capture != nil {
		s.capture.add(&node{name: c.name, run: run, check: c.check}, s)
		return
	}
	s.awaitRoom()
	s.enqueue(c.name, run)
}

func (s *stream) work() {
	m := s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	for len(s.queue) > 0 {
		o := s.queue[0]
		s.queue[0] = nil
		if s.queue = s.queue[1:]; len(s.queue) == launchDepth-1 {
			m.room.Broadcast()
		}
		s.marked = false
		s.now.seen = s.now.seen.join(o.host)
		s.now.epoch++
		lost := s.dev.status != cudadrv.Success
		m.mu.Unlock()
		s.dawdle()
		if !lost || o.always {
			o.run(o)
		}
		m.mu.Lock()
	}
	s.queue = nil
	s.working = false
	s.release()
}

// idle reports whether all that was enqueued has completed. Who has waited for
// the last mark finds the stream idle although its goroutine has not come to its
// end. m.mu is held.
func (s *stream) idle() bool { return !s.working || s.marked && len(s.queue) == 0 }

// dawdle keeps streams out of step: mostly it lets others go first, now and
// then it waits.
func (s *stream) dawdle() {
	switch x := s.rng.Uint32(); {
	case x%128 == 0:
		time.Sleep(time.Duration(x>>16%50) * time.Microsecond)
	case x%4 == 0:
		for range 1 + x>>16%4 {
			runtime.Gosched()
		}
	}
}

// release gives the slot of a destroyed stream back once it has drained. m.mu
// is held.
func (s *stream) release() {
	if s.destroyed && s.idle() && !s.released {
		s.released = true
		s.dev.m.slots.put(s.now)
	}
}

// wait makes the stream wait for a mark. m.mu is held.
func (s *stream) wait(name string, k *mark) {
	lost := s.dev.lost
	s.push(&op{name: name, always: true, run: func(o *op) {
		select {
		case <-k.done:
		case <-lost:
			return
		}
		m := s.dev.m
		m.mu.Lock()
		s.now.seen = s.now.seen.joinStamp(k.at)
		m.mu.Unlock()
	}})
}

// stream returns the live stream of a handle, of which 0 is the device's legacy
// stream. m.mu is held.
func (m *Machine) stream(dev *device, h cudadrv.Stream) (*stream, cudadrv.Result) {
	if h == 0 {
		return dev.legacyStream(), cudadrv.Success
	}
	if s := m.streams[h]; s != nil {
		return s, cudadrv.Success
	}
	return nil, cudadrv.ErrorInvalidHandle
}

// legacyStream returns the device's stream 0. CUDA's waits for the blocking
// streams of its context, and they for it; Chorus makes none of those, so here
// it is one stream more. m.mu is held.
func (d *device) legacyStream() *stream {
	if d.legacy == nil {
		h := cudadrv.Stream(d.m.handle()) // a place among the streams, and a seed
		d.legacy = &stream{dev: d, now: d.m.slots.take(), rng: rand.New(rand.NewPCG(d.m.seed, uint64(h)))}
		d.m.streams[h] = d.legacy
	}
	return d.legacy
}

// beginStream is begin for calls that enqueue on a stream.
func (d driver) beginStream(name string, h cudadrv.Stream) (call, *stream, cudadrv.Result) {
	c, r := d.begin(name)
	if r != cudadrv.Success {
		return c, nil, r
	}
	s, r := d.m.stream(c.dev, h)
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
	h := cudadrv.Stream(d.m.handle())
	d.m.streams[h] = &stream{
		dev: c.dev, handle: h, now: d.m.slots.take(),
		rng:      rand.New(rand.NewPCG(d.m.seed, uint64(h))),
		priority: min(max(priority, greatestPriority), leastPriority),
	}
	return h, cudadrv.Success
}

func (d driver) StreamDestroy(h cudadrv.Stream) cudadrv.Result {
	c, r := d.beginEnding("cuStreamDestroy")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	s, r := d.m.stream(c.dev, h)
	if r != cudadrv.Success {
		return r
	}
	if h == 0 {
		return cudadrv.ErrorInvalidHandle
	}
	if s.capture != nil {
		return s.refused()
	}
	s.dev.ended = append(s.dev.unseen(), s.mark())
	delete(d.m.streams, h)
	s.destroyed = true
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
		return s.refused()
	}
	k := s.mark()
	c.end()
	return d.m.await(s.dev, k)
}

func (d driver) StreamQuery(h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuStreamQuery", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if s.capture != nil {
		return s.refused()
	}
	if !s.idle() {
		return cudadrv.ErrorNotReady
	}
	d.m.host = d.m.host.joinStamp(s.now)
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
	if flags != 0 {
		return cudadrv.ErrorInvalidValue
	}
	if s.capture != nil || ev.captured != nil {
		return s.waitCaptured(ev)
	}
	if c.hang {
		s.enqueue(c.name, func(*op) { forever(nil) })
	}
	if k := ev.mark(); k != nil {
		s.wait(c.name, k)
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
