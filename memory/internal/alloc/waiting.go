package alloc

import "slices"

// A batch is a set of freed blocks that the same other streams have used. Usually it
// has one block, whose events are recorded when it is freed. If a stream cannot record
// then, because it is captured, its blocks share one event after the capture.
type batch struct {
	users    []Stream // retained until they have recorded their events
	captured []Stream // retained until their capture has ended; the blocks are not reused before
	blocks   []block
	one      [1]block // backing array for the first block
	events   []Event  // by user, after the operations on the blocks, once recorded
	left     int      // events that have not passed
}

// A queue has the events that one stream has recorded, in order.
type queue struct {
	of    Stream // only for comparison: it may have ended
	marks []mark
}

// A mark is an event with the batch that waits for it.
type mark struct {
	event Event
	batch *batch
}

// waiting has the freed blocks of an arena that other streams may still use.
type waiting struct {
	open   []*batch // without events yet
	queues []*queue
}

func newBatch(b block, users, captured []Stream) *batch {
	t := &batch{users: users, captured: captured}
	t.one[0] = b
	t.blocks = t.one[:]
	return t
}

// any reports whether there are such blocks.
func (w *waiting) any() bool { return len(w.open)+len(w.queues) > 0 }

// add adds a batch, and merges an open one with another that waits for the same
// streams.
func (w *waiting) add(t *batch) {
	if t.events != nil {
		w.enqueue(t)
		return
	}
	i := slices.IndexFunc(w.open, func(o *batch) bool {
		return slices.Equal(o.users, t.users) && slices.Equal(o.captured, t.captured)
	})
	if i < 0 {
		w.open = append(w.open, t)
		return
	}
	release(t.users)
	release(t.captured)
	w.open[i].blocks = append(w.open[i].blocks, t.blocks...)
}

// enqueue appends the events of a batch to the queues.
func (w *waiting) enqueue(t *batch) {
	for i, s := range t.users {
		j := slices.IndexFunc(w.queues, func(q *queue) bool { return q.of == s })
		if j < 0 {
			j = len(w.queues)
			w.queues = append(w.queues, &queue{of: s})
		}
		w.queues[j].marks = append(w.queues[j].marks, mark{t.events[i], t})
	}
	t.left = len(t.users)
	release(t.users)
	t.users, t.events = nil, nil
}

func release(streams []Stream) {
	for _, s := range streams {
		s.Release()
	}
}

// recordEvents records the events of a batch, and reports whether all events
// are recorded. If a stream cannot record an event now, the batch stays open.
func (t *batch) recordEvents() bool {
	if len(t.captured) > 0 {
		return false
	}
	for _, s := range t.users {
		e, err := s.Record()
		if e == nil || err != nil {
			for _, e := range t.events {
				e.Close()
			}
			t.events = nil
			return false
		}
		t.events = append(t.events, e)
	}
	return true
}

// recordAll records the events of the open batches.
func (w *waiting) recordAll() {
	w.open = slices.DeleteFunc(w.open, func(t *batch) bool {
		if !t.recordEvents() {
			return false
		}
		w.enqueue(t)
		return true
	})
}

// postpone queues a block until the other streams that may still use it have passed. The domain
// is not locked: recording an event may block until a host callback of a stream
// returns, and that callback may free memory.
func (a *Arena) postpone(t *batch) {
	if a.device.barred() == nil {
		t.recordEvents()
	}
	a.domain.lock()
	a.waiting.add(t)
	a.device.unlockDomain(a.domain)
}

// pass frees the blocks whose last outstanding events are the first n marks.
func (a *Arena) pass(q *queue, n int) {
	for _, m := range q.marks[:n] {
		m.event.Close()
		if m.batch.left--; m.batch.left > 0 {
			continue
		}
		for _, b := range m.batch.blocks {
			a.freeUnused(b, b.slot(), a.device.settings.Load())
		}
	}
	clear(q.marks[:n])
	q.marks = q.marks[n:]
}

// forgetQueues removes the empty queues.
func (w *waiting) forgetQueues() {
	w.queues = slices.DeleteFunc(w.queues, func(q *queue) bool { return len(q.marks) == 0 })
}

// collect frees the blocks that no stream uses any more. It runs at each allocation, as
// torch's process_events does: it queries the events of each stream up to the first one
// that has not passed. The domain is locked.
func (a *Arena) collect() {
	if a.device.barred() != nil {
		return
	}
	w := &a.waiting
	w.recordAll()
	for _, q := range w.queues {
		n := 0
		for n < len(q.marks) {
			if passed, err := q.marks[n].event.Passed(); !passed || err != nil {
				break
			}
			n++
		}
		a.pass(q, n)
	}
	w.forgetQueues()
}

// claim frees all waiting blocks at once: the arena's stream waits for the other
// streams. A captured stream cannot wait for streams outside of its capture.
func (a *Arena) claim() {
	if a.stream == nil || a.pool.capturing {
		return
	}
	w := &a.waiting
	w.recordAll()
	for _, q := range w.queues {
		if a.stream.Wait(q.marks[len(q.marks)-1].event) == nil {
			a.pass(q, len(q.marks))
		}
	}
	w.forgetQueues()
	a.flushLastFreed() // the search covers only the freeLists
}

// await waits on the host until no stream uses the freed blocks. growth is held. The
// domain is unlocked while it waits, because the streams may be about to call functions
// that free memory.
func (a *Arena) await() {
	w := &a.waiting
	a.domain.lock()
	w.recordAll()
	list := w.queues
	w.queues = nil // so that collect does not query these events
	a.device.unlockDomain(a.domain)
	past := make([]int, len(list)) // passed marks
	for i, q := range list {
		if q.marks[len(q.marks)-1].event.Sync() == nil {
			past[i] = len(q.marks)
		}
	}
	a.domain.lock()
	for i, q := range list {
		a.pass(q, past[i])
	}
	w.queues = append(list, w.queues...)
	w.forgetQueues()
	a.flushLastFreed() // the search for idle segments covers only the freeLists
	a.device.unlockDomain(a.domain)
}

// uncapture forgets the streams whose capture has ended, and frees the blocks that
// waited only for them.
func (a *Arena) uncapture() {
	a.waiting.open = slices.DeleteFunc(a.waiting.open, func(t *batch) bool {
		release(t.captured)
		t.captured = nil
		if len(t.users) > 0 {
			return false
		}
		for _, b := range t.blocks {
			a.freeUnused(b, b.slot(), a.device.settings.Load())
		}
		return true
	})
}
