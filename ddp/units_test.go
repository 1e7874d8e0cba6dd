package ddp_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var unitLens = [][]int{{5, 1000, 3}, {0}, {701, 257}, {1, 12, 0}}

// unitTotal is the number of all parameters.
const unitTotal = 5 + 1000 + 3 + 701 + 257 + 1 + 12

// A sharding is a model of units on the local ranks of a group, and its values on the host.
type sharding[P memory.Element] struct {
	t       *testing.T
	g       *comm.Group
	u       *ddp.Units[float32, P]
	streams []*stream.Stream
	round   func(float32) P
	value   func(P) float32
	want    [][][]float32 // the master copy, by unit and parameter
	offset  int           // of the rank in all ranks of hybrid sharding
}

func newSharding[P memory.Element](t *testing.T, g *comm.Group, cfg *ddp.UnitsConfig, seed uint64, round func(float32) P, value func(P) float32) *sharding[P] {
	x := &sharding[P]{t: t, g: g, streams: newStreams(t, g), round: round, value: value}
	var err error
	x.u, err = ddp.NewUnits[float32, P](g, unitLens, cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.u.Close()) })
	r := rand.New(rand.NewPCG(seed, 3))
	for _, lens := range unitLens {
		var params [][]float32
		for _, n := range lens {
			h := make([]float32, n)
			for e := range h {
				h[e] = float32(r.IntN(1<<12)-1<<11) / (1 << 9)
			}
			params = append(params, h)
		}
		x.want = append(x.want, params)
	}
	for i, s := range x.streams {
		require.NoError(t, s.WaitStream(g.Stream(i)))
		for _, p := range x.u.Pieces(i) {
			require.NoError(t, x.u.Shard(i).Slice(p.At, p.At+p.Len).CopyFrom(s, x.want[p.Unit][p.Param][p.Start:p.Start+p.Len]))
		}
	}
	require.NoError(t, x.u.Refresh(x.streams...))
	return x
}

func sameFloat(x float32) float32 { return x }

// forward uses all units and checks their parameters.
func (x *sharding[P]) forward() {
	for k := range unitLens {
		for i, s := range x.streams {
			x.use(i, s, k)
			require.NoError(x.t, x.u.Done(s, k))
		}
	}
}

func (x *sharding[P]) use(i int, s *stream.Stream, k int) {
	ps, err := x.u.Use(s, k)
	require.NoError(x.t, err)
	require.Len(x.t, ps, len(unitLens[k]))
	for j, p := range ps {
		h := make([]P, p.Len())
		require.NoError(x.t, p.CopyTo(s, h))
		require.Len(x.t, h, unitLens[k][j])
		for e := range h {
			require.Equal(x.t, x.round(x.want[k][j][e]), h[e], "local rank %d unit %d parameter %d element %d", i, k, j, e)
		}
	}
}

func unitPart(step, rank, k, j, e int) float32 {
	return float32((step*7+rank*3+k*11+j*5+e)%17 - 8)
}

// backward adds the gradients of a step to those of Grads. It completes them if ready is true.
func (x *sharding[P]) backward(step int, ready bool) {
	for k := len(unitLens) - 1; k >= 0; k-- {
		for i, s := range x.streams {
			x.use(i, s, k)
			gs, err := x.u.Grads(s, k)
			require.NoError(x.t, err)
			for j, p := range gs {
				h := make([]P, p.Len())
				require.NoError(x.t, p.CopyTo(s, h))
				for e := range h {
					h[e] = x.round(x.value(h[e]) + unitPart(step, x.g.Communicator(i).Rank()+x.offset, k, j, e))
				}
				require.NoError(x.t, p.CopyFrom(s, h))
			}
			if ready {
				require.NoError(x.t, x.u.Ready(s, k))
			}
			require.NoError(x.t, x.u.Done(s, k))
		}
	}
}

