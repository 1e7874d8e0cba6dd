package comm_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// A normRun has the operands of an AllReduceNorm on the local ranks of a group.
type normRun struct {
	g                        *comm.Group
	rows, cols               int
	x, residual, weight, out comm.Shards[float32]
	small                    comm.Shards[memory.Float8E4M3Bits]
	scale                    comm.Shards[float32]
}

const normEps, normScale = 1e-5, 0.25

func normX(rank, i int) float32  { return float32((i*7+rank*13)%17) - 8 }
func normResidual(i int) float32 { return float32((i*5)%11) / 4 }
func normWeight(col int) float32 { return 1 + float32(col%3)/2 }

func newNormRun(g *comm.Group, rows, cols int) (*normRun, error) {
	r := &normRun{g: g, rows: rows, cols: cols}
	var errs [6]error
	r.x, errs[0] = comm.Make[float32](g, rows*cols)
	r.residual, errs[1] = comm.Make[float32](g, rows*cols)
	r.weight, errs[2] = comm.Make[float32](g, cols)
	r.out, errs[3] = comm.Make[float32](g, rows*cols)
	r.small, errs[4] = comm.Make[memory.Float8E4M3Bits](g, rows*cols)
	r.scale, errs[5] = comm.Make[float32](g, 1)
	return r, errors.Join(errs[:]...)
}

// begin sets the operands.
func (r *normRun) begin() error {
	var errs []error
	for i := range r.x {
		s, n := r.g.Stream(i), r.rows*r.cols
		x, residual, weight := make([]float32, n), make([]float32, n), make([]float32, r.cols)
		for k := range x {
			x[k], residual[k] = normX(r.g.Rank()+i, k), normResidual(k)
		}
		for k := range weight {
			weight[k] = normWeight(k)
		}
		errs = append(errs, r.x[i].CopyFrom(s, x), r.residual[i].CopyFrom(s, residual), r.weight[i].CopyFrom(s, weight),
			r.out[i].Zero(s), r.small[i].Zero(s), r.scale[i].CopyFrom(s, []float32{normScale}))
	}
	return errors.Join(errs...)
}

// check compares the results with a reference in float64.
func (r *normRun) check(small bool) error {
	n := r.rows * r.cols
	for i := range r.x {
		sums, out, out8 := make([]float32, n), make([]float32, n), make([]memory.Float8E4M3Bits, n)
		s := r.g.Stream(i)
		if err := errors.Join(r.residual[i].CopyTo(s, sums), r.out[i].CopyTo(s, out), r.small[i].CopyTo(s, out8)); err != nil {
			return err
		}
		for row := range r.rows {
			want, squares := make([]float64, r.cols), 0.0
			for col := range want {
				at := row*r.cols + col
				want[col] = float64(normResidual(at))
				for rank := range r.g.Size() {
					want[col] += float64(normX(rank, at))
				}
				if float64(sums[at]) != want[col] { // small multiples of 1/4, so the sum is exact
					return fmt.Errorf("rank %d: the residual of row %d, column %d is %g: want %g", i, row, col, sums[at], want[col])
				}
				squares += want[col] * want[col]
			}
			for col := range want {
				at := row*r.cols + col
				y := want[col] / math.Sqrt(squares/float64(r.cols)+normEps) * float64(normWeight(col))
				have, bound := float64(out[at]), math.Abs(y)*1e-5
				if small {
					y /= normScale
					have, bound = float64(out8[at].Float32()), math.Abs(y)/15+1e-3
				}
				if math.Abs(have-y) > bound {
					return fmt.Errorf("rank %d: row %d, column %d is %g: want %g", i, row, col, have, y)
				}
			}
		}
	}
	return nil
}

func (r *normRun) close() error {
	return errors.Join(r.x.Close(), r.residual.Close(), r.weight.Close(), r.out.Close(), r.small.Close(), r.scale.Close())
}

// runAllReduceNorm runs one shape, with both types of outputs, eagerly and captured if the group has all ranks.
func runAllReduceNorm(t *testing.T, g *comm.Group, rows, cols int) error {
	r, err := newNormRun(g, rows, cols)
	if err != nil {
		return err
	}
	defer r.close()
	for _, small := range []bool{false, true} {
		call := func() error {
			if small {
				return comm.AllReduceNorm(g, r.small, r.residual, r.x, r.weight, &comm.NormConfig{Eps: normEps, Scale: r.scale})
			}
			return comm.AllReduceNorm(g, r.out, r.residual, r.x, r.weight, &comm.NormConfig{Eps: normEps})
		}
		if err := errors.Join(r.begin(), call(), g.Wait(testgpu.Context(t)), r.check(small)); err != nil {
			return err
		}
		exec, err := graph.Capture(g.Streams(), call, nil)
		if err != nil {
			return err
		}
		for range 2 {
			if err := errors.Join(r.begin(), g.Wait(testgpu.Context(t)), exec.Launch(g.Stream(0)), g.Wait(testgpu.Context(t)), r.check(small)); err != nil {
				return errors.Join(err, exec.Close())
			}
		}
		if err := exec.Close(); err != nil {
			return err
		}
	}
	return nil
}

