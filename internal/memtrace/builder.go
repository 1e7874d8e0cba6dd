package memtrace

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/memory"
)

// A builder makes a Trace of the actions that torch records, which name blocks
// by address and streams by handle.
type builder struct {
	trace    Trace
	place    string // how an address is written
	earlier  bool   // blocks may have been allocated before the first event
	live     map[uint64]liveBlock
	seen     map[uint64]int // the last event at each address that has no block now
	streams  map[uint64]int
	prologue []Event
	sum      sum
}

type liveBlock struct {
	number    int // of the block
	size      uint64
	event     int  // that allocated it
	requested bool // to be freed
}

func newBuilder(name string) *builder {
	return &builder{trace: Trace{Name: name}, place: "the block at %#x",
		live: map[uint64]liveBlock{}, seen: map[uint64]int{}, streams: map[uint64]int{}}
}

// add takes the event with the number n.
func (b *builder) add(n int, action memory.TraceAction, addr, size, stream uint64) error {
	switch action {
	case memory.TraceAlloc:
		return b.alloc(n, addr, size, stream)
	case memory.TraceFreeRequested, memory.TraceFreeCompleted:
		return b.free(n, action == memory.TraceFreeCompleted, addr, size, stream)
	case memory.TraceSegmentAlloc, memory.TraceSegmentMap:
		b.sum.reserve(int64(size))
	case memory.TraceSegmentFree, memory.TraceSegmentUnmap:
		b.sum.reserve(-int64(size))
	case memory.TraceSnapshot, memory.TraceOOM, "user_defined":
	default:
		return b.fail(n, "unknown action %q", action)
	}
	return nil
}

func (b *builder) fail(n int, format string, args ...any) error {
	return &EventError{b.trace.Name, n, fmt.Sprintf(format, args...)}
}

// failBlock is fail about the block at an address.
func (b *builder) failBlock(n int, does string, addr uint64, why string, args ...any) error {
	return b.fail(n, "%s "+b.place+", "+why, append([]any{does, addr}, args...)...)
}

func (b *builder) alloc(n int, addr, size, stream uint64) error {
	if old, ok := b.live[addr]; ok {
		return b.failBlock(n, "allocates", addr, "which event %d has allocated and nobody has freed", old.event)
	}
	if size == 0 || size > math.MaxInt64 {
		return b.failBlock(n, "allocates", addr, "of %d bytes", size)
	}
	b.trace.Events = append(b.trace.Events, b.block(n, addr, size, stream))
	b.sum.allocate(int64(size))
	return nil
}

// block makes the event that allocates a new block.
func (b *builder) block(n int, addr, size, stream uint64) Event {
	s, ok := b.streams[stream]
	if !ok {
		s = len(b.streams)
		b.streams[stream] = s
	}
	e := Event{Op: Alloc, Block: b.trace.Blocks, Bytes: int(size), Stream: s, Number: n}
	b.live[addr] = liveBlock{number: e.Block, size: size, event: n}
	b.trace.Blocks++
	return e
}

// free takes both events of a free. The second is where the block is free.
func (b *builder) free(n int, completed bool, addr, size, stream uint64) error {
	l, ok := b.live[addr]
	if !ok {
		if at, seen := b.seen[addr]; seen {
			return b.failBlock(n, "frees", addr, "which event %d has freed", at)
		}
		if !b.earlier || size == 0 || size > math.MaxInt64 {
			return b.failBlock(n, "frees", addr, "which is not allocated")
		}
		b.before(addr, size, stream)
		l = b.live[addr]
	}
	if !completed {
		if l.requested {
			return b.failBlock(n, "frees", addr, "which is being freed")
		}
		l.requested = true
		b.live[addr] = l
		b.sum.allocate(-int64(l.size))
		return nil
	}
	if !l.requested {
		b.sum.allocate(-int64(l.size))
	}
	delete(b.live, addr)
	b.seen[addr] = n
	b.trace.Events = append(b.trace.Events, Event{Op: Free, Block: l.number, Number: n})
	return nil
}

// before notes a block that was allocated before the first event.
func (b *builder) before(addr, size, stream uint64) {
	b.prologue = append(b.prologue, b.block(-1, addr, size, stream))
	b.sum.earlier(int64(size))
}

// finish returns the trace. Peaks that were not recorded are summed up.
func (b *builder) finish(recorded Peaks) *Trace {
	t := b.trace
	t.Events = append(b.prologue, t.Events...)
	t.Streams = len(b.streams)
	t.Recorded = b.sum.peaks
	if recorded.Allocated > 0 {
		t.Recorded.Allocated = recorded.Allocated
	}
	if recorded.Reserved > 0 {
		t.Recorded.Reserved = recorded.Reserved
	}
	return &t
}

// A sum follows what the events of a trace add up to.
type sum struct{ now, peaks Peaks }

func (s *sum) allocate(n int64) {
	s.now.Allocated += n
	s.peaks.Allocated = max(s.peaks.Allocated, s.now.Allocated)
}

func (s *sum) reserve(n int64) {
	s.now.Reserved += n
	s.peaks.Reserved = max(s.peaks.Reserved, s.now.Reserved)
}

// earlier adds what was allocated before the first event, and so at each since.
func (s *sum) earlier(n int64) {
	s.now.Allocated += n
	s.peaks.Allocated += n
}

// heldEarlier is earlier for segments.
func (s *sum) heldEarlier(n int64) {
	s.now.Reserved += n
	s.peaks.Reserved += n
}