// update descends by the gradients, which are the sum of steps over some ranks, times factor.
func (x *sharding[P]) update(steps []int, ranks int, factor float32) {
	grad := func(k, j, e int) (sum float32) {
		for _, step := range steps {
			for rank := range ranks {
				sum += unitPart(step, rank, k, j, e)
			}
		}
		return sum * factor
	}
	const rate = 1. / 64
	for i, s := range x.streams {
		shard := x.u.Shard(i)
		params, seen := make([]float32, x.u.Len()), make([]bool, x.u.Len())
		require.NoError(x.t, shard.CopyTo(s, params))
		grads := shardGrads(x.t, x.u, i, s)
		for _, p := range x.u.Pieces(i) {
			for e := range p.Len {
				seen[p.At+e] = true
				require.Equal(x.t, grad(p.Unit, p.Param, p.Start+e), grads[p.At+e], "gradient of local rank %d unit %d parameter %d element %d of steps %v", i, p.Unit, p.Param, p.Start+e, steps)
				require.Equal(x.t, x.want[p.Unit][p.Param][p.Start+e], params[p.At+e])
				params[p.At+e] -= rate * grads[p.At+e]
			}
		}
		for at := range seen {
			require.True(x.t, seen[at] || params[at] == 0, "padding is zeros")
		}
		require.NoError(x.t, shard.CopyFrom(s, params))
	}
	for k := range x.want {
		for j := range x.want[k] {
			for e := range x.want[k][j] {
				x.want[k][j][e] -= rate * grad(k, j, e)
			}
		}
	}
	require.NoError(x.t, x.u.Refresh(x.streams...))
}

// shardGrads returns the gradients in the shard of local rank i, by Piece.At.
func shardGrads[P memory.Element](t *testing.T, u *ddp.Units[float32, P], i int, s *stream.Stream) []float32 {
	all, grads := make([]float32, u.Len()), u.ShardGrads(i)
	require.Len(t, grads, len(u.Pieces(i)))
	for j, p := range u.Pieces(i) {
		x, err := tensor.Slice[float32](grads[j])
		require.NoError(t, err)
		require.NoError(t, x.CopyTo(s, all[p.At:p.At+p.Len]))
	}
	return all
}

// steps does a step with one pass, one that accumulates in Grads, and one that accumulates in shards.
func (x *sharding[P]) steps(ranks int, factor float32) {
	x.forward()
	x.backward(0, true)
	require.NoError(x.t, x.u.Finish(x.streams...))
	x.update([]int{0}, ranks, factor)
	x.forward() // an evaluation
	for step := range 2 {
		x.forward()
		x.backward(1+step, step == 1)
	}
	require.NoError(x.t, x.u.Finish(x.streams...))
	x.update([]int{1, 2}, ranks, factor)
	for step := range 2 {
		x.forward()
		x.backward(3+step, true)
		require.NoError(x.t, x.u.Finish(x.streams...))
	}
	x.update([]int{3, 4}, ranks, factor)
	x.forward()
}

// Parameters, gradients and updates are exact, with each option and with both types of parameters.
func TestUnits(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for ranks := 1; ranks <= 4; ranks++ {
		for _, cfg := range []ddp.UnitsConfig{
			{},
			{Prefetch: new(0), Op: new(comm.Sum)},
			{Prefetch: new(9), Keep: []int{3}},
			{Keep: []int{0, 1, 2, 3}, Op: new(comm.Sum), Reduce: memory.Float32},
		} {
			if ranks == 3 {
				cfg.Op = new(comm.Sum) // a third is not exact
			}
			factor := float32(1)
			if cfg.Op == nil {
				factor = 1 / float32(ranks)
			}
			t.Run(fmt.Sprintf("%d/%v/%v", ranks, cfg.Keep, cfg.Reduce), func(t *testing.T) {
				testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
					newSharding(t, local(t, devs), &cfg, seed, sameFloat, sameFloat).steps(ranks, factor)
				})
			})
			t.Run(fmt.Sprintf("%d/%v/%v/bfloat16", ranks, cfg.Keep, cfg.Reduce), func(t *testing.T) {
				testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
					newSharding(t, local(t, devs), &cfg, seed, memory.BFloat16Of, memory.BFloat16Bits.Float32).steps(ranks, factor)
				})
			})
		}
	}
}

