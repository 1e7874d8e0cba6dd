package perf

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A Measure holds the results of one side of a row.
type Measure struct {
	Time  float64 `json:"time"`   // of one operation in µs, mean over the ranks
	AlgBW float64 `json:"alg_bw"` // 10^9 bytes a second
	BusBW float64 `json:"bus_bw"`
	P50   float64 `json:"p50"` // of single operations in µs, each timed on its slowest rank
	P99   float64 `json:"p99"`
	Wrong *int64  `json:"nwrong,omitempty"` // wrong elements in all checks; nil: not checked

	Ranks []RankMeasure `json:"ranks,omitempty"` // the shares of the ranks
}

// A RankMeasure is the share of one rank in a Measure.
type RankMeasure struct {
	Time  float64 `json:"time"`             // of one operation in µs
	Wrong int64   `json:"nwrong,omitempty"` // wrong elements in the rank's results
}

// A Row is one size of one operation.
type Row struct {
	Operation  string   `json:"operation"`
	Bytes      int      `json:"size"`
	Count      int      `json:"count"`
	Type       string   `json:"type"`
	Reduction  string   `json:"redop"`
	Root       int      `json:"root"`
	OutOfPlace *Measure `json:"out_of_place"`
	InPlace    *Measure `json:"in_place,omitempty"` // nil if the operation cannot run in place
	Strategy   string   `json:"strategy,omitempty"` // set if several strategies were measured
	Chosen     bool     `json:"chosen,omitempty"`   // the group's tuning chooses this strategy if one call issues for all ranks of the process
}

// row measures both sides of a job.
func (r *rank) row(ctx context.Context, p *Plan, j job) (*Row, error) {
	row := j.describe()
	var err error
	if row.OutOfPlace, err = r.measure(ctx, p, j, false); err != nil {
		return nil, err
	}
	if j.op.inPlace {
		row.InPlace, err = r.measure(ctx, p, j, true)
	}
	return row, err
}

// describe returns a row without measurements.
func (j job) describe() *Row {
	return &Row{
		Operation: j.op.name, Bytes: j.layout.size() * j.dtype.Size(), Count: j.layout.param,
		Type: typeName(j.dtype), Reduction: j.red.String(), Root: j.root,
	}
}

// measure measures one side of a row.
func (r *rank) measure(ctx context.Context, p *Plan, j job, inPlace bool) (*Measure, error) {
	calls, err := r.warmUp(ctx, p, j, inPlace)
	if err != nil {
		return nil, err
	}
	issue := func(i int) error { return calls[i%len(calls)]() }
	n, per := p.Iterations, 1
	if p.Launches > 0 {
		x, err := r.capture(ctx, p, calls)
		if err != nil {
			return nil, err
		}
		defer x.close()
		issue = func(int) error { return x.launch(ctx) }
		n, per = p.Launches, p.Iterations
	}
	mean, err := r.timed(ctx, n, issue)
	if err != nil {
		return nil, err
	}
	times, err := r.each(ctx, n, issue)
	if err != nil {
		return nil, err
	}
	wrong, err := r.verify(ctx, p.Checks, j, calls[0], inPlace)
	if err != nil {
		return nil, err
	}
	all, err := r.share(ctx, append(times, micros(mean), float64(wrong))...)
	if err != nil {
		return nil, err
	}
	return j.combine(all, per, p.Checks > 0), nil
}

// warmUp issues the warm-up calls of a job, and returns all calls of the job.
func (r *rank) warmUp(ctx context.Context, p *Plan, j job, inPlace bool) ([]func() error, error) {
	own, err := r.calls(j, inPlace)
	if err != nil {
		return nil, err
	}
	calls := unbatched(own)
	if p.together {
		calls = r.batched(ctx, own)
	}
	for i := range max(p.Warmups, 1) { // the first one connects the ranks
		if err := calls[i%len(calls)](); err != nil {
			return nil, err
		}
	}
	return calls, nil
}

// combine combines the numbers of all ranks: it averages the times and adds the wrong
// elements.
func (j job) combine(all [][]float64, per int, checked bool) *Measure {
	n := len(all[0]) - 2
	slowest := make([]float64, n)
	m := &Measure{}
	wrong := int64(0)
	for _, one := range all {
		for i := range slowest {
			slowest[i] = max(slowest[i], one[i]/float64(per))
		}
		m.Time += one[n] / float64(per) / float64(len(all))
		wrong += int64(one[n+1])
		m.Ranks = append(m.Ranks, RankMeasure{Time: one[n] / float64(per), Wrong: int64(one[n+1])})
	}
	if checked {
		m.Wrong = &wrong
	}
	m.P50, m.P99 = quantile(slowest, 0.5), quantile(slowest, 0.99)
	m.AlgBW = float64(j.layout.moved*j.dtype.Size()) / 1e3 / m.Time
	m.BusBW = m.AlgBW * j.op.factor(float64(len(all)))
	return m
}

