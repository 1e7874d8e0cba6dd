package comm_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

var (
	waitPrograms = flag.Int("waits", 40, "how many programs TestWaitsNeverLie runs")
	waitSeed     = flag.Uint64("waitsseed", 0, "the seed of the first program of TestWaitsNeverLie; 0 is a random one")
)

// TestWaitsNeverLie runs random programs: collectives that several goroutines wait for in all
// ways that there are, while something ends the group or a wait beside them. A wait that
// returns nil means that the operations completed: every element of their outputs, which
// were poisoned, is compared. Without such an event every wait returns nil.
func TestWaitsNeverLie(t *testing.T) {
	seed := *waitSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	var nils, errs atomic.Int64
	run := func(t *testing.T, devices func(p *waitProgram) []*device.Device) {
		for i := range *waitPrograms {
			passed := t.Run(fmt.Sprint(i), func(t *testing.T) { // whose end frees the devices
				p := &waitProgram{t: t, seed: seed + uint64(i), nils: &nils, errs: &errs}
				p.rng = rand.New(rand.NewPCG(p.seed, 1))
				if p.run(devices); t.Failed() {
					t.Fatalf("-waits 1 -waitsseed %d repeats the program: %s", p.seed, p)
				}
			})
			if !passed {
				return
			}
		}
		t.Logf("seed %d: %d programs, %d waits returned nil and %d an error", seed, *waitPrograms, nils.Load(), errs.Load())
	}
	t.Run("virtual", func(t *testing.T) {
		run(t, func(p *waitProgram) []*device.Device {
			cfg := &device.SystemConfig{VirtualDevices: 1 + p.rng.IntN(3)}
			if plan, planned := p.beside.faults(p.rng); planned {
				cfg.Faults = plan
			}
			return testgpu.System(p.t, cfg).Devices()
		})
	})
	t.Run("cuda", func(t *testing.T) {
		all := testgpu.CUDA(t, 1)[0].System().Devices()
		run(t, func(p *waitProgram) []*device.Device {
			if _, planned := p.beside.faults(p.rng); planned {
				p.beside = nothing
			}
			return all[:1+p.rng.IntN(min(len(all), 4))]
		})
	})
}

// A mishap is what happens beside the waits of a program.
type mishap int

const (
	nothing mishap = iota
	closesIt
	aborts
	shutsDown
	cancels
	timesOut   // a rank does not issue the last operation
	failsLater // NCCL reports an error of an operation that runs
	hangs      // an operation does not end
	failsToAsk // the driver fails a query, as if the device were lost
	numMishaps // of which there are so many
)

func (e mishap) String() string {
	return [...]string{"nothing", "close", "abort", "shutdown", "cancelled context", "timeout", "asynchronous error", "hang", "device error"}[e]
}

// faults is the fault plan that an event needs, if it needs one.
func (e mishap) faults(rng *rand.Rand) (plan string, planned bool) {
	nth := 1 + rng.IntN(6)
	switch e {
	case failsLater:
		return fmt.Sprintf("async@ncclAllReduce#%d=ncclSystemError", nth), true
	case hangs:
		return fmt.Sprintf("hang@ncclAllReduce#%d", nth), true
	case failsToAsk:
		return fmt.Sprintf("%s#%d=CUDA_ERROR_LAUNCH_FAILED", []string{"cuEventQuery", "cuStreamQuery"}[rng.IntN(2)], nth), true
	}
	return "", false
}

// A waitProgram is some collectives, with what waits for them and what happens beside that.
type waitProgram struct {
	t          *testing.T
	seed       uint64
	rng        *rand.Rand
	beside     mishap
	strategy   comm.Strategy
	g          *comm.Group
	eyes       []*stream.Stream // on which outputs are read
	steps      []*waitStep
	nils, errs *atomic.Int64
}

func (p *waitProgram) String() string {
	return fmt.Sprintf("%s beside %d collectives of %d ranks by %s", p.beside, len(p.steps), len(p.eyes), p.strategy)
}

