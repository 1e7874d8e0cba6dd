package memtrace

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An Allocator replays a trace: it is the allocator of a device, or a test double.
type Allocator interface {
	// Alloc allocates on the stream with the given number.
	Alloc(stream, bytes int) (ptr uint64, err error)
	Free(ptr uint64) error
	// EmptyCache returns unused memory to the driver.
	EmptyCache() error
	ResetPeaks() error
	Stats() (memory.Stats, error)
}

// A Config configures a replay. The zero value means one run.
type Config struct {
	Repeat int // number of runs after the first, with a warm cache
	Curve  bool
}

// A Result holds the measurements of a replay.
type Result struct {
	Ops   int             // number of allocator calls in a run
	Cold  time.Duration   // time of the first run, which starts with an empty cache
	Warm  []time.Duration // times of the other runs
	Peaks Peaks           // peaks of the first run
	// AllocatedAtPeak is the allocated memory at the peak of reserved memory.
	AllocatedAtPeak int64
	// Curve is the memory after the events, if Config.Curve is set. If there are many
	// events, each value has the highest numbers of CurveStep events.
	Curve     []Peaks
	CurveStep int

	merged int // events in the last value of the curve, if it lacks some
}

// PerOp returns the time of a call in nanoseconds: the median of the warm runs
// or, if there are none, the time in the cold run.
func (r *Result) PerOp() float64 {
	runs := slices.Sorted(slices.Values(r.Warm))
	if len(runs) == 0 {
		return r.ColdPerOp()
	}
	middle := float64(runs[(len(runs)-1)/2]+runs[len(runs)/2]) / 2
	return middle / float64(max(r.Ops, 1))
}

// ColdPerOp returns the time of a call in the first run in nanoseconds.
func (r *Result) ColdPerOp() float64 { return float64(r.Cold) / float64(max(r.Ops, 1)) }

// Fragmentation returns 1 - allocated / reserved, measured at the peak of
// reserved memory.
func (r *Result) Fragmentation() float64 {
	if r.Peaks.Reserved == 0 {
		return 0
	}
	return 1 - float64(r.AllocatedAtPeak)/float64(r.Peaks.Reserved)
}

// Replay replays the trace once with an empty cache, cfg.Repeat times with a warm
// cache, and once more with an empty cache to read the statistics after each
// call; the last run is not timed. After each run, and after an error, it frees
// the remaining blocks.
func Replay(t *Trace, a Allocator, cfg *Config) (*Result, error) {
	c := *cmp.Or(cfg, new(Config))
	p := &player{trace: t, a: a, ptrs: make([]uint64, t.Blocks)}
	r := &Result{Ops: t.Ops}
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

// look runs once more to record the memory after each call.
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
			r.point(now)
		}
		return err
	})
	return err
}

// mostPoints limits Result.Curve.
const mostPoints = 1 << 14

// point adds the memory after the next event to the curve. If the curve is full, it merges
// each two values.
func (r *Result) point(now Peaks) {
	higher := func(a, b Peaks) Peaks { return Peaks{max(a.Allocated, b.Allocated), max(a.Reserved, b.Reserved)} }
	if r.CurveStep == 0 {
		r.CurveStep = 1
	}
	if r.merged == 0 && len(r.Curve) == mostPoints {
		for i := range mostPoints / 2 {
			r.Curve[i] = higher(r.Curve[2*i], r.Curve[2*i+1])
		}
		r.Curve = r.Curve[:mostPoints/2]
		r.CurveStep *= 2
	}
	if r.merged == 0 {
		r.Curve = append(r.Curve, now)
	} else {
		last := &r.Curve[len(r.Curve)-1]
		*last = higher(*last, now)
	}
	r.merged = (r.merged + 1) % r.CurveStep
}

// A player replays the events of a trace.
type player struct {
	trace *Trace
	a     Allocator
	ptrs  []uint64 // addresses of the blocks; 0 if not allocated
}

// run replays all events and returns the time. If after is not nil, run calls
// it after each event.
func (p *player) run(after func() error) (time.Duration, error) {
	took := time.Duration(0)
	err := p.trace.Each(func(events []Event) error {
		start := time.Now()
		defer func() { took += time.Since(start) }()
		return p.play(events, after)
	})
	return took, cmp.Or(err, p.freeAll())
}

func (p *player) play(events []Event, after func() error) error {
	for i := range events {
		e := &events[i]
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

// freeAll frees the remaining blocks.
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

// A Device is the Allocator of a device, with one stream for each stream of a trace.
type Device struct {
	dev     *device.Device
	streams []*stream.Stream // the first is the default stream
}

// OnDevice returns the allocator of dev for traces with the given number of streams.
func OnDevice(dev *device.Device, streams int) (*Device, error) {
	d := &Device{dev: dev, streams: []*stream.Stream{stream.Default(dev)}}
	for len(d.streams) < streams {
		s, err := stream.New(dev, nil)
		if err != nil {
			return nil, errors.Join(err, d.Close())
		}
		d.streams = append(d.streams, s)
	}
	return d, nil
}

// Close closes the streams.
func (d *Device) Close() error {
	var errs []error
	for _, s := range d.streams[1:] {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

func (d *Device) Alloc(stream, bytes int) (uint64, error) {
	return memory.AllocRaw(d.streams[stream], bytes)
}

func (d *Device) Free(ptr uint64) error { return memory.FreeRaw(d.dev, ptr) }

func (d *Device) EmptyCache() error { return memory.EmptyCache(d.dev) }

func (d *Device) ResetPeaks() error { return memory.ResetPeakStats(d.dev) }

func (d *Device) Stats() (memory.Stats, error) { return memory.StatsOf(d.dev) }