// Two groups of shards with two replicas of each shard: gradients are reduced over all four ranks,
// which are processes.
func TestHybridUnits(t *testing.T) {
	testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		gs, errs := join(t, ctx, devs[:4])
		require.NoError(t, errors.Join(errs...))
		subs := make([][2]*comm.Group, 4)
		for kind := range 2 {
			var wg sync.WaitGroup
			for i, g := range gs {
				wg.Go(func() {
					var sub []*comm.Group
					if sub, errs[i] = g.Split(ctx, []int{[]int{i / 2, i % 2}[kind]}, nil); errs[i] == nil {
						subs[i][kind] = sub[0]
					}
				})
			}
			wg.Wait()
			require.NoError(t, errors.Join(errs...))
		}
		for _, reduce := range []memory.DType{memory.BFloat16, memory.Float32} {
			var wg sync.WaitGroup
			for i := range gs {
				wg.Go(func() {
					cfg := &ddp.UnitsConfig{Replicas: []*comm.Group{subs[i][1]}, Reduce: reduce, Keep: []int{3}}
					x := newSharding(t, subs[i][0], cfg, 5, memory.BFloat16Of, memory.BFloat16Bits.Float32)
					x.offset = i / 2 * 2
					x.steps(4, 0.25)
				})
			}
			wg.Wait()
		}
		for i := range gs {
			require.NoError(t, subs[i][0].Close())
			require.NoError(t, subs[i][1].Close())
		}
	})
}

// The memory of a pass is that of the shards of parameters, of 1+Prefetch units, of the gradients of two
// units, and of the shards of gradients of the units that are ready. Later steps reuse it.
func TestMemoryOfUnits(t *testing.T) {
	for prefetch := range 3 {
		t.Run(fmt.Sprint(prefetch), func(t *testing.T) {
			testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
				const units, n = 6, 1 << 14 // elements of a unit
				const unit = 2 * n          // bytes in bfloat16
				const shard = 4 * n / 2     // bytes of a unit's shard of gradients in float32
				g := local(t, devs)
				streams := newStreams(t, g)
				stats := func() memory.Stats {
					st, err := memory.StatsOf(devs[1])
					require.NoError(t, err)
					return st
				}
				active := func() memory.Stat { return stats().ActiveBytes.All } // with freed blocks that other streams use
				require.NoError(t, devs[1].Sync(testgpu.Context(t)))
				require.NoError(t, memory.EmptyCache(devs[1])) // blocks that an earlier test has freed are in use no more
				before := active().Current
				lens := make([][]int, units)
				for k := range lens {
					lens[k] = []int{n - 8, 8}
				}
				u, err := ddp.NewUnits[float32, memory.BFloat16Bits](g, lens, &ddp.UnitsConfig{Prefetch: &prefetch, Keep: []int{units - 1}})
				require.NoError(t, err)
				defer u.Close()
				shards := active().Current - before
				require.Equal(t, int64((4+2)*n*units/2), shards, "the master copy and what is gathered, and no gradients")
				require.NoError(t, u.Refresh(streams...))
				held := stats().AllocatedBytes.All.Current
				peak := func() int64 { return active().Peak - before - shards }
				var calls, grads int64
				for step := range 3 {
					require.NoError(t, memory.ResetPeakStats(devs[1]))
					for k := range units {
						for _, s := range streams {
							_, err := u.Use(s, k)
							require.NoError(t, err)
							require.NoError(t, u.Done(s, k))
						}
					}
					require.Equal(t, int64((1+prefetch)*unit), peak()-grads, "forward pass")
					for k := units - 1; k >= 0; k-- {
						for _, s := range streams {
							_, err := u.Use(s, k)
							require.NoError(t, err)
							_, err = u.Grads(s, k)
							require.NoError(t, err)
							require.NoError(t, u.Ready(s, k))
							require.NoError(t, u.Done(s, k))
						}
						ready, next := int64(units-k), int64(min(k, prefetch))
						require.Equal(t, held+min(ready, 2)*unit+ready*shard+next*unit, stats().AllocatedBytes.All.Current-grads*max(2-ready, 0)/2,
							"step %d, unit %d: gradients of two units, the shards of those that are ready, and the parameters of the next units; not of the kept unit", step, k)
						require.LessOrEqual(t, peak(), int64(1+prefetch)*unit+2*unit+ready*shard+unit/2, "backward pass, with a reduced shard")
					}
					require.NoError(t, u.Finish(streams...))
					require.Equal(t, held+2*unit+units*shard, stats().AllocatedBytes.All.Current, "step %d: all shards of gradients", step)
					require.NoError(t, u.Refresh(streams...))
					grads = 2 * unit
					require.Equal(t, grads, active().Current-before-shards, "after a step")
					if step == 0 {
						calls = stats().DeviceAllocs
					}
				}
				require.Equal(t, calls, stats().DeviceAllocs, "later steps reuse the memory, though the host ran ahead")
				for i, s := range streams {
					require.NoError(t, g.Stream(i).WaitStream(s))
				}
				require.NoError(t, g.Wait(testgpu.Context(t)))
			})
		})
	}
}

