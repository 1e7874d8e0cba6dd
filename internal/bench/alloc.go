package main

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"path/filepath"
	"sync"

	"github.com/gochorus/chorus/internal/memtrace"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// hits allocates and frees the same size again and again.
func hits(bytes int) setup {
	return func(b *bench) (int, func() error, func() error, error) {
		return b.pairs, func() error { return hit(b.s, bytes, b.pairs) }, b.emptyCache, nil
	}
}

func hit(s *stream.Stream, bytes, n int) error {
	for range n {
		p, err := memory.AllocRaw(s, bytes)
		if err != nil {
			return err
		}
		if err := memory.FreeRaw(s.Device(), p); err != nil {
			return err
		}
	}
	return nil
}

// churn frees one of many blocks of 1 B to 64 KiB and allocates another.
func churn(live int) setup {
	return func(b *bench) (int, func() error, func() error, error) {
		r := rand.New(rand.NewPCG(1, 2))
		size := func() int { return int(math.Exp2(16 * r.Float64())) }
		type op struct{ block, bytes int }
		ops := make([]op, b.pairs)
		for i := range ops {
			ops[i] = op{r.IntN(live), size()}
		}
		blocks := make([]uint64, live)
		for i := range blocks {
			var err error
			if blocks[i], err = memory.AllocRaw(b.s, size()); err != nil {
				return 0, nil, nil, err
			}
		}
		round := func() error {
			for _, o := range ops {
				if err := memory.FreeRaw(b.s.Device(), blocks[o.block]); err != nil {
					return err
				}
				var err error
				if blocks[o.block], err = memory.AllocRaw(b.s, o.bytes); err != nil {
					return err
				}
			}
			return nil
		}
		return len(ops), round, func() error { return errors.Join(b.freeAll(blocks), b.emptyCache()) }, nil
	}
}

// parallel runs n streams with allocator hits concurrently. The time is for one
// allocation and free on each stream.
func parallel(n int) setup {
	return func(b *bench) (int, func() error, func() error, error) {
		streams := make([]*stream.Stream, n)
		for i := range streams {
			var err error
			if streams[i], err = stream.New(b.s.Device(), nil); err != nil {
				return 0, nil, nil, err
			}
		}
		round := func() error {
			errs := make([]error, n)
			var wg sync.WaitGroup
			for i, s := range streams {
				wg.Go(func() { errs[i] = hit(s, 4096, b.pairs/8) })
			}
			wg.Wait()
			return errors.Join(errs...)
		}
		done := func() error {
			var errs []error
			for _, s := range streams {
				errs = append(errs, s.Close())
			}
			return errors.Join(append(errs, b.emptyCache())...)
		}
		return n * (b.pairs / 8), round, done, nil
	}
}

// replayed repeats the allocations of a recorded program, and frees the blocks that the
// program had at its end.
func replayed(events []memtrace.Event, blockNumbers int) setup {
	return func(b *bench) (int, func() error, func() error, error) {
		blocks := make([]uint64, blockNumbers)
		round := func() error {
			for i := range events {
				var err error
				switch e := &events[i]; e.Op {
				case memtrace.Alloc:
					blocks[e.Block], err = memory.AllocRaw(b.s, e.Bytes)
				case memtrace.Free:
					err = memory.FreeRaw(b.s.Device(), blocks[e.Block])
					blocks[e.Block] = 0
				}
				if err != nil {
					return err
				}
			}
			return b.freeAll(blocks)
		}
		return len(events), round, b.emptyCache, nil
	}
}

// traceFigures are a figure for each trace in a file.
func traceFigures(path string) (list []figure, err error) {
	f, err := safe.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	r, err := memtrace.Read(f)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	defer r.Close()
	for _, t := range r.Traces {
		var events []memtrace.Event
		if err := t.Each(func(part []memtrace.Event) error { events = append(events, part...); return nil }); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		list = append(list, figure{"operation of " + filepath.Base(path), replayed(events, t.Blocks)})
	}
	return list, nil
}

func (b *bench) freeAll(blocks []uint64) error {
	for i, p := range blocks {
		if p != 0 {
			if err := memory.FreeRaw(b.s.Device(), p); err != nil {
				return err
			}
			blocks[i] = 0
		}
	}
	return nil
}

func (b *bench) emptyCache() error { return memory.EmptyCache(b.s.Device()) }

// allocations are the figures of the allocator.
func allocations() (list []figure) {
	for _, n := range []int{512, 64 << 10, 1 << 20, 64 << 20} {
		list = append(list, figure{fmt.Sprintf("hit of %d B", n), hits(n)})
	}
	for _, n := range []int{1000, 100_000} {
		list = append(list, figure{fmt.Sprintf("1 B to 64 KiB, %d live", n), churn(n)})
	}
	for _, n := range []int{1, 4, 16} {
		list = append(list, figure{fmt.Sprintf("4 KiB on %d streams", n), parallel(n)})
	}
	return list
}
