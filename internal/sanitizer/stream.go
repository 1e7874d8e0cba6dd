package sanitizer

import (
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

func (d driver) StreamCreateWithPriority(flags uint32, priority int32) (cudadrv.Stream, cudadrv.Result) {
	ctx := d.t.current()
	s, r := d.Driver.StreamCreateWithPriority(flags, priority)
	if r == cudadrv.Success {
		d.t.mu.Lock()
		defer d.t.mu.Unlock()
		d.t.addQueue(ctx, s, flags&cudadrv.StreamNonBlocking == 0)
	}
	return s, r
}

func (d driver) StreamDestroy(s cudadrv.Stream) cudadrv.Result {
	d.t.mu.Lock()
	q := d.t.queues[s]
	delete(d.t.queues, s)
	d.t.mu.Unlock()
	r := d.Driver.StreamDestroy(s)
	if q == nil {
		return r
	}
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	if r != cudadrv.Success && d.t.queues[s] == nil {
		d.t.queues[s] = q
		return r
	}
	d.t.ended = append(d.t.ended, ended{q.ctx, q.now})
	d.t.reap()
	return r
}

// awaits calls the driver and records that the host has waited for the operations that were on
// the stream before the call.
func (d driver) awaits(s cudadrv.Stream, call func() cudadrv.Result) cudadrv.Result {
	ctx := d.t.contextFor(s)
	d.t.mu.Lock()
	at := Clock(nil).JoinStamp(d.t.queue(ctx, s).now)
	d.t.mu.Unlock()
	return d.waited(at, call)
}

// waited calls the driver and records that the host has waited for operations.
func (d driver) waited(at Clock, call func() cudadrv.Result) cudadrv.Result {
	r := call()
	if r == cudadrv.Success {
		d.t.waited(at)
	}
	return r
}

func (d driver) StreamSynchronize(s cudadrv.Stream) cudadrv.Result {
	return d.awaits(s, func() cudadrv.Result { return d.Driver.StreamSynchronize(s) })
}

func (d driver) StreamQuery(s cudadrv.Stream) cudadrv.Result {
	return d.awaits(s, func() cudadrv.Result { return d.Driver.StreamQuery(s) })
}

func (d driver) EventCreate(flags uint32) (cudadrv.Event, cudadrv.Result) {
	ctx := d.t.current()
	e, r := d.Driver.EventCreate(flags)
	if r == cudadrv.Success {
		d.t.mu.Lock()
		defer d.t.mu.Unlock()
		d.t.events[e] = &event{ctx: ctx}
	}
	return e, r
}

func (d driver) EventDestroy(h cudadrv.Event) cudadrv.Result {
	d.t.mu.Lock()
	e := d.t.events[h]
	delete(d.t.events, h)
	d.t.mu.Unlock()
	r := d.Driver.EventDestroy(h)
	if r != cudadrv.Success && e != nil {
		d.t.mu.Lock()
		defer d.t.mu.Unlock()
		d.t.events[h] = e
	}
	return r
}

func (d driver) EventRecord(e cudadrv.Event, s cudadrv.Stream) cudadrv.Result {
	ctx := d.t.contextFor(s)
	return d.recorded(d.Driver.EventRecord(e, s), ctx, e, s, 0)
}

func (d driver) EventRecordWithFlags(e cudadrv.Event, s cudadrv.Stream, flags uint32) cudadrv.Result {
	ctx := d.t.contextFor(s)
	return d.recorded(d.Driver.EventRecordWithFlags(e, s, flags), ctx, e, s, flags)
}

func (d driver) recorded(r cudadrv.Result, ctx cudadrv.Context, h cudadrv.Event, s cudadrv.Stream, flags uint32) cudadrv.Result {
	d.t.mu.Lock()
	defer d.t.unlock()
	e, q := d.t.events[h], d.t.queue(ctx, s)
	switch {
	case r != cudadrv.Success || e == nil:
	case q.capture != nil && flags&cudadrv.EventExternal == 0:
		e.capture, e.nodes = q.capture, slices.Clone(q.tail)
	default: // a graph records external events at each launch
		d.t.issue(recordOf(e), q)
	}
	return r
}

// recordOf returns the record of an event.
func recordOf(e *event) *node {
	return &node{name: "cuEventRecord", act: func(on *queue) { e.last, e.recorded, e.capture = on.now, true, nil }}
}

func (d driver) StreamWaitEvent(s cudadrv.Stream, h cudadrv.Event, flags uint32) cudadrv.Result {
	ctx := d.t.contextFor(s)
	r := d.Driver.StreamWaitEvent(s, h, flags)
	d.t.mu.Lock()
	defer d.t.unlock()
	e, q := d.t.events[h], d.t.queue(ctx, s)
	switch {
	case r != cudadrv.Success || e == nil:
	case flags&cudadrv.EventExternal == 0 && e.capture != nil && q.capture == e.capture:
		q.tail = union(q.tail, e.nodes)
	case flags&cudadrv.EventExternal == 0 && e.capture != nil:
		e.capture.join(q, e.nodes)
	case flags&cudadrv.EventExternal == 0 && q.capture != nil: // of an event that was never recorded
	default:
		d.t.issue(&node{name: "cuStreamWaitEvent", act: func(on *queue) {
			if e.recorded {
				on.now.Seen = on.now.Seen.JoinStamp(e.last)
			}
		}}, q)
	}
	return r
}

// passed calls the driver and records that the host has waited for the last record.
func (d driver) passed(h cudadrv.Event, call func() cudadrv.Result) cudadrv.Result {
	d.t.mu.Lock()
	var at Clock
	if e := d.t.events[h]; e != nil && e.recorded {
		at = at.JoinStamp(e.last)
	}
	d.t.mu.Unlock()
	return d.waited(at, call)
}

func (d driver) EventQuery(h cudadrv.Event) cudadrv.Result {
	return d.passed(h, func() cudadrv.Result { return d.Driver.EventQuery(h) })
}

func (d driver) EventSynchronize(h cudadrv.Event) cudadrv.Result {
	return d.passed(h, func() cudadrv.Result { return d.Driver.EventSynchronize(h) })
}

// A queue is a stream of the driver.
type queue struct {
	ctx      cudadrv.Context
	handle   cudadrv.Stream
	now      Stamp
	blocking bool     // it may synchronize with stream 0 of its context
	capture  *capture // the capture of the stream, or nil
	tail     []int    // predecessors of the next node
}

// An event holds the point of its last record.
type event struct {
	ctx      cudadrv.Context
	last     Stamp
	recorded bool
	capture  *capture // of its last record, if it was captured
	nodes    []int    // that precede the event in the capture
}

// An ended is the last point of a destroyed stream whose work may be pending.
type ended struct {
	ctx  cudadrv.Context
	last Stamp
}

// queue returns the queue of a stream. Stream 0 and streams of other libraries
// get one at their first use; those of other libraries may be blocking streams.
// t.mu is held.
func (t *tracker) queue(ctx cudadrv.Context, h cudadrv.Stream) *queue {
	if h == 0 {
		if t.legacy[ctx] == nil {
			t.legacy[ctx] = &queue{ctx: ctx, now: t.slots.Take()}
			t.contexts[t.legacy[ctx].now.Slot] = ctx
		}
		return t.legacy[ctx]
	}
	if q := t.queues[h]; q != nil {
		return q
	}
	return t.addQueue(ctx, h, true)
}

func (t *tracker) addQueue(ctx cudadrv.Context, h cudadrv.Stream, blocking bool) *queue {
	t.reap()
	q := &queue{ctx: ctx, handle: h, now: t.slots.Take(), blocking: blocking}
	t.queues[h], t.contexts[q.now.Slot] = q, ctx
	return q
}

// endQueue forgets a stream, whose slot is reused once the host has waited for
// its work.
func (t *tracker) endQueue(q *queue) {
	delete(t.queues, q.handle)
	t.ended = append(t.ended, ended{q.ctx, q.now})
	t.reap()
}

// reap releases the slots of destroyed streams that the host has waited for.
func (t *tracker) reap() {
	rest := t.ended[:0]
	for _, e := range t.ended {
		if t.host.Covers(e.last) {
			t.slots.Put(e.last)
		} else {
			rest = append(rest, e)
		}
	}
	t.ended = rest
}

// forked orders the next operation of a queue after everything that the host has waited for,
// and after the operations that stream 0 orders. t.mu is held.
func (t *tracker) forked(q *queue) {
	q.now.Seen = q.now.Seen.Join(t.host)
	if q.handle == 0 {
		for _, other := range t.queues {
			if other.blocking && other.ctx == q.ctx && other.capture == nil {
				q.now.Seen = q.now.Seen.JoinStamp(other.now)
			}
		}
	} else if legacy := t.legacy[q.ctx]; q.blocking && legacy != nil {
		q.now.Seen = q.now.Seen.JoinStamp(legacy.now)
	}
}

// device returns the points of all streams of a context, as its synchronization waits for
// them. A graph completes before later operations of the stream that launched it. t.mu is held.
func (t *tracker) device(ctx cudadrv.Context) (c Clock) {
	for _, q := range t.queues {
		if q.ctx == ctx {
			c = c.JoinStamp(q.now)
		}
	}
	if q := t.legacy[ctx]; q != nil {
		c = c.JoinStamp(q.now)
	}
	for _, e := range t.ended {
		if e.ctx == ctx {
			c = c.JoinStamp(e.last)
		}
	}
	return c
}

// reset forgets everything of a context that was released.
func (t *tracker) reset(ctx cudadrv.Context) {
	t.host = t.host.Join(t.device(ctx))
	for _, q := range t.queues {
		if q.ctx == ctx {
			t.endQueue(q)
		}
	}
	if q := t.legacy[ctx]; q != nil {
		delete(t.legacy, ctx)
		t.ended = append(t.ended, ended{ctx, q.now})
	}
	t.reap()
	for h, e := range t.events {
		if e.ctx == ctx {
			delete(t.events, h)
		}
	}
	t.blocks.deleteOf(ctx)
}