// A large unit needs memory for its gradients only while it has some, here at the end of the backward pass. Later
// steps reuse it.
func TestMemoryOfUnequalUnits(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		const n, large = 1 << 14, 1 << 18 // bytes in bfloat16
		g := local(t, devs)
		streams := newStreams(t, g)
		stats := func() memory.Stats {
			st, err := memory.StatsOf(devs[1])
			require.NoError(t, err)
			return st
		}
		u, err := ddp.NewUnits[memory.BFloat16Bits, memory.BFloat16Bits](g, [][]int{{large / 2}, {n / 2}, {n / 2}, {n / 2}}, nil)
		require.NoError(t, err)
		defer u.Close()
		held := stats().AllocatedBytes.All.Current
		var calls int64
		for step := range 4 {
			shards := int64(0)
			for k := 3; k >= 0; k-- {
				for _, s := range streams {
					_, err := u.Grads(s, k)
					require.NoError(t, err)
					require.NoError(t, u.Ready(s, k))
				}
				of := []int64{large, n, n, n}[k]
				shards += of / 2
				before := int64(n) // the gradients of the unit before
				if k == 3 {
					before = 0
				}
				require.Equal(t, held+before+of+shards, stats().AllocatedBytes.All.Current, "step %d, unit %d", step, k)
			}
			require.NoError(t, u.Finish(streams...))
			require.NoError(t, u.Refresh(streams...))
			require.Equal(t, held+n, stats().AllocatedBytes.All.Current, "step %d", step)
			if step == 1 {
				calls = stats().DeviceAllocs
			}
		}
		require.Equal(t, calls, stats().DeviceAllocs, "later steps reuse the memory, though the host ran ahead")
		for i, s := range streams {
			require.NoError(t, g.Stream(i).WaitStream(s))
		}
		require.NoError(t, g.Wait(testgpu.Context(t)))
	})
}

// Gradients that add up in Grads keep their memory for the next step, in which no stream waits for it.
func TestMemoryOfAccumulatedUnits(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		s := newStreams(t, g)[0]
		current := func() int64 {
			st, err := memory.StatsOf(devs[0])
			require.NoError(t, err)
			return st.AllocatedBytes.All.Current
		}
		u, err := ddp.NewUnits[float32, float32](g, [][]int{{1 << 10}, {1 << 12}, {1 << 11}}, nil)
		require.NoError(t, err)
		defer u.Close()
		held := current()
		for step := range 3 {
			gate := make(chan struct{})
			if step > 0 {
				require.NoError(t, g.Stream(0).Callback(func() { <-gate }))
			}
			for k := 2; k >= 0; k-- {
				_, err := u.Grads(s, k)
				require.NoError(t, err)
			}
			require.NoError(t, s.Sync(testgpu.Context(t)), "step %d", step)
			require.EqualValues(t, held+4*(1<<10+1<<12+1<<11), current(), "step %d", step)
			close(gate)
			for k := 2; k >= 0; k-- {
				require.NoError(t, u.Ready(s, k))
			}
			require.NoError(t, u.Finish(s))
			require.NoError(t, u.Refresh(s))
		}
	})
}

