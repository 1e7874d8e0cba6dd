package alloc

import "slices"

// A batch is blocks that were given back and that the same other streams have
// used. One event behind them all is enough for them, so that none is recorded
// before there are many, or somebody needs the memory.
type batch struct {
	users  []Stream
	blocks []block
	bytes  uint64
	events []Event // behind the blocks, once they are recorded
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

func (w *waiting) add(b block, users []Stream) {
	i := slices.IndexFunc(w.open, func(t *batch) bool { return slices.Equal(t.users, users) })
	if i < 0 {
		i = len(w.open)
		w.open = append(w.open, &batch{users: users})
	} else {
		release(users)
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
	for len(t.events) < len(t.users) {
		e, err := t.users[len(t.events)].Record()
		if e == nil || err != nil {
			break
		}
		t.events = append(t.events, e)
	}
	if len(t.events) < len(t.users) {
		t.drop()
		return false
	}
	release(t.users)
	t.users = nil
	w.open = slices.Delete(w.open, i, i+1)
	w.sealed = append(w.sealed, t)
	return true
}

func (t *batch) drop() {
	for _, e := range t.events {
		e.Close()
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
	if all {
		w.sealAll()
	}
	a.settleBatches(func(e Event) (bool, error) { return e.Passed() })
}

// claim makes all blocks usable at once: the arena's stream waits for the others.
func (a *Arena) claim() {
	if a.stream == nil {
		return
	}
	a.waiting.sealAll()
	a.settleBatches(func(e Event) (bool, error) {
		err := a.stream.Wait(e)
		return err == nil, err
	})
}

// settleBatches frees the blocks of the batches whose events are all done.
func (a *Arena) settleBatches(done func(Event) (bool, error)) {
	a.waiting.sealed = slices.DeleteFunc(a.waiting.sealed, func(t *batch) bool {
		for len(t.events) > 0 {
			e := t.events[len(t.events)-1]
			if ok, err := done(e); !ok || err != nil {
				return false
			}
			e.Close()
			t.events = t.events[:len(t.events)-1]
		}
		for _, b := range t.blocks {
			a.put(b, b.slot(), a.device.settings.Load())
		}
		return true
	})
	a.emptyPocket() // who looks for a block now, or for an idle segment, looks on the shelves
}

// await waits on the host until no stream uses what was given back. The domain is
// locked.
func (a *Arena) await() {
	a.waiting.sealAll()
	a.settleBatches(func(e Event) (bool, error) {
		err := e.Sync()
		return err == nil, err
	})
}
