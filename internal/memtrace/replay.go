package memtrace

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gochorus/chorus/memory"
)

// An Allocator is what a trace is replayed on: one device's.
type Allocator interface {
	// Alloc allocates on the stream with that number.
	Alloc(stream, bytes int) (ptr uint64, err error)
	Free(ptr uint64) error
	// EmptyCache gives what is not in use back to the driver.
	EmptyCache() error
	ResetPeaks() error
	Stats() (memory.Stats, error)
}

// A Config says how a trace is replayed. The zero value is one run.
type Config struct {
	Repeat int // runs after the first, on what that has left cached
	Curve  bool
}

// A Result is what a replay has measured.
type Result struct {
	Ops   int             // calls of the allocator in a run
	Cold  time.Duration   // of the first run, which begins with an empty cache
	Warm  []time.Duration // of the others
	Peaks Peaks           // of the first run
	// AllocatedAtPeak is how much was allocated when the most was reserved.
	AllocatedAtPeak int64
	Curve           []Peaks // what there was after each event, if that was asked for
}

// PerOp returns the time of a call in nanoseconds: the median of the warm runs,
// or the cold one's if there are none.
func (r *Result) PerOp() float64 {
	runs := slices.Sorted(slices.Values(r.Warm))
	if len(runs) == 0 {
		return r.ColdPerOp()
	}
	middle := float64(runs[(len(runs)-1)/2]+runs[len(runs)/2]) / 2
	return middle / float64(max(r.Ops, 1))
}

// ColdPerOp returns the time of a call of the first run in nanoseconds.
func (r *Result) ColdPerOp() float64 { return float64(r.Cold) / float64(max(r.Ops, 1)) }

// Fragmentation returns the part of the reserved bytes that was not allocated
// when the most was reserved, from 0 to 1.
func (r *Result) Fragmentation() float64 {
	if r.Peaks.Reserved == 0 {
		return 0
	}
	return 1 - float64(r.AllocatedAtPeak)/float64(r.Peaks.Reserved)
}

// Replay plays the trace: once on an empty cache, cfg.Repeat times on what was
// left, and once more on an empty cache to look at the statistics after each
// call, which takes no part in the times. What the trace does not free is freed
// after each run, also after an error.
func Replay(t *Trace, a Allocator, cfg *Config) (*Result, error) {
	var c Config
	if cfg != nil {
		c = *cfg
	}
	p := &player{trace: t, a: a, ptrs: make([]uint64, t.Blocks)}
	r := &Result{Ops: len(t.Events)}
	if err := errors.Join(a.EmptyCache(), a.ResetPeaks()); err != nil {
		return nil, err
	}
	var err error
	if r.Cold, err = p.run(nil); err != nil {
		return nil, err
	}
	s, err := a.Stats()
	if err != nil {
		return nil, err
	}
	r.Peaks = Peaks{s.AllocatedBytes.All.Peak, s.ReservedBytes.All.Peak}
	for range c.Repeat {
		d, err := p.run(nil)
		if err != nil {
			return nil, err
		}
		r.Warm = append(r.Warm, d)
	}
	return r, p.look(r, c.Curve)
}

// look runs once more to see what is there after each call.
func (p *player) look(r *Result, curve bool) error {
	if err := p.a.EmptyCache(); err != nil {
		return err
	}
	most := int64(-1)
	_, err := p.run(func() error {
		s, err := p.a.Stats()
		now := Peaks{s.AllocatedBytes.All.Current, s.ReservedBytes.All.Current}
		if now.Reserved > most || now.Reserved == most && now.Allocated > r.AllocatedAtPeak {
			most, r.AllocatedAtPeak = now.Reserved, now.Allocated
		}
		if curve {
			r.Curve = append(r.Curve, now)
		}
		return err
	})
	return err
}

// A player plays the events of a trace.
type player struct {
	trace *Trace
	a     Allocator
	ptrs  []uint64 // of the blocks that are allocated; 0 is none
}

// run plays all events, calling after, if that is given, after each, and returns
// how long it took.
func (p *player) run(after func() error) (time.Duration, error) {
	start := time.Now()
	err := p.play(after)
	took := time.Since(start)
	return took, cmp.Or(err, p.freeAll())
}

func (p *player) play(after func() error) error {
	for i := range p.trace.Events {
		e := &p.trace.Events[i]
		var err error
		switch e.Op {
		case Alloc:
			p.ptrs[e.Block], err = p.a.Alloc(e.Stream, e.Bytes)
		case Free:
			err = p.a.Free(p.ptrs[e.Block])
			p.ptrs[e.Block] = 0
		case EmptyCache:
			err = p.a.EmptyCache()
		}
		if err != nil {
			return p.fail(e, err)
		}
		if after != nil {
			if err := after(); err != nil {
				return p.fail(e, err)
			}
		}
	}
	return nil
}

func (p *player) fail(e *Event, err error) error {
	does := "empty the cache"
	switch e.Op {
	case Alloc:
		does = fmt.Sprintf("allocate %d bytes on stream %d", e.Bytes, e.Stream)
	case Free:
		does = fmt.Sprintf("free block %d", e.Block)
	}
	at := fmt.Sprintf("event %d", e.Number)
	if e.Number < 0 {
		at = "before the first event"
	}
	return fmt.Errorf("%s: %s: %s: %w", p.trace.Name, at, does, err)
}

// freeAll frees what the trace has left.
func (p *player) freeAll() error {
	var first error
	for i, ptr := range p.ptrs {
		if ptr != 0 {
			first = cmp.Or(first, p.a.Free(ptr))
			p.ptrs[i] = 0
		}
	}
	return first
}