// Gathers and reductions complete while the program's streams still compute.
func TestUnitsOverlap(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for prefetch := range 2 {
			g := local(t, devs)
			streams := newStreams(t, g)
			u, err := ddp.NewUnits[float32, float32](g, unitLens, &ddp.UnitsConfig{Prefetch: &prefetch})
			require.NoError(t, err)
			defer u.Close()
			issued := func(name string) (n int) {
				for _, o := range g.Communicator(1).Trace() {
					if o.Name == name {
						n++
					}
				}
				return n
			}
			// whileBusy returns when the group's streams have passed, while the program's still wait.
			whileBusy := func() {
				gate := make(chan struct{})
				for _, s := range streams {
					require.NoError(t, s.Callback(func() { <-gate }))
				}
				require.NoError(t, g.Wait(testgpu.Context(t)))
				for _, s := range streams {
					passed, err := s.Query()
					require.NoError(t, err)
					require.False(t, passed)
				}
				close(gate)
				for _, s := range streams {
					require.NoError(t, s.Sync(testgpu.Context(t)))
				}
			}
			for k := range unitLens {
				for _, s := range streams {
					_, err := u.Use(s, k)
					require.NoError(t, err)
				}
				require.Equal(t, min(k+1+prefetch, len(unitLens)), issued("ncclAllGather"))
				whileBusy()
				for _, s := range streams {
					require.NoError(t, u.Done(s, k))
				}
			}
			for k := len(unitLens) - 1; k >= 0; k-- {
				for _, s := range streams {
					_, err := u.Use(s, k)
					require.NoError(t, err)
					_, err = u.Grads(s, k)
					require.NoError(t, err)
					require.NoError(t, u.Ready(s, k))
				}
				require.Equal(t, 2*len(unitLens)-max(k-prefetch, 0), issued("ncclAllGather"))
				require.Equal(t, len(unitLens)-k, issued("ncclReduceScatter"))
				whileBusy()
				for _, s := range streams {
					require.NoError(t, u.Done(s, k))
				}
			}
			require.NoError(t, u.Finish(streams...))
		}
	})
}

// The host waits for nothing: a whole step is enqueued behind streams that do not move.
func TestUnitsDoNotWait(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		x := newSharding(t, g, &ddp.UnitsConfig{Op: new(comm.Sum)}, 9, memory.BFloat16Of, memory.BFloat16Bits.Float32)
		x.steps(2, 1) // kernels are loaded
		gate := make(chan struct{})
		for _, s := range x.streams {
			require.NoError(t, s.Callback(func() { <-gate }))
		}
		require.NoError(t, enqueueStep(x.u, x.streams))
		for _, s := range x.streams {
			passed, err := s.Query()
			require.NoError(t, err)
			require.False(t, passed)
		}
		close(gate)
		x.forward()
	})
}

// enqueueStep is a step whose gradients are zeros.
func enqueueStep[P memory.Element](u *ddp.Units[float32, P], streams []*stream.Stream) error {
	for k := range unitLens {
		for _, s := range streams {
			if _, err := u.Use(s, k); err != nil {
				return err
			}
			if err := u.Done(s, k); err != nil {
				return err
			}
		}
	}
	for k := len(unitLens) - 1; k >= 0; k-- {
		for _, s := range streams {
			if _, err := u.Use(s, k); err != nil {
				return err
			}
			if _, err := u.Grads(s, k); err != nil {
				return err
			}
			if err := errors.Join(u.Ready(s, k), u.Done(s, k)); err != nil {
				return err
			}
		}
	}
	return errors.Join(u.Finish(streams...), u.Refresh(streams...))
}

