package differ

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

var (
	asyncFlag  = flag.Int("async", testhost.Rounds(60, 600), "how many host-asynchronous `programs` to run")
	asyncLimit = flag.Duration("asynclimit", 30*time.Second, "how `long` a host-asynchronous program may take before it hangs")
)

// asyncFresh is how many programs share communicators: the first one has the first collectives.
const asyncFresh = 8

// Programs whose goroutines never wait for a device compute the right data on virtual devices and on
// GPUs, and end.
func TestHostAsynchronous(t *testing.T) {
	t.Run("virtual", func(t *testing.T) {
		var next atomic.Int64
		next.Store(int64(*from))
		end := int64(*from + *asyncFlag)
		for range runtime.NumCPU() {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				for !t.Failed() {
					at := next.Add(asyncFresh) - asyncFresh
					if at >= end {
						return
					}
					sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 2 + int(at/asyncFresh)%2})
					require.NoError(t, err)
					runAsync(t, sys.Devices(), int(at), int(min(at+asyncFresh, end)), func() string {
						// Two goroutines of a rank have no common order for two communicators. GPUs have room for both kernels.
						return fmt.Sprint(slices.DeleteFunc(sys.Reports(), func(text string) bool { return strings.HasPrefix(text, "two communicators") }))
					})
				}
			})
		}
	})
	t.Run("cuda", func(t *testing.T) {
		devs := testgpu.CUDA(t, 2)
		for at := *from; at < *from+*asyncFlag && !t.Failed(); at += asyncFresh {
			runAsync(t, devs, at, min(at+asyncFresh, *from+*asyncFlag), func() string { return "" })
		}
	})
}

// runAsync runs programs one after the other on the same communicators.
func runAsync(t *testing.T, devs []*device.Device, from, to int, reports func() string) {
	b, err := openAsync(devs)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.close()) }()
	for i := from; i < to; i++ {
		p := generateAsync(*seedFlag, i, len(devs))
		err := b.run(p)
		if text := reports(); err == nil && text != "" && text != "[]" {
			err = errors.New(text)
		}
		if err != nil {
			t.Errorf("host-asynchronous program %d of seed %d (-run TestHostAsynchronous -async 8 -from %d -seed %[2]d): %v\n%s", i, *seedFlag, from, err, p)
			return
		}
	}
}

func (p *asyncProgram) String() string {
	text := fmt.Sprintf("%d ranks, mode %d:\n", p.Ranks, p.Mode)
	for i, s := range p.Steps {
		text += fmt.Sprintf("%3d %+v\n", i, s)
	}
	return text
}

// An asyncBench has what programs share: ranks with communicators, streams and memory.
type asyncBench struct {
	devs    []*device.Device
	comms   [asyncComms][]*nccl.Communicator
	streams [][asyncStreams]*stream.Stream
	modules []*kernel.Module
	windows []*nccl.Window // by rank; nil if NCCL has none
	pool    *memory.Pool
	bufs    [][asyncBuffers]memory.Slice[int32]
	pinned  []*memory.Pinned[int32]
	calls   atomic.Int64
}

func openAsync(devs []*device.Device) (*asyncBench, error) {
	b := &asyncBench{devs: devs, streams: make([][asyncStreams]*stream.Stream, len(devs)), bufs: make([][asyncBuffers]memory.Slice[int32], len(devs)),
		windows: make([]*nccl.Window, len(devs)), pool: memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})}
	var err error
	for i := range b.comms {
		if b.comms[i], err = nccl.NewCommunicators(context.Background(), devs, nil); err != nil {
			return nil, err
		}
	}
	for rank, dev := range devs {
		m, err := kernel.Compile(dev, &kernelSource)
		if err != nil {
			return nil, err
		}
		b.modules = append(b.modules, m)
		for i := range b.streams[rank] {
			if b.streams[rank][i], err = stream.New(dev, nil); err != nil {
				return nil, err
			}
		}
		for i := range b.bufs[rank] {
			s := b.streams[rank][home(i)]
			allocate := func() (err error) { b.bufs[rank][i], err = memory.Make[int32](s, asyncLen); return err }
			if i == 0 {
				err = b.pool.Use(s, allocate)
			} else {
				err = allocate()
			}
			if err != nil {
				return nil, err
			}
		}
		h, err := memory.MakePinned[int32](dev, 64*asyncLen)
		if err != nil {
			return nil, err
		}
		b.pinned = append(b.pinned, h)
	}
	return b, b.each(func(rank int) error {
		x := b.bufs[rank][0]
		w, err := b.comms[0][rank].RegisterWindow(context.Background(), x.Buffer(), x.Bytes(), true)
		if errors.Is(err, errors.ErrUnsupported) {
			return nil
		}
		b.windows[rank] = w
		return err
	})
}

