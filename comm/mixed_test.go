package comm_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// How many operations TestMixedOperations has on each number of devices, and from where.
var (
	mixedOps  = flag.Int("mixed", 0, "how many operations TestMixedOperations has; 0 is a few")
	mixedSeed = flag.Uint64("mixedseed", 0, "the seed of TestMixedOperations; 0 is a random one")
)

// TestMixedOperations has own kernels and NCCL take turns at small operations of all
// kinds, one by one and in graphs, from a goroutine for each rank and from one for all,
// with sizes around those at which another way is taken, each on what others have left:
// every element is right, and what lies between is untouched.
func TestMixedOperations(t *testing.T) {
	for _, n := range []int{2, 3, 4, 8} {
		t.Run(fmt.Sprint("virtual/", n), func(t *testing.T) {
			comm.SetOwnBytes(t, 8<<10, 2<<10)
			mixed(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n}), &mixer{
				pool: 128 << 10, rare: 1 << 10,
				switches:     []int{8, 16, 32, 128, 1024, 4096, 8 << 10},
				partSwitches: []int{8, 16, 64, 256, 2 << 10},
			}, 2400/n, 60, 256<<10)
		})
		t.Run(fmt.Sprint("cuda/", n), func(t *testing.T) {
			devs := testgpu.CUDA(t, n)
			mixed(t, devs[:min(n, len(devs))], &mixer{
				pool: 16 << 20, rare: 16 << 10,
				switches:     []int{8, 16, 256, 1024, 4096, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 4 << 20},
				partSwitches: []int{8, 16, 256, 1024, 4096, 64 << 10},
			}, 20_000, 500, 32<<20)
		})
	}
}

// mixed runs at least so many operations, in rounds of at most so many on room bytes.
func mixed(t *testing.T, devs []*device.Device, m *mixer, operations, ops, room int) {
	if *mixedOps > 0 {
		operations = *mixedOps
	}
	seed := *mixedSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("%d operations from seed %d", operations, seed)
	m.rng, m.ranks = rand.New(rand.NewPCG(seed, 0)), len(devs)
	x := newMixture(t, localOwn(t, devs, &nccl.Config{Timeout: time.Minute}), m, room)
	ways := x.g.Strategies()
	began := time.Now()
	for done := 0; done < operations; {
		ops, used := m.round(ops, room)
		way, mode := ways[m.rng.IntN(len(ways))], m.rng.IntN(len(modes))
		if m.rng.IntN(2) == 0 {
			way = comm.OwnKernels
		}
		launches := 1
		if modes[mode].captured {
			launches += m.rng.IntN(3)
		}
		what := fmt.Sprintf("seed %d, after %d operations: %s by %s, %d times", seed, done, modes[mode].name, way, launches)
		require.NoError(t, x.g.Use(testgpu.Context(t), way))
		x.round(t, ops, used, func() error { return modes[mode].run(x, ops, launches) }, what)
		done += launches * len(ops)
	}
	t.Logf("%.1f µs an operation with all that is around it", float64(time.Since(began).Microseconds())/float64(operations))
}

// A mixture is what all rounds have: the ranks' sources and destinations.
type mixture struct {
	g         *comm.Group
	model     mixedModel
	pool, dst comm.Shards[byte]
	got       [][]byte
}

func newMixture(t *testing.T, g *comm.Group, m *mixer, room int) *mixture {
	x := &mixture{g: g}
	var err error
	x.pool, err = comm.Make[byte](g, m.pool)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.pool.Close()) })
	x.dst, err = comm.Make[byte](g, room)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.dst.Close()) })
	for i := range g.Size() {
		pool := make([]byte, m.pool)
		for k := range pool {
			pool[k] = byte(m.rng.Uint32())
		}
		require.NoError(t, x.pool[i].CopyFrom(g.Stream(i), pool))
		x.model.pools = append(x.model.pools, pool)
		x.model.dsts = append(x.model.dsts, make([]byte, room))
		x.got = append(x.got, make([]byte, room))
	}
	return x
}

// round clears the destinations, lets run enqueue the operations, and compares all ranks
// with the model, which meanwhile carries them out.
func (x *mixture) round(t *testing.T, ops []mixedOp, used int, run func() error, what string) {
	for i, d := range x.dst {
		require.NoError(t, d.Slice(0, used).Zero(x.g.Stream(i)))
	}
	var modelled sync.WaitGroup
	modelled.Go(func() { x.model.run(ops, used) })
	err := run()
	modelled.Wait()
	require.NoError(t, err, what)
	require.NoError(t, x.g.Wait(testgpu.Context(t)), what)
	require.NoError(t, x.each(func(i int) error { return x.dst[i].Slice(0, used).CopyTo(x.g.Stream(i), x.got[i][:used]) }))
	for i := range x.dst {
		if !bytes.Equal(x.got[i][:used], x.model.dsts[i]) {
			x.explain(t, ops, i, what)
		}
	}
}

// explain names the first operation that a rank has wrong.
func (x *mixture) explain(t *testing.T, ops []mixedOp, rank int, what string) {
	got, want := x.got[rank], x.model.dsts[rank]
	for k := range ops {
		dst, _ := ops[k].elements(len(x.dst))
		from, to := ops[k].dst, ops[k].dst+dst*ops[k].size()
		for at := from; at < to; at++ {
			if got[at] != want[at] {
				t.Fatalf("%s: rank %d, operation %d of %d, byte %d of %d is %d, want %d: %v",
					what, rank, k, len(ops), at-from, to-from, got[at], want[at], ops[k])
			}
		}
	}
	t.Fatalf("%s: rank %d: something between the destinations was written", what, rank)
}