// A waitStep is one collective, and what it must come to.
type waitStep struct {
	src, dst comm.Shards[float32]
	want     []float32
	issue    func() error
	graphs   []*graph.Exec
	work     *comm.Work
}

const poison = -12345

func (p *waitProgram) run(devices func(*waitProgram) []*device.Device) {
	t := p.t
	if p.beside = mishap(p.rng.IntN(int(numMishaps))); p.beside >= timesOut && p.rng.IntN(2) == 0 {
		p.beside = mishap(p.rng.IntN(int(timesOut))) // they take longer
	}
	devs := devices(p)
	p.strategy = []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.Windows, comm.CopyEngines}[p.rng.IntN(4)]
	cfg := &comm.Config{Strategy: p.strategy, NCCL: &nccl.Config{Timeout: time.Minute}}
	if p.beside == timesOut || p.beside == hangs {
		cfg.NCCL.Timeout = 300 * time.Millisecond
		if devs[0].System().Backend() == "cuda" {
			cfg.NCCL.Timeout = 2 * time.Second
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var err error
	if p.g, err = comm.Local(ctx, devs, cfg); err != nil {
		require.NotEqual(t, nothing, p.beside, err)
		return // by the fault plan
	}
	for _, d := range devs {
		s, err := stream.New(d, nil)
		require.NoError(t, err)
		defer s.Close()
		p.eyes = append(p.eyes, s)
	}
	defer p.close()
	if err := p.g.Barrier(ctx); err != nil { // which connects the ranks, before a graph captures their operations
		require.NotEqual(t, nothing, p.beside, err)
		return
	}
	if p.strategy == comm.OwnKernels {
		if err := p.loadKernels(ctx); err != nil {
			require.NotEqual(t, nothing, p.beside, err)
			return
		}
	}
	for range 1 + p.rng.IntN(4) {
		s, err := p.newStep()
		p.steps = append(p.steps, s)
		if err != nil {
			require.NotEqual(t, nothing, p.beside, err)
			return
		}
	}
	p.carryOut(ctx)
}

// loadKernels runs each kind of collective once: the first use of a Chorus kernel loads a module, which waits for the device, and
// so for streams that stand still.
func (p *waitProgram) loadKernels(ctx context.Context) error {
	size := p.g.Size()
	one, err := comm.Make[float32](p.g, 1)
	require.NoError(p.t, err)
	defer one.Close()
	all, err := comm.Make[float32](p.g, size)
	require.NoError(p.t, err)
	defer all.Close()
	return errors.Join(comm.AllReduce(p.g, comm.Sum, one...), comm.AllReduce(p.g, comm.Max, one...),
		comm.AllGather(p.g, all, one), comm.ReduceScatter(p.g, comm.Sum, one, all), p.g.Wait(ctx))
}

func (p *waitProgram) close() {
	for _, s := range p.steps {
		for _, x := range s.graphs {
			_ = x.Close()
		}
		_ = s.work.Close()
	}
	err := p.g.Close()
	if p.beside < timesOut {
		require.NoError(p.t, err)
	}
	for _, s := range p.steps {
		_, _ = s.src.Close(), s.dst.Close() // a device that was lost does not take them
	}
}

// newStep makes the buffers of a collective, and captures it if it is to be one of a graph.
func (p *waitProgram) newStep() (*waitStep, error) {
	n, g := 1+p.rng.IntN(3000), p.g
	s := &waitStep{}
	kind := p.rng.IntN(3)
	in, out := n, n
	switch size := g.Size(); kind {
	case 1:
		out = n * size
	case 2:
		in = n * size
	}
	s.want = make([]float32, out*g.Size())
	var err error
	if s.src, err = comm.Make[float32](g, in); err != nil {
		return s, err
	}
	if s.dst, err = comm.Make[float32](g, out); err != nil {
		return s, err
	}
	blank := make([]float32, out)
	for k := range blank {
		blank[k] = poison
	}
	for i := range s.src {
		h := make([]float32, in)
		for k := range h {
			h[k] = float32(1 + p.rng.IntN(1000))
			for to := range s.dst { // the output of each rank
				switch kind {
				case 0:
					s.want[to*out+k] += h[k]
				case 1:
					s.want[to*out+i*in+k] = h[k]
				case 2:
					if k/n == to {
						s.want[to*out+k%n] += h[k]
					}
				}
			}
		}
		if err := errors.Join(s.src[i].CopyFrom(g.Stream(i), h), s.dst[i].CopyFrom(g.Stream(i), blank)); err != nil {
			return s, err
		}
	}
	one := func(on nccl.Issuer, i int) error {
		q := g.Stream(i)
		switch kind {
		case 1:
			return nccl.AllGather(on, q, s.dst[i], s.src[i])
		case 2:
			return nccl.ReduceScatter(on, q, s.dst[i], s.src[i], nccl.Sum)
		}
		return nccl.AllReduce(on, q, s.dst[i], s.src[i], nccl.Sum)
	}
	s.issue = func() error {
		return routed(g, func(b *nccl.Batch) error {
			for i := range s.src {
				if err := one(b.On(g.Communicator(i)), i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if p.beside != hangs && p.rng.IntN(4) == 0 { // the launches of graphs have no deadline
		return s, s.capture(g, one)
	}
	return s, nil
}

// capture makes graphs of the step, one for each rank.
func (s *waitStep) capture(g *comm.Group, one func(on nccl.Issuer, i int) error) error {
	for i := range s.src {
		x, err := graph.Capture([]*stream.Stream{g.Stream(i)}, func() error {
			return alone(g, i, func(on nccl.Issuer) error { return one(on, i) })
		}, nil)
		if err != nil {
			return err
		}
		s.graphs = append(s.graphs, x)
	}
	s.issue = func() error {
		for i, x := range s.graphs {
			if err := x.Launch(g.Stream(i)); err != nil {
				return err
			}
		}
		return nil
	}
	return nil
}

// carryOut issues the collectives, some of them behind streams that stand still, and lets the
// event happen while goroutines wait.
func (p *waitProgram) carryOut(ctx context.Context) {
	held, issued := p.rng.IntN(len(p.steps)+1), 0
	var opens []func()
	for i, s := range p.steps {
		if i == held {
			for k := range p.eyes {
				if p.rng.IntN(2) == 0 {
					opens = append(opens, streamtest.Hold(p.t, p.g.Stream(k)))
				}
			}
		}
		var err error
		if s.work, err = comm.Start(p.g, s.issue); err != nil {
			require.NotEqual(p.t, nothing, p.beside, err)
			break
		}
		issued++
	}
	defer func() {
		for _, open := range opens {
			open()
		}
	}()
	if p.beside == timesOut && len(p.eyes) > 1 && issued > 0 {
		_ = reduceAlone(p.g, 0, p.steps[0].src[0], nccl.Max)
	}
	waits, cancel := context.WithCancel(ctx)
	defer cancel()
	var all sync.WaitGroup
	for range 2 + p.rng.IntN(4) {
		wait := p.waiter(waits, issued)
		pause := p.rng.IntN(2000)
		all.Go(func() {
			yield(pause)
			wait()
		})
	}
	happen, before, after := p.happening(ctx, cancel), p.rng.IntN(3000), p.rng.IntN(3000)
	all.Go(func() {
		yield(before)
		happen()
	})
	yield(after)
	for _, open := range opens {
		open()
	}
	all.Wait()
	if ctx.Err() != nil {
		p.t.Errorf("the program did not end within a minute")
		for i := range p.eyes {
			c := p.g.Communicator(i)
			idle, err := p.g.Stream(i).Query()
			p.t.Logf("rank %d: failed %v, ended %v, its stream is idle: %v, %v", i, c.Err(), collective.Of(c).Ended(), idle, err)
			for _, o := range c.Trace() {
				p.t.Logf("%v: %v, captured %v", o, o.State, o.Captured)
			}
		}
	}
	for range 2 { // what is over is over
		p.waiter(waits, issued)()
	}
}

// yield lets other goroutines run, for a while.
func yield(n int) {
	for range n {
		runtime.Gosched()
	}
}

// happening is the event.
func (p *waitProgram) happening(ctx context.Context, cancel func()) func() {
	i := p.rng.IntN(len(p.eyes))
	switch p.beside {
	case closesIt:
		return func() { _ = p.g.Close() } // a graph may keep it open
	case aborts:
		return func() { _ = p.g.Communicator(i).Abort() }
	case shutsDown:
		return func() { _ = p.g.Shutdown(ctx) }
	case cancels:
		return cancel
	}
	return func() {}
}

// waiter waits in one of the ways for some of the first collectives, and compares what these have
// come to if the wait returns nil.
func (p *waitProgram) waiter(ctx context.Context, issued int) func() {
	if issued == 0 {
		return func() {}
	}
	nth, rank := p.rng.IntN(issued), p.rng.IntN(len(p.eyes))
	s, g := p.steps[nth], p.g
	everyone := func(how string, first, last int, err error) {
		p.judge(how, err, p.steps[first:last], 0, len(p.eyes))
	}
	switch p.rng.IntN(7) {
	case 0:
		return func() { everyone("Work.Wait", nth, nth+1, s.work.Wait(ctx)) }
	case 1:
		return func() {
			for {
				done, err := s.work.Done()
				if done || err != nil || ctx.Err() != nil {
					if done {
						everyone("Work.Done", nth, nth+1, err)
					}
					return
				}
				runtime.Gosched()
			}
		}
	case 2:
		return func() { everyone("Group.Wait", 0, issued, g.Wait(ctx)) }
	case 3:
		return func() {
			p.judge("Communicator.Wait", g.Communicator(rank).Wait(ctx, g.Stream(rank)), p.steps[:issued], rank, rank+1)
		}
	case 4: // what a stream has passed has completed if the group is sound afterwards
		return func() {
			err := g.Stream(rank).Sync(ctx)
			if err == nil {
				err = g.Err()
			}
			p.judge("Stream.Sync", err, p.steps[:issued], rank, rank+1)
		}
	case 5:
		return func() {
			e, err := g.Stream(rank).Record(nil)
			if err == nil {
				err = errors.Join(e.Sync(ctx), e.Close())
			}
			if err == nil {
				err = g.Err()
			}
			p.judge("Event.Sync", err, p.steps[:issued], rank, rank+1)
		}
	}
	return func() { // the device waits, and the host asks afterwards
		err := s.work.WaitOn(p.eyes[rank])
		if err == nil {
			err = p.eyes[rank].Sync(ctx)
		}
		if err == nil {
			_, err = s.work.Done()
		}
		everyone("Work.WaitOn", nth, nth+1, err)
	}
}

// judge compares what steps have come to on some ranks if their wait has returned nil, and
// requires nil if nothing happens beside.
func (p *waitProgram) judge(how string, err error, steps []*waitStep, from, to int) {
	if err != nil {
		p.errs.Add(1)
		if p.beside == nothing && !errors.Is(err, device.ErrClosed) { // another waiter has closed the work
			p.t.Errorf("%s: %s failed: %v", p, how, err)
		}
		return
	}
	p.nils.Add(1)
	for nth, s := range steps {
		for i := from; i < to; i++ {
			p.compare(s.dst[i], s.want[i*s.dst[i].Len():], fmt.Sprintf("%s returned nil: collective %d of %d that it waited for, on rank %d", how, nth, len(steps), i), i)
		}
	}
}

func (p *waitProgram) compare(x memory.Slice[float32], want []float32, what string, rank int) {
	have := make([]float32, x.Len())
	if err := x.CopyTo(p.eyes[rank], have); err != nil {
		if p.beside != failsToAsk {
			p.t.Errorf("%s: %s: %v", p, what, err)
		}
		return
	}
	for k, v := range have {
		if v != want[k] {
			p.t.Errorf("%s: %s: element %d is %v: want %v", p, what, k, v, want[k])
			return
		}
	}
}
