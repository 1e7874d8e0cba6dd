package main

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// The losses are those of the layer in float64 without ranks, on any number of ranks.
func TestLosses(t *testing.T) {
	const steps = 12
	want := reference(steps)
	require.Less(t, want[steps-1], 0.7*want[0], "the layer learns")
	for _, ranks := range []int{1, 2, 4, 8} {
		t.Run(fmt.Sprintf("ranks=%d", ranks), func(t *testing.T) {
			testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
				gs, errs := groups.Join(t, testgpu.Context(t), devs[:ranks])
				require.NoError(t, errors.Join(errs...))
				got := make([][]float32, ranks)
				var wg sync.WaitGroup
				for i, g := range gs {
					wg.Go(func() { got[i], errs[i] = train(testgpu.Context(t), g, steps) })
				}
				wg.Wait()
				require.NoError(t, errors.Join(errs...))
				for rank := range ranks {
					for i := range want {
						require.InEpsilon(t, want[i], got[rank][i], 1e-4, "loss of step %d on rank %d", i, rank)
					}
				}
			})
		})
	}
}

func TestRanksThatDoNotDivide(t *testing.T) {
	g, err := comm.Local(t.Context(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), nil)
	require.NoError(t, err)
	defer g.Close()
	_, err = train(t.Context(), g, 1)
	require.ErrorContains(t, err, "8 experts for 3 ranks")
}

// reference trains the layer token by token.
func reference(steps int) (losses []float64) {
	wide := func(list []float32) (out []float64) {
		for _, x := range list {
			out = append(out, float64(x))
		}
		return out
	}
	x32, minusWant32, router32, up32, down32 := data()
	x, minusWant, router, up, down := wide(x32), wide(minusWant32), wide(router32), wide(up32), wide(down32)
	for range steps {
		loss := 0.0
		drouter, dup, ddown := make([]float64, len(router)), make([]float64, len(up)), make([]float64, len(down))
		for t := range tokens {
			in := x[t*width : (t+1)*width]
			scores := make([]float64, experts)
			for e := range experts {
				for i, v := range in {
					scores[e] += v * router[i*experts+e]
				}
			}
			order := []int{0, 1, 2, 3, 4, 5, 6, 7}
			slices.SortStableFunc(order, func(a, b int) int { return int(math.Copysign(1, scores[b]-scores[a])) })
			chosen := order[:choices]
			p := 1 / (1 + math.Exp(scores[chosen[1]]-scores[chosen[0]]))
			gates := []float64{p, 1 - p}
			h, out := make([][]float64, choices), make([][]float64, choices)
			y := make([]float64, width)
			for k, e := range chosen {
				h[k], out[k] = make([]float64, hidden), make([]float64, width)
				for j := range hidden {
					for i, v := range in {
						h[k][j] += v * up[(e*width+i)*hidden+j]
					}
					h[k][j] = max(0, h[k][j])
					for i := range width {
						out[k][i] += h[k][j] * down[(e*hidden+j)*width+i]
					}
				}
				for i := range width {
					y[i] += gates[k] * out[k][i]
				}
			}
			dx := make([]float64, width)
			dy, dgates := make([]float64, width), make([]float64, choices)
			for i := range dy {
				d := y[i] + minusWant[t*width+i]
				loss += d * d / (2 * tokens * width)
				dy[i] = d / (tokens * width)
			}
			for k, e := range chosen {
				for i := range width {
					dgates[k] += dy[i] * out[k][i]
				}
				for j := range hidden {
					dh := 0.0
					for i := range width {
						dh += gates[k] * dy[i] * down[(e*hidden+j)*width+i]
						ddown[(e*hidden+j)*width+i] += h[k][j] * gates[k] * dy[i]
					}
					if h[k][j] > 0 {
						for i, v := range in {
							dup[(e*width+i)*hidden+j] += v * dh
							dx[i] += up[(e*width+i)*hidden+j] * dh
						}
					}
				}
			}
			d := p * (1 - p) * (dgates[0] - dgates[1])
			for i, v := range in {
				drouter[i*experts+chosen[0]] += v * d
				drouter[i*experts+chosen[1]] -= v * d
				dx[i] += d * (router[i*experts+chosen[0]] - router[i*experts+chosen[1]])
			}
			for i := range in { // no other token uses it
				in[i] -= rate * dx[i]
			}
		}
		losses = append(losses, loss)
		for _, u := range []struct{ w, d []float64 }{{router, drouter}, {up, dup}, {down, ddown}} {
			for i := range u.w {
				u.w[i] -= rate * u.d[i]
			}
		}
	}
	return losses
}
