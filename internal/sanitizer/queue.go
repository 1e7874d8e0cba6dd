package sanitizer

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/race"
)

// A queue is a stream of the driver.
type queue struct {
	ctx      cudadrv.Context
	handle   cudadrv.Stream
	now      race.Stamp
	blocking bool     // it may synchronize with stream 0 of its context
	capture  *capture // the capture of the stream, or nil
	tail     []int    // predecessors of the next node
}

// An event holds the point of its last record.
type event struct {
	ctx      cudadrv.Context
	last     race.Stamp
	recorded bool
	capture  *capture // of its last record, if it was captured
	nodes    []int    // that precede the event in the capture
}

// An ended is the last point of a destroyed stream whose work may be pending.
type ended struct {
	ctx  cudadrv.Context
	last race.Stamp
}

// queue returns the queue of a stream. Stream 0 and streams of other libraries get one at their
// first use. A stream of another library may be a blocking stream. t.mu is held.
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

// endQueue forgets a stream. Its slot is reused once the host has waited for its work.
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
func (t *tracker) device(ctx cudadrv.Context) (c race.Clock) {
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