// quantile returns the smallest value with at least a fraction q of all values at or below it.
func quantile(all []float64, q float64) float64 {
	sorted := slices.Sorted(slices.Values(all))
	return sorted[max(int(math.Ceil(q*float64(len(sorted))))-1, 0)]
}

// mostCalls limits the number of buffer positions used in turn.
const mostCalls = 64

// calls returns the operation at successive positions of the buffers, so that an
// operation does not find its data in a cache.
func (r *rank) calls(j job, inPlace bool) (list []issue, err error) {
	size := j.dtype.Size()
	stride := (j.layout.size()*size + step - 1) / step * step
	batch := route.GroupOf(r.group).NewBatch()
	for at := 0; at+stride <= r.bufs[0].Len() && len(list) < mostCalls; at += stride {
		x := call{batch: batch, c: r.c, s: r.s, kind: j.op.kind, op: j.red.raw(), root: j.root, layout: j.layout}
		if j.red == mulSum {
			if x.op, err = r.preMulSum(j.dtype); err != nil {
				return nil, err
			}
		}
		x.dst, x.src = r.buffers(j, inPlace, at)
		fn, err := newIssues[j.dtype](x)
		if err != nil {
			return nil, err
		}
		list = append(list, fn)
	}
	return list, nil
}

// buffers returns the destination and the source of a job at a position.
func (r *rank) buffers(j job, inPlace bool, at int) (dst, src memory.Slice[uint8]) {
	size := j.dtype.Size()
	room, dstAt, srcAt := 1, 0, 0
	if inPlace {
		room = 0
		dstAt, srcAt = j.op.offsets(j.layout, r.c.Rank())
	}
	dst = r.bufs[0].Slice(at+dstAt*size, at+(dstAt+j.layout.recv)*size)
	src = r.bufs[room].Slice(at+srcAt*size, at+(srcAt+j.layout.send)*size)
	return dst, src
}

// verify runs a call with known data and returns the number of wrong elements in
// the rank's destination.
func (r *rank) verify(ctx context.Context, times int, j job, call func() error, inPlace bool) (wrong uint64, err error) {
	if times == 0 {
		return 0, nil
	}
	size := j.dtype.Size()
	l, err := r.kernelsFor(size)
	if err != nil {
		return 0, err
	}
	c, err := newDataTables(r.s, l, newPattern(j.dtype, j.red, r.c.Size()), size)
	if err != nil {
		return 0, err
	}
	defer c.close()
	if err := r.wrong.Zero(r.s); err != nil {
		return 0, err
	}
	for i := range times {
		if err := r.checked(c, j, call, inPlace, uint32(i)*0x9E3779B9+uint32(j.layout.size())); err != nil {
			return 0, err
		}
	}
	if err := r.waitIdle(ctx); err != nil {
		return 0, err
	}
	var out [1]uint64
	err = r.wrong.CopyTo(r.s, out[:])
	return out[0], err
}

// checked poisons the destination, fills the source, runs the call and counts
// wrong elements.
func (r *rank) checked(c *dataTables, j job, call func() error, inPlace bool, seed uint32) error {
	size := j.dtype.Size()
	dst, src := r.buffers(j, inPlace, 0)
	if err := poison(r.s, r.bufs[0].Slice(0, j.layout.size()*size)); err != nil {
		return err
	}
	if err := c.fill(r.s, src, j.layout.send, r.c.Rank(), seed); err != nil {
		return err
	}
	if err := call(); err != nil {
		return err
	}
	for _, p := range j.op.pieces(j.layout, r.c.Rank(), r.c.Size(), j.root) {
		if err := c.check(r.s, dst.Slice(p.at*size, (p.at+p.n)*size), p, seed, r.wrong); err != nil {
			return err
		}
	}
	return nil
}

// poison fills a buffer with a value that is never a result: NaN for floats, the
// largest value or -1 for integers.
func poison(s *stream.Stream, x memory.Slice[uint8]) error {
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(cudadrv.DevicePtr(x.Ptr()), 0xff, uintptr(x.Len()), gpu.StreamOf(s).Raw())
	})
}

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
func newRank(ctx context.Context, g *comm.Group, i int, shared *localState, bytes int, reg int) (r *rank, err error) {
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
func poolConfig(reg int) *memory.PoolConfig {
	if reg == unregistered {
		return nil
	}
	return &memory.PoolConfig{Allocator: nccl.Allocator}
}

// register registers the buffers with NCCL.
func (r *rank) register(ctx context.Context, reg int) error {
	switch reg {
	case registered:
		return r.c.RegisterPool(r.pool) // closing the pool deregisters
	case windows:
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

// close releases everything, the latest first. The stream must be idle.
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
	var last time.Time
	for i := 1; b.arrived.Load() < (round+1)*int64(n); i++ {
		if i%pollsPerCheck != 0 {
			continue
		}
		if ctx.Err() != nil {
			return
		}
		now := time.Now()
		if now.Equal(last) { // the clock of testing/synctest stands still until all goroutines wait
			time.Sleep(time.Microsecond)
		}
		last = now
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
