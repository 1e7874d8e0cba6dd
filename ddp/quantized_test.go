package ddp_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// Gradients of all types are reduced within the errors of the format, and their bits are the same on all ranks.
func TestQuantized(t *testing.T) {
	seed := seedOf(t)
	for ranks := 1; ranks <= 4; ranks++ {
		for _, x := range []memory.DType{memory.Float16, memory.BFloat16, memory.Float32, memory.Float64} {
			for _, format := range []memory.DType{0, memory.Int8} {
				t.Run(fmt.Sprint(ranks, "/", x, "/", format), func(t *testing.T) {
					r := rand.New(rand.NewPCG(seed, uint64(ranks)))
					g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: ranks}))
					m, red := powerModel(t, g, x, &ddp.ReducerConfig{Hook: &ddp.Quantized{Format: format}}, []int{7}, []int{40, 33}, []int{1 + r.IntN(900)})
					for range 3 {
						m.fill(t, r, []bool{true, true, true, true}[:ranks])
						reduceAll(t, g, red, 3)
						for j := range m.types {
							first := m.read(t, 0, j)
							for i := 1; i < ranks; i++ {
								require.Equal(t, first, m.read(t, i, j), "rank %d", i)
							}
							for k, have := range first {
								want, most := 0.0, 0.0
								for i := range ranks {
									want += m.values[i][j][k] / float64(ranks)
									most = max(most, math.Abs(m.values[i][j][k]))
								}
								bound := 0.6 // of elements up to 5, with the errors of a step before
								switch {
								case x == memory.Float64:
									bound = 1e-12
								case ranks == 1:
									bound = 1e-6
								case format == memory.Int8:
									bound = 0.15
								}
								require.InDelta(t, want, have, bound)
							}
						}
					}
				})
			}
		}
	}
}

// A bucket of bfloat16 is one operation, which sends 8-bit numbers.
func TestQuantizedSends8Bits(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	_, red := powerModel(t, g, memory.BFloat16, &ddp.ReducerConfig{Hook: &ddp.Quantized{}}, []int{64, 64})
	before := len(g.Communicator(0).Trace())
	reduceAll(t, g, red, 1)
	list := g.Communicator(0).Trace()[before:]
	require.Len(t, list, 1)
	require.Contains(t, list[0].String(), "AllReduceQuantized(4096 x bfloat16 in float8_e4m3fn, sum) as collective")
}

// A training whose gradients are smaller than the rounding errors beside a large one stands still without
// error feedback, and converges with it.
func TestQuantizedConvergesByFeedback(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for format, scale := range map[memory.DType]float64{memory.Int8: 1e-3, memory.Float8E4M3: 1e-6} {
			for _, feedback := range []bool{false, true} {
				g := local(t, devs)
				const n, rate = 2048, 0.02
				m, red := powerModel(t, g, memory.Float32, &ddp.ReducerConfig{Hook: &ddp.Quantized{Format: format, NoErrorFeedback: !feedback}}, []int{n})
				weights := make([]float64, n)
				target := func(k int) float64 { return 2 + float64(k%7)/7 }
				for range 300 {
					h := make([]float64, n)
					for k := range h {
						if h[k] = scale * (weights[k] - target(k)); k%32 == 0 {
							h[k] = 1 // the large gradient of each block, of a weight that is not trained
						}
					}
					for i := range devs {
						write(t, g, i, m.grads[i][0], h)
					}
					reduceAll(t, g, red, 1)
					for k, x := range m.read(t, 0, 0) {
						if k%32 != 0 {
							weights[k] -= rate * x / scale
						}
					}
				}
				far := 0.0
				for k := range weights {
					if k%32 != 0 {
						far = max(far, math.Abs(weights[k]-target(k)))
					}
				}
				if feedback {
					require.Less(t, far, 0.5, format)
				} else {
					require.Greater(t, far, 1.9, format)
				}
				require.NoError(t, red.Close())
			}
		}
	})
}

// A graph can capture a step after the first one. Its errors go on with those of other steps.
func TestQuantizedInAGraph(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		var results [2][][]float64
		for captured := range results {
			g := local(t, devs)
			m, red := powerModel(t, g, memory.BFloat16, &ddp.ReducerConfig{Hook: &ddp.Quantized{}}, []int{50}, []int{1000})
			r := rand.New(rand.NewPCG(1, 1))
			m.fill(t, r, []bool{true, true})
			reduceAll(t, g, red, 2)
			step := func() error {
				for i := range devs {
					for j := range 2 {
						if err := red.Ready(g.Stream(i), j); err != nil {
							return err
						}
					}
				}
				return red.Finish(g.Streams()...)
			}
			run := step
			if captured == 1 {
				exec, err := graph.Capture(g.Streams(), step, nil)
				require.NoError(t, err)
				defer exec.Close()
				run = func() error {
					return errors.Join(g.Stream(0).WaitStream(g.Stream(1)), exec.Launch(g.Stream(0)), g.Stream(1).WaitStream(g.Stream(0)))
				}
			}
			for range 3 {
				m.fill(t, r, []bool{true, true})
				require.NoError(t, errors.Join(run(), g.Wait(testgpu.Context(t))))
				results[captured] = append(results[captured], m.read(t, 0, 0), m.read(t, 1, 1))
			}
		}
		require.Equal(t, results[0], results[1])
	})
}

// A NaN on one rank is a NaN of its block on all ranks in that step only.
func TestQuantizedNaN(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	m, red := powerModel(t, g, memory.Float32, &ddp.ReducerConfig{Hook: &ddp.Quantized{}}, []int{2048})
	for step := range 3 {
		for i := range 2 {
			h := make([]float64, 2048)
			for k := range h {
				h[k] = 0.3
			}
			if step == 1 && i == 0 {
				h[40], h[2000] = math.NaN(), math.Inf(1)
			}
			write(t, g, i, m.grads[i][0], h)
		}
		reduceAll(t, g, red, 1)
		for i := range 2 {
			for k, x := range m.read(t, i, 0) {
				if block := k / 32; step == 1 && (block == 40/32 || block == 2000/32) {
					require.True(t, math.IsNaN(x), "rank %d, element %d", i, k)
				} else {
					require.InDelta(t, 0.3, x, 0.06, "rank %d, element %d, step %d", i, k, step)
				}
			}
		}
	}
}

func TestQuantizedRefuses(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	m := &model{g: g, shapes: [][]int{{4}}, types: []memory.DType{memory.Float32}}
	for i := range 2 {
		m.grads = append(m.grads, m.allocate(t, i, nil))
	}
	_, err := ddp.NewReducer(g, m.grads, &ddp.ReducerConfig{Hook: (*ddp.Quantized)(nil)})
	require.ErrorContains(t, err, "the hook is a nil *Quantized")
	_, err = ddp.NewReducer(g, m.grads, &ddp.ReducerConfig{Hook: &ddp.Quantized{Format: memory.Float8E5M2}})
	require.ErrorContains(t, err, "Quantized in float8_e5m2: want float8_e4m3fn or int8")
	_, err = ddp.NewReducer(g, m.grads, &ddp.ReducerConfig{Hook: &ddp.Quantized{}, Op: new(comm.Max)})
	require.ErrorContains(t, err, "by a hook: want sum or avg")
}
