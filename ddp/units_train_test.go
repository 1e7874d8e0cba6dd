package ddp_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// The model of TestUnitsTrain: layers y = x*w + b, elementwise, for rows of inputs and targets.
const (
	trainLayers, trainWidth, trainRows, trainSteps = 4, 61, 4, 5
	trainRate, trainMomentum, trainClip            = 0.05, 0.9, 2.
)

// trainValue is a number of the model: of a layer's w or b, or of a row's inputs or targets.
type trainValue func(kind, index, e int) float64

func trainData(seed uint64) trainValue {
	return func(kind, index, e int) float64 {
		r := rand.New(rand.NewPCG(seed, uint64(kind<<20|index<<10|e)))
		x := float64(float32(r.Float64()*2 - 1))
		if kind == 0 {
			x = float64(float32(1 + x/4))
		}
		return x
	}
}

// trainReference trains in float64, and returns the parameters.
func trainReference(data trainValue) (params [trainLayers][2][trainWidth]float64) {
	var momenta, grads [trainLayers][2][trainWidth]float64
	for l := range params {
		for e := range trainWidth {
			params[l][0][e], params[l][1][e] = data(0, l, e), data(1, l, e)
		}
	}
	for range trainSteps {
		clear(grads[:])
		norm := 0.
		for e := range trainWidth {
			for row := range trainRows {
				var h [trainLayers + 1]float64
				h[0] = data(2, row, e)
				for l := range params {
					h[l+1] = h[l]*params[l][0][e] + params[l][1][e]
				}
				d := h[trainLayers] - data(3, row, e)
				for l := trainLayers - 1; l >= 0; l-- {
					grads[l][0][e] += d * h[l]
					grads[l][1][e] += d
					d *= params[l][0][e]
				}
			}
			for l := range grads {
				norm += grads[l][0][e]*grads[l][0][e] + grads[l][1][e]*grads[l][1][e]
			}
		}
		factor := min(1, trainClip/(math.Sqrt(norm)+1e-6))
		for l := range params {
			for j := range params[l] {
				for e := range trainWidth {
					momenta[l][j][e] = trainMomentum*momenta[l][j][e] + factor*grads[l][j][e]
					params[l][j][e] -= trainRate * momenta[l][j][e]
				}
			}
		}
	}
	return params
}

// trainKernel returns an elementwise kernel of float32 inputs.
func trainKernel(t *testing.T, code string, f func(in []float64) float64, inputs ...string) func(s *stream.Stream, out memory.Slice[float32], in ...memory.Slice[float32]) {
	k, err := kernel.NewElementwise(code, &kernel.ElementwiseConfig{Inputs: inputs, Floats: func(in, out []float64) { out[0] = f(in) }})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, k.Close()) })
	return func(s *stream.Stream, out memory.Slice[float32], in ...memory.Slice[float32]) {
		ops := []kernel.Operand{kernel.Out(out)}
		for _, x := range in {
			ops = append(ops, kernel.In(x))
		}
		require.NoError(t, k.Launch(s, ops...))
	}
}