// TestAllReduceNorm checks all strategies, with sizes that a Chorus kernel supports and one that
// it does not.
func TestAllReduceNorm(t *testing.T) {
	rng := seededPCG(t)(0)
	for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.OneShot, comm.TwoShotPackets, comm.Windows} {
		ranks := 2 + rng.IntN(3)
		t.Run(fmt.Sprint(s, "/", ranks), func(t *testing.T) {
			testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
				g := groupBy(t, devs, comm.Config{Strategy: s})
				require.NoError(t, runAllReduceNorm(t, g, 1+rng.IntN(6), 2*(1+rng.IntN(200))))
			})
		})
	}
	t.Run("too large", func(t *testing.T) {
		g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), comm.Config{Strategy: comm.OwnKernels})
		require.NoError(t, runAllReduceNorm(t, g, 600, 1024))
	})
	t.Run("deterministic", func(t *testing.T) {
		g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), comm.Config{Strategy: comm.OwnKernels, Deterministic: &comm.Order{}})
		require.NoError(t, runAllReduceNorm(t, g, 3, 100))
	})
	t.Run("one rank", func(t *testing.T) {
		require.NoError(t, runAllReduceNorm(t, local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})), 3, 100))
	})
	t.Run("joined", func(t *testing.T) {
		t.Setenv(env.CommStrategy.Name, "own")
		gs := joined(t, t.Context(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}))
		groups.Each(t, gs, func(i int, g *comm.Group) error { return runAllReduceNorm(t, g, 4, 50) })
	})
}

// TestAllReduceNormIsFused checks that no all-reduce in place runs before the norm.
func TestAllReduceNormIsFused(t *testing.T) {
	g := localOwn(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), nil)
	r, err := newNormRun(g, 2, 8)
	require.NoError(t, err)
	defer r.close()
	require.NoError(t, errors.Join(r.begin(), comm.AllReduceNorm(g, r.out, r.residual, r.x, r.weight, nil), g.Wait(testgpu.Context(t))))
	for i, x := range r.x {
		got := make([]float32, x.Len())
		require.NoError(t, x.CopyTo(g.Stream(i), got))
		for k, v := range got {
			require.Equal(t, normX(i, k), v, "the input is not reduced in place")
		}
	}
}

// TestAllReduceNormRefuses checks arguments: the group stays usable.
func TestAllReduceNormRefuses(t *testing.T) {
	g := localOwn(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), nil)
	r, err := newNormRun(g, 4, 8)
	require.NoError(t, err)
	defer r.close()
	part := func(xs comm.Shards[float32], n int) comm.Shards[float32] {
		return comm.Shards[float32]{xs[0].Slice(0, n), xs[1].Slice(0, n)}
	}
	integers, err := comm.Make[int32](g, 32)
	require.NoError(t, err)
	defer integers.Close()
	for want, err := range map[string]error{
		"want rows as long as the weight":      comm.AllReduceNorm(g, r.out, r.residual, r.x, part(r.weight, 5), nil),
		"the residual 24":                      comm.AllReduceNorm(g, r.out, part(r.residual, 24), r.x, r.weight, nil),
		"want a multiple of 2":                 comm.AllReduceNorm(g, part(r.out, 21), part(r.residual, 21), part(r.x, 21), part(r.weight, 7), nil),
		"1 slices for 2 local ranks":           comm.AllReduceNorm(g, r.out[:1], r.residual, r.x, r.weight, nil),
		"without a scale":                      comm.AllReduceNorm(g, r.small, r.residual, r.x, r.weight, nil),
		"there is a scale, and the output has": comm.AllReduceNorm(g, r.out, r.residual, r.x, r.weight, &comm.NormConfig{Scale: r.scale}),
		"the scale has 8 numbers":              comm.AllReduceNorm(g, r.small, r.residual, r.x, r.weight, &comm.NormConfig{Scale: r.weight}),
		"overlap":                              comm.AllReduceNorm(g, r.residual, r.residual, r.x, r.weight, nil),
		"eps is -1":                            comm.AllReduceNorm(g, r.out, r.residual, r.x, r.weight, &comm.NormConfig{Eps: -1}),
		"int32":                                comm.AllReduceNorm(g, integers, integers, integers, integers, nil),
	} {
		require.ErrorContains(t, err, want)
		require.ErrorIs(t, err, comm.ErrMismatch)
	}
	require.NoError(t, comm.AllReduceNorm(g, part(r.out, 0), part(r.residual, 0), part(r.x, 0), r.weight, nil))
	require.NoError(t, runAllReduceNorm(t, g, 2, 8))
}