// A graph has a whole step: of its launches, each begins with the parameters of the one before.
func TestUnitsInAGraph(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		x := newSharding(t, g, &ddp.UnitsConfig{Op: new(comm.Sum), Keep: []int{3}}, 4, sameFloat, sameFloat)
		u, streams := x.u, x.streams
		step := func() error { // gradients are the parameters: the sum doubles them
			for _, s := range streams { // the memory of this unit is in use as long as that of the others
				if _, err := u.Grads(s, 0); err != nil {
					return err
				}
			}
			for k := len(unitLens) - 1; k >= 0; k-- {
				for _, s := range streams {
					ps, err := u.Use(s, k)
					if err != nil {
						return err
					}
					gs, err := u.Grads(s, k)
					if err != nil {
						return err
					}
					for j := range ps {
						if err := memory.Copy(s, gs[j], ps[j]); err != nil {
							return err
						}
					}
					if err := errors.Join(u.Ready(s, k), u.Done(s, k)); err != nil {
						return err
					}
				}
			}
			if err := u.Finish(streams...); err != nil {
				return err
			}
			for i, s := range streams {
				grads, param := u.ShardGrads(i), u.Shard(i)
				for j, p := range u.Pieces(i) {
					to, err := tensor.Of(param.Slice(p.At, p.At+p.Len), p.Len)
					if err := errors.Join(err, tensor.Copy(s, to, grads[j])); err != nil {
						return err
					}
				}
			}
			return u.Refresh(streams...)
		}
		require.NoError(t, step())
		require.NoError(t, streams[0].WaitStream(streams[1]))
		exec, err := graph.Capture(streams, step, nil)
		require.NoError(t, err)
		defer exec.Close()
		for range 3 {
			require.NoError(t, exec.Launch(streams[0]))
		}
		require.NoError(t, streams[1].WaitStream(streams[0]))
		require.NoError(t, u.Refresh(streams...))
		require.NoError(t, step())
		require.NoError(t, streams[0].WaitStream(streams[1]))
		require.NoError(t, exec.Launch(streams[0])) // its memory is still there
		require.NoError(t, streams[1].WaitStream(streams[0]))
		require.NoError(t, u.Refresh(streams...))
		for k := range x.want {
			for j := range x.want[k] {
				for e := range x.want[k][j] {
					x.want[k][j][e] *= 64
				}
			}
		}
		refresh, err := graph.Capture(streams, func() error { return u.Refresh(streams...) }, nil)
		require.NoError(t, err)
		require.NoError(t, refresh.Close())
		pass := func() error {
			for k := len(unitLens) - 1; k >= 0; k-- {
				for _, s := range streams {
					if _, err := u.Grads(s, k); err != nil {
						return err
					}
					if err := u.Ready(s, k); err != nil {
						return err
					}
				}
			}
			return u.Finish(streams...)
		}
		require.NoError(t, pass())
		_, err = graph.Capture(streams, func() error { return u.Refresh(streams...) }, nil)
		require.ErrorContains(t, err, "unit 0 on rank 0: its gradients were reduced outside of the capture: call Refresh before it begins")
		require.NoError(t, u.Refresh(streams...))
		for i := range streams {
			require.Nil(t, u.ShardGrads(i))
		}
		x.forward() // gathers and keeps the last unit
		_, err = graph.Capture(streams, func() error { _, err := u.Use(streams[0], 3); return err }, nil)
		require.ErrorContains(t, err, "unit 3 on rank 0 was gathered outside of the capture")
	})
}

// A graph may use the memory of gradients that an eager pass has allocated, so its capture frees none of that.
func TestUnitsInAGraphAfterAccumulation(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		x := newSharding(t, g, nil, 5, sameFloat, sameFloat)
		u, s := x.u, x.streams[0]
		pass := func() error {
			for k := len(unitLens) - 1; k >= 0; k-- {
				if _, err := u.Grads(s, k); err != nil {
					return err
				}
				if err := u.Ready(s, k); err != nil {
					return err
				}
			}
			return errors.Join(u.Finish(s), u.Refresh(s))
		}
		for k := range unitLens { // all units have gradients at the same time
			_, err := u.Grads(s, k)
			require.NoError(t, err)
		}
		require.NoError(t, pass())
		exec, err := graph.Capture(x.streams, pass, nil)
		require.NoError(t, err)
		defer exec.Close()
		require.NoError(t, exec.Launch(s))
		require.NoError(t, s.Sync(testgpu.Context(t)))
	})
}