// each runs fn for all ranks, on a goroutine each.
func (x *mixture) each(fn func(i int) error) error {
	return errors.Join(atOnce(len(x.dst), fn)...)
}

// modes are how operations are issued.
var modes = []struct {
	name     string
	captured bool
	run      func(x *mixture, ops []mixedOp, launches int) error
}{
	{"a goroutine for each rank", false, func(x *mixture, ops []mixedOp, _ int) error {
		return x.each(func(i int) error { return x.issue(ops, i, i+1) })
	}},
	{"one goroutine for all", false, func(x *mixture, ops []mixedOp, _ int) error { return x.issue(ops, 0, len(x.dst)) }},
	{"a graph for each rank", true, (*mixture).replayEach},
	{"a graph of all ranks", true, (*mixture).replayAll},
}

// replayEach lets each rank capture its operations, and launch them several times.
func (x *mixture) replayEach(ops []mixedOp, launches int) error {
	return x.each(func(i int) error {
		exec, err := graph.Capture([]*stream.Stream{x.g.Stream(i)}, func() error { return x.issue(ops, i, i+1) }, nil)
		if err != nil {
			return err
		}
		for range launches {
			if err := exec.Launch(x.g.Stream(i)); err != nil {
				return err
			}
		}
		return exec.Close()
	})
}

// replayAll captures the operations of all ranks in one graph.
func (x *mixture) replayAll(ops []mixedOp, launches int) error {
	exec, err := graph.Capture(x.g.Streams(), func() error { return x.issue(ops, 0, len(x.dst)) }, nil)
	if err != nil {
		return err
	}
	lead := x.g.Stream(0)
	for _, s := range x.g.Streams()[1:] {
		if err := lead.WaitStream(s); err != nil {
			return err
		}
	}
	for range launches {
		if err := exec.Launch(lead); err != nil {
			return err
		}
	}
	for _, s := range x.g.Streams()[1:] {
		if err := s.WaitStream(lead); err != nil {
			return err
		}
	}
	return exec.Close()
}

// issue enqueues the operations for the ranks from one to before another: each operation
// for all of them at once, those of a batch together.
func (x *mixture) issue(ops []mixedOp, from, to int) error {
	for k := 0; k < len(ops); {
		n := 1
		for ops[k].batch != 0 && k+n < len(ops) && ops[k+n].batch == ops[k].batch {
			n++
		}
		part := ops[k : k+n]
		k += n
		all := func(on func(*nccl.Communicator) nccl.Issuer) error {
			for j := range part {
				for i := from; i < to; i++ {
					if err := x.enqueue(on(x.g.Communicator(i)), &part[j], i); err != nil {
						return fmt.Errorf("rank %d: %v: %w", i, part[j], err)
					}
				}
			}
			return nil
		}
		if err := x.prepare(part, from, to); err != nil {
			return err
		}
		if err := routed(x.g, func(b *nccl.Batch) error { return all(b.On) }); err != nil {
			return err
		}
	}
	return nil
}

// prepare copies what operations in place read to where they do.
func (x *mixture) prepare(ops []mixedOp, from, to int) error {
	for _, o := range ops {
		if !o.inPlace {
			continue
		}
		_, n := o.elements(len(x.dst))
		for i := from; i < to; i++ {
			at := o.dst + o.own(i)
			if err := memory.Copy(x.g.Stream(i), x.dst[i].Slice(at, at+n*o.size()), x.pool[i].Slice(o.src, o.src+n*o.size())); err != nil {
				return err
			}
		}
	}
	return nil
}

func (x *mixture) enqueue(on nccl.Issuer, o *mixedOp, i int) error {
	if o.wide {
		return enqueueMixed[int32](on, x, o, i)
	}
	return enqueueMixed[uint8](on, x, o, i)
}

func enqueueMixed[T memory.Element](on nccl.Issuer, x *mixture, o *mixedOp, i int) error {
	s := x.g.Stream(i)
	d, n := o.elements(len(x.dst))
	dst, err := memory.View[T](x.dst[i].Buffer(), x.dst[i].Offset()+o.dst, d)
	if err != nil {
		return err
	}
	buf, at := x.pool[i].Buffer(), x.pool[i].Offset()+o.src
	switch {
	case o.chained:
		buf, at = x.dst[i].Buffer(), x.dst[i].Offset()+o.src
	case o.inPlace:
		buf, at = x.dst[i].Buffer(), x.dst[i].Offset()+o.dst+o.own(i)
	}
	src, err := memory.View[T](buf, at, n)
	if err != nil {
		return err
	}
	switch o.kind {
	case "all-reduce":
		return nccl.AllReduce(on, s, dst, src, o.op)
	case "all-gather":
		return nccl.AllGather(on, s, dst, src)
	case "reduce-scatter":
		return nccl.ReduceScatter(on, s, dst, src, o.op)
	case "broadcast":
		return nccl.Broadcast(on, s, dst, src, o.root)
	}
	return nccl.AllToAll(on, s, dst, src)
}