func (b *asyncBench) each(f func(rank int) error) error {
	errs := make([]error, len(b.devs))
	var all sync.WaitGroup
	for rank := range b.devs {
		all.Go(func() { errs[rank] = f(rank) })
	}
	all.Wait()
	return errors.Join(errs...)
}

func (b *asyncBench) close() error {
	errs := []error{b.each(func(rank int) error { return b.windows[rank].Close() })}
	for _, list := range b.comms {
		for _, c := range list {
			errs = append(errs, c.Close())
		}
	}
	for rank := range b.devs {
		for _, x := range b.bufs[rank] {
			errs = append(errs, x.Close())
		}
		errs = append(errs, b.pinned[rank].Close(), b.modules[rank].Close())
		for _, s := range b.streams[rank] {
			errs = append(errs, s.Close())
		}
	}
	return errors.Join(append(errs, b.pool.Close())...)
}

// run runs a program and compares all memory with its plan.
func (b *asyncBench) run(p *asyncProgram) error {
	for rank := range b.devs {
		for i, x := range b.bufs[rank] {
			if err := x.CopyFrom(b.streams[rank][home(i)], asyncStart(rank, i)); err != nil {
				return err
			}
		}
		for _, s := range b.streams[rank] {
			if err := s.Sync(context.Background()); err != nil {
				return err
			}
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), *asyncLimit)
	defer cancel()
	b.calls.Store(0)
	r := &asyncRun{b: b, p: p, plan: p.plan(), failed: make(chan struct{})}
	r.done = make([]chan struct{}, len(r.plan.parts))
	r.events = make([]*stream.Event, len(r.plan.parts))
	for i := range r.done {
		r.done[i] = make(chan struct{})
	}
	ended := make(chan struct{})
	var all sync.WaitGroup
	for g := range r.plan.queues {
		all.Go(func() { r.goroutine(g) })
	}
	go func() { all.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-ctx.Done():
		buf := make([]byte, 1<<20)
		panic(fmt.Sprintf("a goroutine of host-asynchronous program %d of seed %d does not return:\n%s\n%s", p.Index, p.Seed, p, buf[:runtime.Stack(buf, true)]))
	}
	if r.err != nil {
		return r.err
	}
	for rank := range b.devs {
		for i, s := range b.streams[rank] {
			if err := s.Sync(ctx); err != nil {
				return fmt.Errorf("rank %d, stream %d: %w", rank, i, err)
			}
		}
	}
	return r.compare()
}

// An asyncRun is one run of a program.
type asyncRun struct {
	b      *asyncBench
	p      *asyncProgram
	plan   *asyncPlan
	done   []chan struct{} // closed when the part is enqueued
	events []*stream.Event
	once   sync.Once
	failed chan struct{} // closed after an error
	err    error
}

func (r *asyncRun) fail(err error) {
	r.once.Do(func() {
		r.err = err
		close(r.failed)
		for _, list := range r.b.comms { // which ends calls of other goroutines
			for _, c := range list {
				_ = c.Abort()
			}
		}
	})
}