// trainUnits trains on the devices without a wait of the host, and returns the rank's parameters by
// Pieces. Each rank has some of the rows, whose gradients add up in Grads.
func trainUnits(t *testing.T, g *comm.Group, data trainValue) (all [][]float32, pieces [][]ddp.Piece) {
	forward := trainKernel(t, "x * w + b", func(in []float64) float64 { return in[0]*in[1] + in[2] }, "x", "w", "b")
	loss := trainKernel(t, "y - t", func(in []float64) float64 { return in[0] - in[1] }, "y", "t")
	backW := trainKernel(t, "g + d * x", func(in []float64) float64 { return in[0] + in[1]*in[2] }, "g", "d", "x")
	backB := trainKernel(t, "g + d", func(in []float64) float64 { return in[0] + in[1] }, "g", "d")
	backX := trainKernel(t, "d * w", func(in []float64) float64 { return in[0] * in[1] }, "d", "w")
	lens := make([][]int, trainLayers)
	for l := range lens {
		lens[l] = []int{trainWidth, trainWidth}
	}
	u, err := ddp.NewUnits[float32, float32](g, lens, &ddp.UnitsConfig{Op: new(comm.Sum), Keep: []int{trainLayers - 1}})
	require.NoError(t, err)
	defer u.Close()
	streams := newStreams(t, g)
	opts, grads := make([]*optim.Optimizer, g.Locals()), make([]*optim.Grads, g.Locals())
	acts := make([][trainRows][trainLayers + 2]memory.Slice[float32], g.Locals()) // activations, and the targets
	for i, s := range streams {
		require.NoError(t, s.WaitStream(g.Stream(i)))
		x := u.Shard(i)
		var params []optim.Param
		for _, p := range u.Pieces(i) {
			h := make([]float32, p.Len)
			for e := range h {
				h[e] = float32(data(p.Param, p.Unit, p.Start+e))
			}
			to := x.Slice(p.At, p.At+p.Len)
			require.NoError(t, to.CopyFrom(s, h))
			params = append(params, optim.Of(to, memory.Slice[float32]{}))
		}
		opts[i], err = optim.NewSGD(s, []optim.Group{{Params: params}}, &optim.SGDConfig{LR: trainRate, Momentum: trainMomentum})
		require.NoError(t, err)
		defer opts[i].Close()
		grads[i], err = opts[i].Grads(s)
		require.NoError(t, err)
		defer grads[i].Close()
		for row := range trainRows {
			for l := range acts[i][row] {
				acts[i][row][l], err = memory.Make[float32](s, trainWidth)
				require.NoError(t, err)
				defer acts[i][row][l].Close()
			}
			for kind, l := range map[int]int{2: 0, 3: trainLayers + 1} {
				h := make([]float32, trainWidth)
				for e := range h {
					h[e] = float32(data(kind, row, e))
				}
				require.NoError(t, acts[i][row][l].CopyFrom(s, h))
			}
		}
	}
	require.NoError(t, u.Refresh(streams...))
	eachRow := func(i int, f func(x *[trainLayers + 2]memory.Slice[float32])) {
		for row := g.Communicator(i).Rank(); row < trainRows; row += g.Size() {
			f(&acts[i][row])
		}
	}
	for range trainSteps {
		for l := range trainLayers {
			for i, s := range streams {
				ps, err := u.Use(s, l)
				require.NoError(t, err)
				eachRow(i, func(x *[trainLayers + 2]memory.Slice[float32]) { forward(s, x[l+1], x[l], ps[0], ps[1]) })
				require.NoError(t, u.Done(s, l))
			}
		}
		for i, s := range streams {
			eachRow(i, func(x *[trainLayers + 2]memory.Slice[float32]) {
				loss(s, x[trainLayers], x[trainLayers], x[trainLayers+1])
			})
		}
		for l := trainLayers - 1; l >= 0; l-- {
			for i, s := range streams {
				ps, err := u.Use(s, l)
				require.NoError(t, err)
				gs, err := u.Grads(s, l)
				require.NoError(t, err)
				eachRow(i, func(x *[trainLayers + 2]memory.Slice[float32]) { // the gradient replaces the activation
					backW(s, gs[0], gs[0], x[l+1], x[l])
					backB(s, gs[1], gs[1], x[l+1])
					if l > 0 {
						backX(s, x[l], x[l+1], ps[0])
					}
				})
				require.NoError(t, u.Ready(s, l))
				require.NoError(t, u.Done(s, l))
			}
		}
		require.NoError(t, u.Finish(streams...))
		for i, s := range streams {
			require.NoError(t, opts[i].SetGradients(s, u.ShardGrads(i)...))
		}
		require.NoError(t, ddp.Powers(g, 2, grads, streams))
		for i, s := range streams {
			_, factor, err := grads[i].Coef(s, trainClip)
			require.NoError(t, err)
			require.NoError(t, opts[i].Step(s, &optim.StepConfig{Clip: factor}))
		}
		require.NoError(t, u.Refresh(streams...))
	}
	for i, s := range streams {
		h := make([]float32, u.Len())
		require.NoError(t, u.Shard(i).CopyTo(s, h))
		all, pieces = append(all, h), append(pieces, u.Pieces(i))
	}
	return all, pieces
}

