package perf

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A rank is one local rank of the group, which measures on a goroutine of its own.
type rank struct {
	group *comm.Group
	c     *nccl.Communicator
	s     *stream.Stream
	dev   *device.Device
	local int // which of the process's ranks it is
	line  *line
	all   *ensemble
	pool  *memory.Pool // of the buffers

	room     [2]memory.Slice[uint8] // the buffers of every row: destinations and sources
	wrong    memory.Slice[uint64]
	looms    map[int]*loom
	factors  map[memory.DType]nccl.Op
	events   []*stream.Event
	releases []func() error // what is to be undone at the end, last first
}

// step is at what multiples buffers begin.
const step = 512

// newRank makes what the local rank i needs for buffers of so many bytes.
func newRank(ctx context.Context, g *comm.Group, i int, l *line, e *ensemble, bytes int, reg Registration) (r *rank, err error) {
	r = &rank{group: g, local: i, line: l, all: e, c: g.Communicator(i), s: g.Stream(i), dev: g.Device(i), looms: map[int]*loom{}, factors: map[memory.DType]nccl.Op{}}
	r.pool = memory.NewPool(poolConfig(reg))
	r.later(r.pool.Close)
	err = r.pool.Use(r.s, func() error {
		for j := range r.room {
			if r.room[j], err = memory.Make[uint8](r.s, bytes); err != nil {
				return err
			}
			r.later(r.room[j].Close)
		}
		return nil
	})
	if err != nil {
		return nil, errors.Join(err, r.close())
	}
	if r.wrong, err = memory.Make[uint64](r.s, 1); err != nil {
		return nil, errors.Join(err, r.close())
	}
	r.later(r.wrong.Close)
	if err := r.register(ctx, reg); err != nil {
		return nil, errors.Join(err, r.close())
	}
	return r, nil
}

// poolConfig is where the buffers come from: NCCL's own memory where they are to be
// registered, and else what a program's tensors are made of. In graphs NCCL registers its
// own by itself, which makes it faster.
func poolConfig(reg Registration) *memory.PoolConfig {
	if reg == Unregistered {
		return nil
	}
	return &memory.PoolConfig{Allocator: nccl.Allocator}
}

// register tells NCCL of the buffers.
func (r *rank) register(ctx context.Context, reg Registration) error {
	switch reg {
	case Registered:
		return r.c.RegisterPool(r.pool) // ends with the pool's memory
	case Windows:
		for _, x := range r.room {
			w, err := r.c.RegisterWindow(ctx, x.Buffer(), x.Len(), true)
			if err != nil {
				return err
			}
			r.later(w.Close)
		}
	}
	return nil
}

func (r *rank) later(undo func() error) { r.releases = append(r.releases, undo) }

// close gives everything back. The stream must be idle.
func (r *rank) close() error {
	if r == nil {
		return nil
	}
	var errs []error
	for _, undo := range slices.Backward(r.releases) {
		errs = append(errs, undo())
	}
	r.releases = nil
	return errors.Join(errs...)
}

// loom returns the kernels for elements of so many bytes.
func (r *rank) loom(size int) (*loom, error) {
	if l := r.looms[size]; l != nil {
		return l, nil
	}
	l, err := newLoom(r.dev, size)
	if err != nil {
		return nil, err
	}
	r.later(l.module.Close)
	r.looms[size] = l
	return l, nil
}

// A line is where the local ranks start from at the same moment.
type line struct{ come atomic.Int64 }

// wait returns when n ranks have called it as often as this one, or ctx has ended. It
// looks all the time: who sleeps starts late.
func (l *line) wait(ctx context.Context, n int) {
	round := (l.come.Add(1) - 1) / int64(n)
	for i := 1; l.come.Load() < (round+1)*int64(n); i++ {
		if i%patience != 0 {
			continue
		}
		if ctx.Err() != nil {
			return
		}
		runtime.Gosched() // there may be fewer processors than ranks
	}
}

// share gives every rank the numbers of all, by rank. It returns when all ranks have
// come, on all of them at nearly the same time.
func (r *rank) share(ctx context.Context, mine ...float64) ([][]float64, error) {
	src, err := memory.MakeFrom(r.s, mine)
	if err != nil {
		return nil, err
	}
	defer src.Close()
	dst, err := memory.Make[float64](r.s, len(mine)*r.c.Size())
	if err != nil {
		return nil, err
	}
	defer dst.Close()
	if err := nccl.AllGather(r.c, r.s, dst, src); err != nil {
		return nil, err
	}
	if err := r.settle(ctx); err != nil {
		return nil, err
	}
	flat := make([]float64, dst.Len())
	if err := dst.CopyTo(r.s, flat); err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(flat, len(mine))), nil
}

// patience is how many looks at a stream, or operations, go by between looks at the
// group and the context.
const patience = 256

// settle waits until the stream is idle, or an operation has failed. It looks all the
// time: what sleeps learns of the end too late to measure it.
func (r *rank) settle(ctx context.Context) error {
	if r.dev.System().Machine() != nil {
		return r.c.Wait(ctx, r.s) // there is nothing to measure, and others need the processor
	}
	for i := 1; ; i++ {
		done, err := r.s.Query()
		if err != nil || done {
			return errors.Join(err, r.c.Err())
		}
		if i%patience != 0 {
			continue
		}
		if err := r.group.Err(); err != nil {
			return err
		}
		if ctx.Err() != nil {
			return fmt.Errorf("rank %d of %d (%s): %w", r.c.Rank(), r.c.Size(), r.dev, context.Cause(ctx))
		}
	}
}

// timed issues calls in turn, n of them, and returns the time of one, from when all
// ranks began to when this one was done.
func (r *rank) timed(ctx context.Context, n int, issue func(i int) error) (time.Duration, error) {
	if _, err := r.share(ctx, 0); err != nil {
		return 0, err
	}
	r.line.wait(ctx, r.group.Locals())
	begun := time.Now()
	for i := range n {
		if err := issue(i); err != nil {
			return 0, err
		}
		if err := breathe(ctx, i); err != nil {
			return 0, err
		}
	}
	if err := r.settle(ctx); err != nil {
		return 0, err
	}
	return time.Since(begun) / time.Duration(n), nil
}

// breathe looks after every few operations whether to go on.
func breathe(ctx context.Context, i int) error {
	if i%patience != patience-1 {
		return nil
	}
	return context.Cause(ctx)
}

// each returns how long each of n calls took on the device, in µs.
func (r *rank) each(ctx context.Context, n int, issue func(i int) error) ([]float64, error) {
	for len(r.events) <= n {
		e, err := stream.NewEvent(r.dev, &stream.EventConfig{Timing: true})
		if err != nil {
			return nil, err
		}
		r.later(e.Close)
		r.events = append(r.events, e)
	}
	if _, err := r.share(ctx, 0); err != nil {
		return nil, err
	}
	if err := r.events[0].Record(r.s); err != nil {
		return nil, err
	}
	for i := range n {
		if err := issue(i); err != nil {
			return nil, err
		}
		if err := errors.Join(r.events[i+1].Record(r.s), breathe(ctx, i)); err != nil {
			return nil, err
		}
	}
	if err := r.settle(ctx); err != nil {
		return nil, err
	}
	times := make([]float64, n)
	for i := range n {
		d, err := r.events[i+1].Elapsed(r.events[i])
		if err != nil {
			return nil, err
		}
		times[i] = micros(d)
	}
	return times, nil
}

func micros(d time.Duration) float64 { return float64(d) / float64(time.Microsecond) }