// goroutine enqueues the parts of one goroutine.
func (r *asyncRun) goroutine(g int) {
	rnd := rand.New(rand.NewPCG(r.p.Seed, uint64(r.p.Index*8+g)))
	for _, ids := range r.plan.queues[g] {
		if rnd.IntN(8) == 0 { // partners come late
			time.Sleep(time.Duration(rnd.IntN(300)) * time.Microsecond)
		}
		for _, id := range ids {
			for _, n := range r.plan.parts[id].needs {
				select {
				case <-r.done[n]:
				case <-r.failed:
					return
				}
			}
		}
		if err := r.enqueue(ids); err != nil {
			r.fail(fmt.Errorf("goroutine %d: %s: %w", g, r.plan.parts[ids[0]].step.Kind, err))
			return
		}
		for _, id := range ids {
			close(r.done[id])
		}
	}
}

// enqueue enqueues one part, or several parts of a collective in one batch.
func (r *asyncRun) enqueue(ids []int) error {
	for _, id := range ids {
		if err := r.order(&r.plan.parts[id]); err != nil {
			return err
		}
	}
	var err error
	step := r.plan.parts[ids[0]].step
	switch {
	case !step.collective():
		err = r.local(&r.plan.parts[ids[0]])
	case len(ids) == 1 && step.Kind != "sendrecv" && step.Kind != "batch":
		err = r.collective(&r.plan.parts[ids[0]], nil)
	default:
		err = nccl.Group(func(batch *nccl.Batch) error {
			for _, id := range ids {
				if err := r.collective(&r.plan.parts[id], batch); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for _, id := range ids {
		if part := &r.plan.parts[id]; err == nil && part.orders {
			r.events[id], err = r.b.streams[part.rank][part.stream].Record(nil)
		}
	}
	return err
}

// order orders the part's stream after the parts before it. Before a free, the streams of some programs are recorded instead.
func (r *asyncRun) order(part *asyncPart) error {
	s := r.b.streams[part.rank][part.stream]
	for _, n := range part.needs {
		before := &r.plan.parts[n]
		var err error
		switch {
		case before.stream == part.stream:
		case part.step.Kind == "renew" && part.step.A%2 == 0:
			err = r.b.bufs[part.rank][part.step.X].RecordStream(r.b.streams[part.rank][before.stream])
		default:
			err = s.Wait(r.events[n])
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *asyncRun) local(part *asyncPart) error {
	step, bufs := part.step, &r.b.bufs[part.rank]
	s, x, y := r.b.streams[part.rank][part.stream], &bufs[step.X], &bufs[step.Y] // not each step uses both: another goroutine may renew one
	switch step.Kind {
	case "axpb":
		k, err := r.b.modules[part.rank].Kernel("axpb")
		if err != nil {
			return err
		}
		return k.Launch(s, kernel.Cover(step.N), kernel.Ptr(*x), kernel.Ptr(*y), kernel.Scalar(step.A), kernel.Scalar(step.B), kernel.Scalar(int32(step.N)))
	case "copy":
		return memory.Copy(s, x.Slice(0, step.N), y.Slice(0, step.N))
	case "callback":
		return s.Callback(func() { r.b.calls.Add(1) })
	case "fetch":
		at := part.fetched * asyncLen
		return y.Slice(0, step.N).CopyToPinned(s, r.b.pinned[part.rank].Slice(at, at+step.N))
	case "drop":
		h, err := memory.MakePinned[int32](s.Device(), step.N)
		if err != nil {
			return err
		}
		return errors.Join(y.Slice(0, step.N).CopyToPinned(s, h), h.Close())
	}
	if err := x.Close(); err != nil {
		return err
	}
	var err error
	if *x, err = memory.Make[int32](s, asyncLen); err != nil {
		return err
	}
	k, err := r.b.modules[part.rank].Kernel("iota")
	if err != nil {
		return err
	}
	return k.Launch(s, kernel.Cover(asyncLen), kernel.Ptr(*x), kernel.Scalar(step.A), kernel.Scalar(step.B), kernel.Scalar(int32(asyncLen)))
}

func (r *asyncRun) collective(part *asyncPart, batch *nccl.Batch) error {
	step, bufs, ranks := part.step, &r.b.bufs[part.rank], len(r.b.devs)
	s, n := r.b.streams[part.rank][part.stream], step.N
	var on nccl.Issuer = r.b.comms[step.Comm][part.rank]
	if batch != nil {
		on = batch.On(r.b.comms[step.Comm][part.rank])
	}
	y, share := bufs[step.Y].Slice(0, n), n/ranks
	var x memory.Slice[int32]
	if step.Kind != "reduce" || part.rank == step.Rank { // otherwise another goroutine may renew it
		x = bufs[step.X].Slice(0, n)
	}
	switch step.Kind {
	case "allreduce":
		return nccl.AllReduce(on, s, x, y, nccl.Sum)
	case "broadcast":
		return nccl.Broadcast(on, s, x, y, step.Rank)
	case "reduce":
		return nccl.Reduce(on, s, x, y, nccl.Sum, step.Rank)
	case "allgather":
		return nccl.AllGather(on, s, x, y.Slice(0, share))
	case "reducescatter":
		return nccl.ReduceScatter(on, s, x.Slice(0, share), y, nccl.Sum)
	case "sendrecv":
		return errors.Join(nccl.Send(on, s, y, (part.rank+1)%ranks), nccl.Recv(on, s, x, (part.rank+ranks-1)%ranks))
	}
	return errors.Join(nccl.AllReduce(on, s, x, y, nccl.Sum),
		nccl.Broadcast(on, s, bufs[step.more(0)].Slice(0, n), bufs[step.more(1)].Slice(0, n), step.Rank))
}

// compare compares all memory, the fetches and the callbacks with the plan. The device is idle.
func (r *asyncRun) compare() error {
	for rank := range r.b.devs {
		for i, x := range r.b.bufs[rank] {
			got := make([]int32, asyncLen)
			if err := x.CopyTo(r.b.streams[rank][home(i)], got); err != nil {
				return err
			}
			if at, ok := firstDifference(got, r.plan.memory[rank][i]); !ok {
				return fmt.Errorf("rank %d: element %d of buffer %d is %d: want %d", rank, at, i, got[at], r.plan.memory[rank][i][at])
			}
		}
		for i, want := range r.plan.fetches[rank] {
			got := r.b.pinned[rank].Data()[i*asyncLen:]
			if at, ok := firstDifference(got[:len(want)], want); !ok {
				return fmt.Errorf("rank %d: element %d of fetch %d is %d: want %d", rank, at, i, got[at], want[at])
			}
		}
	}
	for _, e := range r.events {
		if err := e.Close(); err != nil {
			return err
		}
	}
	if n := r.b.calls.Load(); n != int64(r.plan.calls) {
		return fmt.Errorf("%d callbacks ran: want %d", n, r.plan.calls)
	}
	return nil
}

func firstDifference(got, want []int32) (at int, equal bool) {
	at = slices.IndexFunc(want, func(int32) bool { at++; return got[at-1] != want[at-1] })
	return at, at < 0
}

// Programs have all kinds of steps, and each mode.
func TestAsyncProgramsAreVaried(t *testing.T) {
	kinds, modes, late, free := map[string]int{}, map[asyncMode]int{}, 0, 0
	for i := range 300 {
		p := generateAsync(1, i, 2)
		l := p.plan()
		modes[p.Mode]++
		for _, s := range p.Steps {
			kinds[s.Kind]++
		}
		for _, part := range l.parts {
			if part.step.Kind == "renew" && len(part.needs) > 0 {
				free++
			}
		}
		for _, queue := range l.queues {
			for i := 1; i < len(queue); i++ {
				if l.parts[queue[i][0]].rank != l.parts[queue[i-1][0]].rank && len(queue[i]) == 1 && l.parts[queue[i][0]].step != l.parts[queue[i-1][0]].step {
					late++
				}
			}
		}
	}
	require.Len(t, kinds, len(asyncLocal)+len(asyncCollective))
	require.Len(t, modes, int(asyncModes))
	require.Greater(t, late, 100, "one goroutine enqueues the partner of a collective late")
	require.Greater(t, free, 100, "memory is freed while work is pending")
}
