package memtrace

import (
	"fmt"
	"math"
)

const (
	// mostLive limits the blocks that are allocated at the same time.
	mostLive = 1 << 20
	// mostSeen limits the addresses of earlier blocks that error messages know.
	mostSeen = 1 << 18
)

// A builder builds a Trace from actions recorded by torch, which identify blocks
// by address and streams by handle. It writes the events to a spool.
type builder struct {
	name     string
	place    string // format of an address in errors
	earlier  bool   // blocks may have been allocated before the first event
	device   int    // of a snapshot
	live     map[uint64]liveBlock
	seen     map[uint64]int // the last event at each address without a block
	streams  map[uint64]int
	blocks   int     // numbers of blocks so far
	unused   []int   // numbers of blocks that are free
	prologue []Event // allocations before the first event
	events   section
	last     int // number of the last event
	sum      sum
}

type liveBlock struct {
	number    int // number of the block
	size      uint64
	event     int  // event that allocated it
	requested bool // the free was requested
}

func newBuilder(name string, to *spool) *builder {
	return &builder{name: name, place: "the block at %#x", events: section{spool: to, from: to.n, to: to.n}, last: -1,
		live: map[uint64]liveBlock{}, seen: map[uint64]int{}, streams: map[uint64]int{}}
}

// add adds the event with number n.
func (b *builder) add(n int, action string, addr, size, stream uint64) error {
	switch action {
	case "alloc":
		return b.alloc(n, addr, size, stream)
	case "free_requested", "free_completed":
		return b.free(n, action == "free_completed", addr, size, stream)
	case "segment_alloc", "segment_map":
		b.sum.reserve(int64(size))
	case "segment_free", "segment_unmap":
		b.sum.reserve(-int64(size))
	case "snapshot", "oom", "user_defined":
	default:
		return b.fail(n, "unknown action %q", action)
	}
	return nil
}

func (b *builder) fail(n int, format string, args ...any) error {
	return &EventError{b.name, n, fmt.Sprintf(format, args...)}
}

// failBlock is fail for the block at an address.
func (b *builder) failBlock(n int, does string, addr uint64, why string, args ...any) error {
	return b.fail(n, "%s "+b.place+", "+why, append([]any{does, addr}, args...)...)
}

func (b *builder) alloc(n int, addr, size, stream uint64) error {
	if old, ok := b.live[addr]; ok {
		return b.failBlock(n, "allocates", addr, "which event %d allocated and no event freed", old.event)
	}
	if size == 0 || size > math.MaxInt64 {
		return b.failBlock(n, "allocates", addr, "of %d bytes", size)
	}
	number, unused := b.blocks, len(b.unused)
	if unused > 0 {
		number = b.unused[unused-1]
	}
	e, err := b.block(n, number, addr, size, stream)
	if err != nil {
		return err
	}
	if unused > 0 {
		b.unused = b.unused[:unused-1]
	} else {
		b.blocks++
	}
	b.sum.allocate(int64(size))
	return b.write(e)
}

// write adds an event of the trace.
func (b *builder) write(e Event) error {
	err := b.events.spool.write(&e, b.last)
	b.events.to, b.last = b.events.spool.n, e.Number
	b.events.count++
	return err
}

// block returns the event that allocates a new block.
func (b *builder) block(n, number int, addr, size, stream uint64) (Event, error) {
	s, ok := b.streams[stream]
	switch {
	case len(b.live) == mostLive:
		return Event{}, b.failBlock(n, "allocates", addr, "while %d others are allocated: want at most %d at the same time", mostLive, mostLive)
	case !ok && len(b.streams) == mostStreams:
		return Event{}, fmt.Errorf("%s has %d streams: want at most %d", b.name, mostStreams+1, mostStreams)
	case !ok:
		s = len(b.streams)
		b.streams[stream] = s
	}
	b.live[addr] = liveBlock{number: number, size: size, event: n}
	return Event{Op: Alloc, Block: number, Bytes: int(size), Stream: s, Number: n}, nil
}

// free handles both events of a free; the block is free at the second one.
func (b *builder) free(n int, completed bool, addr, size, stream uint64) error {
	l, ok := b.live[addr]
	if !ok {
		if at, seen := b.seen[addr]; seen {
			return b.failBlock(n, "frees", addr, "which event %d already freed", at)
		}
		if !b.earlier || size == 0 || size > math.MaxInt64 {
			return b.failBlock(n, "frees", addr, "which is not allocated")
		}
		if err := b.before(n, addr, size, stream); err != nil {
			return err
		}
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
	if len(b.seen) == mostSeen {
		clear(b.seen)
	}
	b.seen[addr] = n
	b.unused = append(b.unused, l.number)
	return b.write(Event{Op: Free, Block: l.number, Number: n})
}

// before adds a block that was allocated before the first event, as event n shows. Its
// number was never used: the block exists from the start.
func (b *builder) before(n int, addr, size, stream uint64) error {
	if len(b.prologue) == mostLive {
		return b.fail(n, "shows that more than %d blocks were allocated before the first event", mostLive)
	}
	e, err := b.block(n, b.blocks, addr, size, stream)
	if err != nil {
		return err
	}
	b.blocks++
	e.Number = -1
	b.prologue = append(b.prologue, e)
	b.sum.earlier(int64(size))
	return nil
}

// finish returns the trace, with the peaks that were recorded or, without them,
// computed ones.
func (b *builder) finish(recorded Peaks) *Trace {
	t := &Trace{Name: b.name, Ops: len(b.prologue) + b.events.count, Blocks: b.blocks, Streams: len(b.streams),
		Recorded: b.sum.peaks, prologue: b.prologue, events: b.events}
	if recorded.Allocated > 0 {
		t.Recorded.Allocated = recorded.Allocated
	}
	if recorded.Reserved > 0 {
		t.Recorded.Reserved = recorded.Reserved
	}
	return t
}

// A sum tracks the totals of a trace's events.
type sum struct{ now, peaks Peaks }

func (s *sum) allocate(n int64) {
	s.now.Allocated += n
	s.peaks.Allocated = max(s.peaks.Allocated, s.now.Allocated)
}

func (s *sum) reserve(n int64) {
	s.now.Reserved += n
	s.peaks.Reserved = max(s.peaks.Reserved, s.now.Reserved)
}

// earlier adds memory that was allocated before the first event and therefore at every event.
func (s *sum) earlier(n int64) {
	s.now.Allocated += n
	s.peaks.Allocated += n
}

// heldEarlier is earlier for segments.
func (s *sum) heldEarlier(n int64) {
	s.now.Reserved += n
	s.peaks.Reserved += n
}