// TestAllReduceNormRefusesOverlap checks each pair of operands with each strategy: an all-reduce of x in place would change a
// weight or a scale that lies in x. Only out may be x.
func TestAllReduceNormRefusesOverlap(t *testing.T) {
	for _, strategy := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
		t.Run(string(strategy), func(t *testing.T) {
			g := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), comm.Config{Strategy: strategy})
			r, err := newNormRun(g, 4, 8)
			require.NoError(t, err)
			defer r.close()
			require.NoError(t, r.begin())
			part := func(xs comm.Shards[float32], from, to int) comm.Shards[float32] {
				return comm.Shards[float32]{xs[0].Slice(from, to), xs[1].Slice(from, to)}
			}
			scaled := func(residual, x, weight, scale comm.Shards[float32]) error {
				return comm.AllReduceNorm(g, r.small, residual, x, weight, &comm.NormConfig{Scale: scale})
			}
			for want, err := range map[string]error{
				"the input and the weight":    comm.AllReduceNorm(g, r.out, r.residual, r.x, part(r.x, 24, 32), nil),
				"the input and the residual":  comm.AllReduceNorm(g, r.out, r.x, r.x, r.weight, nil),
				"the input and the output":    comm.AllReduceNorm(g, part(r.x, 8, 24), part(r.residual, 0, 16), part(r.x, 0, 16), r.weight, nil),
				"the input and the scale":     scaled(r.residual, r.x, r.weight, part(r.x, 3, 4)),
				"the weight and the residual": comm.AllReduceNorm(g, r.out, r.residual, r.x, part(r.residual, 8, 16), nil),
				"the weight and the output":   comm.AllReduceNorm(g, r.out, r.residual, r.x, part(r.out, 8, 16), nil),
				"the residual and the output": comm.AllReduceNorm(g, r.residual, r.residual, r.x, r.weight, nil),
				"the residual and the scale":  scaled(r.residual, r.x, r.weight, part(r.residual, 31, 32)),
			} {
				require.ErrorContains(t, err, want+" overlap")
				require.ErrorIs(t, err, comm.ErrMismatch)
			}
			require.NoError(t, comm.AllReduceNorm(g, r.x, r.residual, r.x, r.weight, nil), "in place")
			require.NoError(t, g.Wait(testgpu.Context(t)))
		})
	}
}

// Ranks that mix the one kernel with an all-reduce, or give other options, get an error that has both operations.
func TestAllReduceNormMixed(t *testing.T) {
	const rows, cols = 4, 64
	norm := func(g *comm.Group, r *normRun, weight comm.Shards[float32], eps float32) error {
		return comm.AllReduceNorm(g, r.out, r.residual, r.x, weight, &comm.NormConfig{Eps: eps})
	}
	for text, other := range map[string]func(g *comm.Group, r *normRun) error{
		"ncclAllReduce(256 x float32, sum)":                      func(g *comm.Group, r *normRun) error { return comm.AllReduce(g, comm.Sum, r.x...) },
		"AllReduceNorm(256 x float32, sum, rows of 64, eps 0.5)": func(g *comm.Group, r *normRun) error { return norm(g, r, r.weight, 0.5) },
		"AllReduceNorm(256 x float32, sum, rows of 32, eps 0)": func(g *comm.Group, r *normRun) error {
			return norm(g, r, comm.Shards[float32]{r.weight[0].Slice(0, 32)}, 0)
		},
		"AllReduceNorm(256 x float32 in float8_e4m3fn, sum, rows of 64, eps 0)": func(g *comm.Group, r *normRun) error {
			return comm.AllReduceNorm(g, r.small, r.residual, r.x, r.weight, &comm.NormConfig{Scale: r.scale})
		},
	} {
		t.Run(text, func(t *testing.T) {
			testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
				errs := joinDevices(t, cut(devs, 1, 1), &comm.Config{Strategy: comm.OwnKernels, NCCL: &nccl.Config{Timeout: 20 * time.Second}}, func(ctx context.Context, g *comm.Group) error {
					r, err := newNormRun(g, rows, cols)
					if err != nil {
						return err
					}
					if err = r.begin(); err == nil && g.Rank() == 1 {
						err = other(g, r)
					} else if err == nil {
						err = norm(g, r, r.weight, 0)
					}
					return errors.Join(err, g.Wait(ctx), r.close())
				})
				requireMismatch(t, errs, "AllReduceNorm(256 x float32, sum, rows of 64, eps 0) as collective", text+" as collective")
			})
		})
	}
}
