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
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A rank measures one local rank of the group on a dedicated goroutine.
type rank struct {
	group *comm.Group
	c     *nccl.Communicator
	s     *stream.Stream
	dev   *device.Device
	local int // index of the local rank
	*localState
	pool *memory.Pool // of the buffers

	bufs     [2]memory.Slice[uint8] // the buffers for all rows: destinations and sources
	wrong    memory.Slice[uint64]
	kernels  map[int]*dataKernels
	factors  map[memory.DType]nccl.Op
	events   []*stream.Event
	releases []func() error // called by close, last one first
}

// step is the alignment of buffer positions in bytes.
const step = 512

// newRank prepares local rank i with buffers of the given size.
func newRank(ctx context.Context, g *comm.Group, i int, shared *localState, bytes int, reg Registration) (r *rank, err error) {
	r = &rank{group: g, local: i, localState: shared, c: g.Communicator(i), s: g.Stream(i), dev: g.Device(i), kernels: map[int]*dataKernels{}, factors: map[memory.DType]nccl.Op{}}
	r.pool = memory.NewPool(poolConfig(reg))
	r.later(r.pool.Close)
	err = r.pool.Use(r.s, func() error {
		for j := range r.bufs {
			if r.bufs[j], err = memory.Make[uint8](r.s, bytes); err != nil {
				return err
			}
			r.later(r.bufs[j].Close)
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

// poolConfig selects NCCL's allocator for buffers that NCCL registers, and
// otherwise the default allocator, as for a program's tensors. NCCL would
// register its own memory in graphs even without a request, which makes it
// faster.
func poolConfig(reg Registration) *memory.PoolConfig {
	if reg == Unregistered {
		return nil
	}
	return &memory.PoolConfig{Allocator: nccl.Allocator}
}

// register registers the buffers with NCCL.
func (r *rank) register(ctx context.Context, reg Registration) error {
	switch reg {
	case Registered:
		return r.c.RegisterPool(r.pool) // closing the pool deregisters
	case Windows:
		for _, x := range r.bufs {
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

// close releases everything. The stream must be idle.
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

// kernelsFor returns the kernels for an element size.
func (r *rank) kernelsFor(size int) (*dataKernels, error) {
	if l := r.kernels[size]; l != nil {
		return l, nil
	}
	l, err := newDataKernels(r.dev, size)
	if err != nil {
		return nil, err
	}
	r.later(l.module.Close)
	r.kernels[size] = l
	return l, nil
}

// A barrier is for the local ranks.
type barrier struct{ arrived atomic.Int64 }

// wait returns when n ranks have called it as often as this one, or when ctx
// ends. It spins, because a sleeping thread would start late.
func (b *barrier) wait(ctx context.Context, n int) {
	round := (b.arrived.Add(1) - 1) / int64(n)
	for i := 1; b.arrived.Load() < (round+1)*int64(n); i++ {
		if i%pollsPerCheck != 0 {
			continue
		}
		if ctx.Err() != nil {
			return
		}
		runtime.Gosched() // there may be fewer processors than ranks
	}
}

// share exchanges numbers among all ranks and returns them by rank. It returns at
// nearly the same time on all ranks.
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
	if err := r.waitIdle(ctx); err != nil {
		return nil, err
	}
	flat := make([]float64, dst.Len())
	if err := dst.CopyTo(r.s, flat); err != nil {
		return nil, err
	}
	return slices.Collect(slices.Chunk(flat, len(mine))), nil
}

// pollsPerCheck is the number of polls, or of operations, between two checks of the
// group and of the context.
const pollsPerCheck = 256

// waitIdle waits until the stream is idle or an operation failed. It spins, because
// a sleeping thread would learn of the completion too late.
func (r *rank) waitIdle(ctx context.Context) error {
	if gpu.DeviceOf(r.dev).System().Machine != nil {
		return r.c.Wait(ctx, r.s) // there is nothing to measure, and others need the processor
	}
	for i := 1; ; i++ {
		done, err := r.s.Query()
		if err != nil || done {
			return errors.Join(err, r.c.Err())
		}
		if i%pollsPerCheck != 0 {
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

// timed issues n calls in turn and returns the mean time of a call, from the
// common start of all ranks until this rank is done.
func (r *rank) timed(ctx context.Context, n int, issue func(i int) error) (time.Duration, error) {
	if _, err := r.share(ctx, 0); err != nil {
		return 0, err
	}
	r.barrier.wait(ctx, r.group.Locals())
	begun := time.Now()
	for i := range n {
		if err := issue(i); err != nil {
			return 0, err
		}
		if err := checkContext(ctx, i); err != nil {
			return 0, err
		}
	}
	if err := r.waitIdle(ctx); err != nil {
		return 0, err
	}
	return time.Since(begun) / time.Duration(n), nil
}

// checkContext checks the context every few operations.
func checkContext(ctx context.Context, i int) error {
	if i%pollsPerCheck != pollsPerCheck-1 {
		return nil
	}
	return context.Cause(ctx)
}

// each returns the time of each of n calls on the device in µs.
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
		if err := errors.Join(r.events[i+1].Record(r.s), checkContext(ctx, i)); err != nil {
			return nil, err
		}
	}
	if err := r.waitIdle(ctx); err != nil {
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