// A training with clipping has the parameters of one in float64, on any number of ranks.
func TestUnitsTrain(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	data := trainData(seed)
	want := trainReference(data)
	// Numbers are below 8, and fewer than 64 roundings of a step reach a parameter, which momentum
	// multiplies by at most 10.
	const bound = trainSteps * 64 * 10 * trainRate * 8 * 0x1p-24
	check := func(t *testing.T, all [][]float32, pieces [][]ddp.Piece) (n int) {
		for i := range all {
			for _, p := range pieces[i] {
				for e := range p.Len {
					n++
					require.InDelta(t, want[p.Unit][p.Param][p.Start+e], all[i][p.At+e], bound, "unit %d parameter %d element %d", p.Unit, p.Param, p.Start+e)
				}
			}
		}
		return n
	}
	for _, ranks := range []int{1, 2, 4} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
				all, pieces := trainUnits(t, local(t, devs), data)
				require.Equal(t, 2*trainLayers*trainWidth, check(t, all, pieces))
			})
		})
	}
	t.Run("processes", func(t *testing.T) {
		testgpu.Each(t, 4, func(t *testing.T, devs []*device.Device) {
			counts := make([]int, 4)
			for _, err := range processes(t, devs[:4], func(g *comm.Group) error {
				all, pieces := trainUnits(t, g, data)
				counts[g.Rank()] = check(t, all, pieces)
				return nil
			}) {
				require.NoError(t, err)
			}
			require.Equal(t, 2*trainLayers*trainWidth, counts[0]+counts[1]+counts[2]+counts[3])
		})
	})
}

// The program of the doc of Units works on ranks that have no piece.
func TestUnitsWithoutPieces(t *testing.T) {
	g, err := comm.Local(testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4}), nil)
	require.NoError(t, err)
	defer g.Close()
	u, err := ddp.NewUnits[float32, float32](g, [][]int{{1}, {2}}, nil)
	require.NoError(t, err)
	defer u.Close()
	opts, grads := make([]*optim.Optimizer, g.Locals()), make([]*optim.Grads, g.Locals())
	empty := 0
	for i, s := range g.Streams() {
		var params []optim.Param
		for _, p := range u.Pieces(i) {
			params = append(params, optim.Of(u.Shard(i).Slice(p.At, p.At+p.Len), memory.Slice[float32]{}))
		}
		if params == nil {
			empty++
		}
		opts[i], err = optim.NewAdamW(s, []optim.Group{{Params: params}}, &optim.AdamConfig{LR: 0.5})
		require.NoError(t, err)
		defer opts[i].Close()
		grads[i], err = opts[i].Grads(s)
		require.NoError(t, err)
		defer grads[i].Close()
	}
	require.Equal(t, 3, empty, "ranks without a piece")
	for range 2 {
		for k := 1; k >= 0; k-- {
			for _, s := range g.Streams() {
				_, err := u.Use(s, k)
				require.NoError(t, err)
				gs, err := u.Grads(s, k)
				require.NoError(t, err)
				require.NoError(t, gs[0].CopyFrom(s, []float32{1, 2}[:gs[0].Len()]))
				require.NoError(t, u.Ready(s, k))
				require.NoError(t, u.Done(s, k))
			}
		}
		require.NoError(t, u.Finish(g.Streams()...))
		for i, s := range g.Streams() {
			require.NoError(t, opts[i].SetGradients(s, u.ShardGrads(i)...))
		}
		require.NoError(t, ddp.Powers(g, 2, grads, g.Streams()))
		for i, s := range g.Streams() {
			_, factor, err := grads[i].Coef(s, 1)
			require.NoError(t, err)
			require.NoError(t, opts[i].Step(s, &optim.StepConfig{Clip: factor}))
		}
		require.NoError(t, u.Refresh(g.Streams()...))
	}
	ps, err := u.Use(g.Stream(3), 1)
	require.NoError(t, err)
	got := make([]float32, 2)
	require.NoError(t, ps[0].CopyTo(g.Stream(3), got))
	require.InDeltaSlice(t, []float32{-1, -1}, got, 0.01, "two steps of Adam by the rate")
	require.NoError(t, g.Wait(testgpu.Context(t)))
}
