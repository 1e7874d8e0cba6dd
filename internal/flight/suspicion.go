package flight

import (
	"math"
	"time"
)

// A Suspicion is a range of operations. One of these operations may hang.
type Suspicion struct {
	First, Last Entry
	Lost        bool          // an earlier operation, which the ring has overwritten, may hang too
	Marked      bool          // a mark proves that one of the operations, or other work between them, has not completed
	Begun       int64         // when the latest was issued, by the recorder's clock
	Timeout     time.Duration // 0 means none
}

// Suspects returns the operations that may hang, if any: from the first one that is not
// known to have completed up to the first mark ahead.
func (r *Recorder) Suspects(ahead []Mark) (x Suspicion, found bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	e := r.oldest()
	if e == nil {
		return x, false
	}
	x = Suspicion{First: *e, Last: *e, Begun: e.Begun}
	for id := r.resolved + 1; id < e.ID && !x.Lost; id++ {
		x.Lost = r.find(id) == nil
	}
	last := r.running
	for _, k := range ahead {
		if k.Next > 0 && k.Next <= e.ID && k.Stream == e.stream {
			x.Marked = true // the stream has not reached the first one
			continue
		}
		if k.Record > r.resolved && (r.ordered() || k.Stream == e.stream) {
			last, x.Marked = k.Record, true
			x.Begun = min(x.Begun, k.At) // in case the ring has overwritten the operations before the mark
			break
		}
	}
	for id := e.ID; id <= last; id++ {
		if l := r.find(id); l != nil && l.runs() && l.state == Scheduled && (r.ordered() || l.stream == e.stream) {
			if x.Last = *l; x.Marked {
				x.Begun = l.Begun
			}
		}
	}
	return x, true
}

// Narrow ends the range at the first collective that another rank of the process has not
// issued, if that collective cannot complete here without that rank.
func (x *Suspicion) Narrow(r *Recorder, others []*Recorder) {
	if next, found := r.awaited(x.First, others); found && next.ID >= x.First.ID && next.ID < x.Last.ID && r.waitsFor(next, others) {
		x.Last, x.Begun = next, next.Begun
	}
}

// waitsFor reports whether a collective cannot complete on this rank before the ranks that
// have not issued it do so.
func (r *Recorder) waitsFor(e Entry, others []*Recorder) bool {
	switch {
	case e.N == 0 || e.Kind == AllGatherV || e.Kind == ReduceScatterV || e.Kind == AllToAllV:
		return false // a rank may have an empty part and not wait
	case !Kinds[e.Kind].Rooted:
		return true
	}
	if Kinds[e.Kind].DstRoot { // the other ranks only send
		return r.Rank == e.Root
	}
	for _, m := range others {
		if issued, _ := m.Issued(); m.Rank == e.Root {
			return issued < e.Collective
		}
	}
	return false
}

// awaited returns the first collective from e on that another rank has not issued.
func (r *Recorder) awaited(e Entry, others []*Recorder) (next Entry, found bool) {
	fewest := uint64(math.MaxUint64)
	for _, m := range others {
		issued, _ := m.Issued()
		fewest = min(fewest, issued)
	}
	if fewest == math.MaxUint64 {
		return Entry{}, false
	}
	return r.Collective(max(fewest+1, e.Collective))
}