func TestUnitsErrors(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		for _, c := range []struct {
			units [][]int
			cfg   ddp.UnitsConfig
			want  string
		}{
			{nil, ddp.UnitsConfig{}, "want one or more"},
			{[][]int{{4}, {}}, ddp.UnitsConfig{}, "unit 1 has no parameters"},
			{[][]int{{4}, {-1}}, ddp.UnitsConfig{}, "none negative"},
			{[][]int{{math.MaxInt}}, ddp.UnitsConfig{}, "no memory has as many"},
			{[][]int{{4}}, ddp.UnitsConfig{Prefetch: new(-1)}, "a prefetch of -1 units: want 0 or more"},
			{[][]int{{4}}, ddp.UnitsConfig{Keep: []int{1}}, "unit 1 is to be kept, and there are 1 units"},
			{[][]int{{4}}, ddp.UnitsConfig{Reduce: memory.Float16}, "reduced in float16: want bfloat16 or float32"},
			{[][]int{{4}}, ddp.UnitsConfig{Replicas: []*comm.Group{g}}, "1 groups of replicas: want one for each of the 2 local ranks"},
			{[][]int{{4}}, ddp.UnitsConfig{Replicas: []*comm.Group{g, g}}, "a group with 2 local ranks"},
			{[][]int{{4}}, ddp.UnitsConfig{Replicas: []*comm.Group{nil, g}}, "no group given"},
		} {
			_, err := ddp.NewUnits[float32, memory.BFloat16Bits](g, c.units, &c.cfg)
			require.ErrorContains(t, err, c.want)
		}
		_, err := ddp.NewUnits[int32, float32](g, unitLens, nil)
		require.ErrorContains(t, err, "a master copy of int32 and parameters of float32")

		u, err := ddp.NewUnits[float32, float32](g, unitLens, &ddp.UnitsConfig{Keep: []int{3}})
		require.NoError(t, err)
		s := newStreams(t, g)
		_, err = u.Use(s[0], 4)
		require.ErrorContains(t, err, "unit 4 of 4 does not exist")
		require.ErrorContains(t, u.Done(s[0], 0), "unit 0 on rank 0 is not in use: call Use before")
		require.ErrorContains(t, u.Ready(s[1], 2), "unit 2 on rank 1 has no gradients: call Grads before")
		use := func(i, k int) {
			_, err := u.Use(s[i], k)
			require.NoError(t, err)
		}
		use(0, 0)
		_, err = u.Use(s[0], 0)
		require.ErrorContains(t, err, "unit 0 on rank 0 is in use already: call Done between two uses")
		require.ErrorContains(t, u.Refresh(s...), "unit 0 of 4 on rank 0 is in use: call Done before the parameters change")
		require.NoError(t, u.Done(s[0], 0))
		_, err = u.Use(s[0], 0)
		require.ErrorContains(t, err, "unit 0 must be gathered again for rank 0, and rank 1 has not called Done")
		use(1, 0)
		require.NoError(t, u.Done(s[1], 0))
		require.ErrorContains(t, u.Finish(s...), "no unit has become ready since the last step")

		// The units that are not ready count as zeros.
		for i := range s {
			gs, err := u.Grads(s[i], 2)
			require.NoError(t, err)
			for _, x := range gs {
				require.NoError(t, x.CopyFrom(s[i], slicesOf(x.Len(), 3)))
			}
			_, err = u.Grads(s[i], 0)
			require.NoError(t, err)
		}
		require.NoError(t, u.Ready(s[0], 2))
		_, err = u.Grads(s[0], 2)
		require.ErrorContains(t, err, "unit 2 on rank 0 was ready already in this pass: call Finish before the next one")
		require.ErrorContains(t, u.Ready(s[0], 2), "unit 2 was ready already in this step")
		require.ErrorContains(t, u.Finish(s...), "on rank 0 units 0, 1, 3 of 4 are not ready; on rank 1 units 0 to 3 of 4 are not ready: every unit must be")
		for i := range s {
			h := shardGrads(t, u, i, s[i])
			for _, p := range u.Pieces(i) {
				want := float32(0)
				if p.Unit == 2 {
					want = 1.5
				}
				require.Equal(t, want, h[p.At], "unit %d", p.Unit)
			}
		}
		require.ErrorContains(t, u.Finish(s[0], s[0]), "want one for each local rank")
		require.ErrorIs(t, u.Refresh(s[0]), comm.ErrMismatch)
		use(1, 1)
		_, err = u.Grads(s[1], 1)
		require.NoError(t, err)
		require.NoError(t, u.Close())
		require.NoError(t, u.Close())
		_, err = u.Use(s[0], 0)
		require.ErrorIs(t, err, device.ErrClosed)
		_, err = u.Grads(s[0], 0)
		require.ErrorIs(t, err, device.ErrClosed)
		for _, err := range []error{u.Done(s[0], 0), u.Ready(s[0], 0), u.Finish(s...), u.Refresh(s...)} {
			require.ErrorIs(t, err, device.ErrClosed)
		}
	})
}

