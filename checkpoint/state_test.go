package checkpoint_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A sharded is a model whose parameters, gradients and optimiser a Sharder has cut. The optimiser
// of a rank has a parameter for each piece of its shard.
type sharded struct {
	g    *comm.Group
	sh   *ddp.Sharder[float32]
	opts []*optim.Optimizer
	lens []int
}

func newSharded(t *testing.T, devs []*device.Device, lens []int, bucket int) *sharded {
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	m := &sharded{g: g, lens: lens}
	m.sh, err = ddp.NewSharder[float32](g, lens, &ddp.ShardConfig{BucketBytes: bucket, FirstBucketBytes: bucket})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.sh.Close()) })
	for i := range g.Locals() {
		var list []optim.Param
		for _, p := range m.sh.Pieces(i) {
			to := p.Start + p.Len
			list = append(list, optim.Of(m.sh.Params(i)[p.Param].Slice(p.Start, to), m.sh.Grads(i)[p.Param].Slice(p.Start, to)))
		}
		if len(list) == 0 {
			m.opts = append(m.opts, nil)
			continue
		}
		o, err := optim.NewAdamW(g.Stream(i), []optim.Group{{Params: list}}, nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, o.Close()) })
		m.opts = append(m.opts, o)
	}
	return m
}

// parts returns the state of the local ranks: whole parameters, and pieces of gradients and of the
// optimiser's state.
func (m *sharded) parts(t *testing.T) [][]checkpoint.Part {
	of := func(x tensor.Tensor, err error) tensor.Tensor {
		require.NoError(t, err)
		return x
	}
	all := make([][]checkpoint.Part, m.g.Locals())
	for i := range all {
		for j, x := range m.sh.Params(i) {
			if x.Len() > 0 {
				all[i] = append(all[i], checkpoint.Part{Name: fmt.Sprint("param.", j), Data: of(tensor.Of(x, x.Len()))})
			}
		}
		states := m.opts[i].State()
		for k, p := range m.sh.Pieces(i) {
			run := checkpoint.Part{Shape: []int{m.lens[p.Param]}, Start: p.Start, Flat: true}
			run.Name, run.Data = fmt.Sprint("grad.", p.Param), of(tensor.Of(m.sh.Grads(i)[p.Param].Slice(p.Start, p.Start+p.Len), p.Len))
			all[i] = append(all[i], run)
			for key, x := range states[k].All() {
				if run.Data = x; x.Dims() == 0 {
					all[i] = append(all[i], checkpoint.Part{Name: fmt.Sprintf("state.%d.%s", p.Param, key), Data: x})
					continue
				}
				run.Name = fmt.Sprintf("state.%d.%s", p.Param, key)
				all[i] = append(all[i], run)
			}
		}
	}
	return all
}

// wholes returns the values of all tensors, put together from the parts of all ranks.
func wholes(t *testing.T, g *comm.Group, parts [][]checkpoint.Part) map[string][]float32 {
	all := map[string][]float32{}
	for i, list := range parts {
		for _, p := range list {
			n := p.Data.Len()
			if p.Flat {
				n = p.Shape[0]
			}
			if all[p.Name] == nil {
				all[p.Name] = make([]float32, n)
			}
			x, err := tensor.Slice[float32](p.Data)
			require.NoError(t, err)
			require.NoError(t, x.CopyTo(g.Stream(i), all[p.Name][p.Start:p.Start+x.Len()]))
		}
	}
	return all
}

// train does steps with random gradients, the same on any number of ranks.
func (m *sharded) train(t *testing.T, seed uint64, steps int) {
	r := rand.New(rand.NewPCG(seed, 9))
	streams := m.g.Streams()
	for range steps {
		for j := len(m.lens) - 1; j >= 0; j-- {
			grad := make([]float32, m.lens[j])
			for k := range grad {
				grad[k] = float32(r.NormFloat64())
			}
			for i, s := range streams {
				require.NoError(t, m.sh.Grads(i)[j].CopyFrom(s, grad))
				require.NoError(t, m.sh.Ready(s, j))
			}
		}
		require.NoError(t, m.sh.Finish(streams...))
		for i, s := range streams {
			if m.opts[i] != nil {
				require.NoError(t, m.opts[i].Step(s, nil))
			}
		}
		require.NoError(t, m.sh.AllGather(streams...))
	}
}

// TestTrainingOnAnotherNumberOfRanks saves a sharded training, restores it on another number of
// ranks with other buckets, and goes on: the values are those of the undisturbed training.
func TestTrainingOnAnotherNumberOfRanks(t *testing.T) {
	for _, x := range [][2]int{{1, 3}, {3, 2}, {2, 16}, {16, 1}} {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("seed=%d,%d to %d", seed, x[0], x[1]), func(t *testing.T) {
			testgpu.Each(t, max(x[0], x[1]), func(t *testing.T, devs []*device.Device) {
				r := rand.New(rand.NewPCG(seed, 8))
				lens := []int{0, 1}
				for range 5 {
					lens = append(lens, 1+r.IntN(700))
				}
				from, folder := newSharded(t, devs[:x[0]], lens, 1<<(6+r.IntN(6))), t.TempDir()
				from.train(t, seed, 2)
				saveNow(t, from.g, folder, from.parts(t), from.g.Streams())
				to := newSharded(t, devs[:x[1]], lens, 1<<(6+r.IntN(6)))
				saved, _, err := checkpoint.Latest(t.Context(), to.g, folder)
				require.NoError(t, err)
				defer saved.Close()
				res, err := saved.Restore(t.Context(), to.g, to.parts(t), nil)
				require.NoError(t, err)
				require.Empty(t, res.Unused)
				require.Equal(t, wholes(t, from.g, from.parts(t)), wholes(t, to.g, to.parts(t)))
				from.train(t, seed+1, 2)
				to.train(t, seed+1, 2)
				want, got := wholes(t, from.g, from.parts(t)), wholes(t, to.g, to.parts(t))
				require.Len(t, got, len(want))
				for name := range want { // the mean of equal gradients depends on their number
					require.InDeltaSlice(t, want[name], got[name], 1e-5, name)
				}
				require.Equal(t, float32(4), got["state.1.step"][0])
			})
		})
	}
}

