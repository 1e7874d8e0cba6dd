package alloc

import "slices"

// A batch is blocks that were given back and that the same other streams have
// used. One event behind them all is enough for them, so that none is recorded
// before there are many, or somebody needs the memory.
type batch struct {
	users    []Stream // held until they have recorded their events
	captured []Stream // held until their capture has ended, before which nobody gets the blocks
	blocks   []block
	bytes    uint64
	events   []mark // behind the blocks, once they are recorded
}

// A mark is an event of a stream, which is only named.
type mark struct {
	event Event
	of    Stream
}

// When a batch gets its events although nobody needs the memory.
const (
	batchBlocks = 64
	batchBytes  = 64 << 20
	lookEvery   = 64 // allocations between two looks at the events
)

// waiting has the blocks of an arena that other streams may still use.
type waiting struct {
	open   []*batch // without events
	sealed []*batch
	since  int // allocations since the last look
}

// due says whether an allocation should look for passed events, of which there are
// some.
func (w *waiting) due() bool {
	w.since++
	return w.since >= lookEvery
}

// add takes a block with its users, and lets go of those that it has already.
func (w *waiting) add(b block, users, captured []Stream) {
	i := slices.IndexFunc(w.open, func(t *batch) bool {
		return slices.Equal(t.users, users) && slices.Equal(t.captured, captured)
	})
	if i < 0 {
		i = len(w.open)
		w.open = append(w.open, &batch{users: users, captured: captured})
	} else {
		release(users)
		release(captured)
	}
	t := w.open[i]
	t.blocks = append(t.blocks, b)
	t.bytes += b.size()
	if len(t.blocks) >= batchBlocks || t.bytes >= batchBytes {
		w.seal(i)
	}
}

func release(streams []Stream) {
	for _, s := range streams {
		s.Release()
	}
}

// seal records the events of an open batch. Where a stream cannot record now, the
// batch stays open. It reports whether the batch is open no more.
func (w *waiting) seal(i int) bool {
	t := w.open[i]
	if len(t.captured) > 0 {
		return false
	}
	for _, s := range t.users {
		e, err := s.Record()
		if e == nil || err != nil {
			t.drop()
			return false
		}
		t.events = append(t.events, mark{e, s})
	}
	release(t.users)
	t.users = nil
	w.open = slices.Delete(w.open, i, i+1)
	w.sealed = append(w.sealed, t)
	return true
}

func (t *batch) drop() {
	for _, m := range t.events {
		m.event.Close()
	}
	t.events = nil
}

func (w *waiting) sealAll() {
	for i := 0; i < len(w.open); {
		if !w.seal(i) {
			i++
		}
	}
}

// collect frees the blocks that no stream uses any more. With all it also asks for
// those that have no event yet. The domain is locked.
func (a *Arena) collect(all bool) {
	w := &a.waiting
	w.since = 0
	if len(w.open)+len(w.sealed) == 0 {
		return
	}
	if all {
		w.sealAll()
	}
	var late []Stream // the events behind one that has not passed are not asked
	a.settleBatches(func(m mark) bool {
		if slices.Contains(late, m.of) {
			return false
		}
		passed, err := m.event.Passed()
		if !passed || err != nil {
			late = append(late, m.of)
			return false
		}
		return true
	})
}

// claim makes all blocks usable at once: the arena's stream waits for the others.
// A stream that is captured cannot wait for what is not.
func (a *Arena) claim() {
	if a.stream == nil || a.pool.capturing {
		return
	}
	a.waiting.sealAll()
	a.settleBatches(func(m mark) bool { return a.stream.Wait(m.event) == nil })
}

// await waits on the host until no stream uses what was given back. growth is held,
// and the domain is unlocked while it waits: the streams may be about to call functions
// that free memory.
func (a *Arena) await() {
	a.domain.lock()
	a.waiting.sealAll()
	list := a.waiting.sealed
	a.waiting.sealed = nil // nobody else asks for their events
	a.device.leave(a.domain)
	for _, t := range list {
		t.settled(func(m mark) bool { return m.event.Sync() == nil })
	}
	a.domain.lock()
	a.waiting.sealed = append(list, a.waiting.sealed...)
	a.settleBatches(func(mark) bool { return false })
	a.device.leave(a.domain)
}

// settleBatches frees the blocks of the batches whose events are all done.
func (a *Arena) settleBatches(done func(mark) bool) {
	a.waiting.sealed = slices.DeleteFunc(a.waiting.sealed, func(t *batch) bool {
		if !t.settled(done) {
			return false
		}
		for _, b := range t.blocks {
			a.put(b, b.slot(), a.device.settings.Load())
		}
		return true
	})
	a.emptyPocket() // who looks for a block now, or for an idle segment, looks on the shelves
}

// settled forgets the events that are done, and says whether that is all.
func (t *batch) settled(done func(mark) bool) bool {
	for len(t.events) > 0 {
		m := t.events[len(t.events)-1]
		if !done(m) {
			return false
		}
		m.event.Close()
		t.events = t.events[:len(t.events)-1]
	}
	return true
}

// uncapture forgets the streams whose capture has ended, and frees what waited for
// no other.
func (a *Arena) uncapture() {
	a.waiting.open = slices.DeleteFunc(a.waiting.open, func(t *batch) bool {
		release(t.captured)
		t.captured = nil
		if len(t.users) > 0 {
			return false
		}
		for _, b := range t.blocks {
			a.put(b, b.slot(), a.device.settings.Load())
		}
		return true
	})
}