func slicesOf(n int, x float32) []float32 {
	h := make([]float32, n)
	for e := range h {
		h[e] = x
	}
	return h
}

// All pieces of all ranks are the parameters, each element once.
func TestPiecesOfUnits(t *testing.T) {
	for _, ranks := range []int{1, 3, 5} {
		g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: ranks}))
		u, err := ddp.NewUnits[float32, memory.Float16Bits](g, unitLens, nil)
		require.NoError(t, err)
		seen := map[[3]int]bool{}
		for i := range ranks {
			end := 0
			for _, p := range u.Pieces(i) {
				require.GreaterOrEqual(t, p.At, end)
				end = p.At + p.Len
				for e := range p.Len {
					at := [3]int{p.Unit, p.Param, p.Start + e}
					require.False(t, seen[at], "%v", at)
					seen[at] = true
				}
			}
			require.LessOrEqual(t, end, u.Len())
		}
		require.Len(t, seen, unitTotal)
		require.NoError(t, u.Close())
	}
}

// A gather that fails breaks the group: every call returns an error, and Close works.
func TestUnitsAfterAFault(t *testing.T) {
	devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclAllGather#3=ncclInternalError"}).Devices()
	g := local(t, devs)
	streams := newStreams(t, g)
	u, err := ddp.NewUnits[float32, float32](g, unitLens, &ddp.UnitsConfig{Prefetch: new(0)})
	require.NoError(t, err)
	_, err = u.Use(streams[0], 0)
	require.NoError(t, err)
	_, err = u.Use(streams[0], 1)
	require.ErrorContains(t, err, "gather unit 1 on rank 0")
	_, err = u.Use(streams[0], 2)
	require.Error(t, err)
	require.NoError(t, u.Done(streams[0], 0))
	_, err = u.Grads(streams[0], 3)
	require.NoError(t, err)
	for _, err := range []error{u.Ready(streams[0], 3), u.Finish(streams...), u.Refresh(streams...)} {
		require.ErrorIs(t, err, comm.ErrBroken)
	}
	require.NoError(t, u.Close())
}

// A rank that leaves in the middle of a pass is an error on the others, which can close.
func TestUnitsOfALostRank(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	for rank, err := range processes(t, devs, func(g *comm.Group) error {
		s := g.Stream(0)
		u, err := ddp.NewUnits[float32, float32](g, unitLens, &ddp.UnitsConfig{Prefetch: new(0)})
		if err != nil {
			return err
		}
		if _, err := u.Use(s, 0); err != nil {
			return err
		}
		waited := g.Wait(testgpu.Context(t))
		if g.Rank() == 1 {
			return errors.Join(waited, u.Done(s, 0), g.Close(), u.Close())
		}
		if _, err = u.Use(s, 1); err == nil { // the others may still wait for the first gather when rank 1 leaves
			err = g.Wait(testgpu.Context(t))
		}
		_, used := u.Use(s, 2)
		if err == nil || !errors.Is(used, comm.ErrBroken) || u.Refresh(s) == nil {
			return fmt.Errorf("the gather: %v; the next use: %v", err, used)
		}
		return u.Close()
	}) {
		require.NoError(t, err, "rank %d", rank)
	}
}