func saveNow(t *testing.T, g *comm.Group, folder string, parts [][]checkpoint.Part, streams []*stream.Stream) {
	v, err := checkpoint.NewSaver(t.Context(), g, folder, parts, nil)
	require.NoError(t, err)
	require.NoError(t, v.Save(t.Context(), 2, streams))
	require.NoError(t, v.Close())
}

// A training with ddp.Units is saved on 4 ranks and goes on with the same values on 2, which have other shards.
func TestUnitsOnAnotherNumberOfRanks(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
		lens := [][]int{{701, 3}, {1}, {257, 64, 0}}
		from, folder := newUnits(t, devs, lens), t.TempDir()
		from.train(t, seed, 2)
		saveNow(t, from.g, folder, from.parts(t), from.g.Streams())
		to := newUnits(t, devs[:2], lens)
		saved, _, err := checkpoint.Latest(t.Context(), to.g, folder)
		require.NoError(t, err)
		defer saved.Close()
		res, err := saved.Restore(t.Context(), to.g, to.parts(t), nil)
		require.NoError(t, err)
		require.Empty(t, res.Unused)
		require.NoError(t, to.u.Refresh(to.g.Streams()...))
		require.Equal(t, wholes(t, from.g, from.parts(t)), wholes(t, to.g, to.parts(t)))
		from.train(t, seed+1, 2)
		to.train(t, seed+1, 2)
		want := wholes(t, from.g, from.parts(t))
		require.Len(t, want, 5*3)
		require.Equal(t, want, wholes(t, to.g, to.parts(t)), "sums of small whole numbers are exact")
	})
}

// A unitTraining is a model of units. The optimiser of a rank has a parameter for each piece.
type unitTraining struct {
	g    *comm.Group
	u    *ddp.Units[float32, float32]
	lens [][]int
	opts []*optim.Optimizer
}

func newUnits(t *testing.T, devs []*device.Device, lens [][]int) *unitTraining {
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	m := &unitTraining{g: g, lens: lens}
	m.u, err = ddp.NewUnits[float32, float32](g, lens, &ddp.UnitsConfig{Op: new(comm.Sum)})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.u.Close()) })
	for i := range g.Locals() {
		var list []optim.Param
		for _, p := range m.u.Pieces(i) {
			list = append(list, optim.Of(m.u.Shard(i).Slice(p.At, p.At+p.Len), memory.Slice[float32]{}))
		}
		o, err := optim.NewSGD(g.Stream(i), []optim.Group{{Params: list}}, &optim.SGDConfig{Momentum: 0.5})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, o.Close()) })
		m.opts = append(m.opts, o)
	}
	return m
}

// parts returns the pieces of parameters and momenta.
func (m *unitTraining) parts(t *testing.T) [][]checkpoint.Part {
	all := make([][]checkpoint.Part, m.g.Locals())
	for i := range all {
		x, states := m.u.Shard(i), m.opts[i].State()
		for n, p := range m.u.Pieces(i) {
			add := func(kind string, data tensor.Tensor, err error) {
				require.NoError(t, err)
				all[i] = append(all[i], checkpoint.Part{Name: fmt.Sprintf("%s.%d.%d", kind, p.Unit, p.Param), Data: data,
					Shape: []int{m.lens[p.Unit][p.Param]}, Start: p.Start, Flat: true})
			}
			param, err := tensor.Of(x.Slice(p.At, p.At+p.Len), p.Len)
			add("param", param, err)
			for key, state := range states[n].All() {
				if state.Dims() > 0 {
					add(key, state, nil)
				} else {
					all[i] = append(all[i], checkpoint.Part{Name: fmt.Sprintf("%s.%d.%d", key, p.Unit, p.Param), Data: state})
				}
			}
		}
	}
	return all
}

// train does steps with random gradients of rank 0, so that their sum is the same for any number of ranks.
func (m *unitTraining) train(t *testing.T, seed uint64, steps int) {
	r, streams := rand.New(rand.NewPCG(seed, 7)), m.g.Streams()
	for range steps {
		for k := len(m.lens) - 1; k >= 0; k-- {
			for i, s := range streams {
				grads, err := m.u.Grads(s, k)
				require.NoError(t, err)
				for _, x := range grads {
					if i > 0 {
						continue
					}
					h := make([]float32, x.Len())
					for e := range h {
						h[e] = float32(r.IntN(65) - 32)
					}
					require.NoError(t, x.CopyFrom(s, h))
				}
				require.NoError(t, m.u.Ready(s, k))
			}
		}
		require.NoError(t, m.u.Finish(streams...))
		for i, s := range streams {
			require.NoError(t, m.opts[i].SetGradients(s, m.u.ShardGrads(i)...))
			require.NoError(t, m.opts[i].Step(s, nil))
		}
		require.NoError(t, m.u.Refresh(streams...))
	}
}
