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
	"github.com/gochorus/chorus/memory"
)

// Gradients that are reduced in a 16-bit type have the values of a sum in which
// each number is divided and rounded to that type first, and the sum again.
func TestCompressedGradients(t *testing.T) {
	round := map[memory.DType]func(float32) float32{
		memory.Float16:  func(x float32) float32 { return memory.Float16Of(x).Float32() },
		memory.BFloat16: func(x float32) float32 { return memory.BFloat16Of(x).Float32() },
	}
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		seed := rand.Uint64()
		t.Logf("seed %d", seed)
		for wire, to := range round {
			for _, flat := range []bool{true, false} {
				for _, op := range []comm.Op{comm.Avg, comm.Sum, comm.Max} {
					t.Run(fmt.Sprintf("%v/flat=%v/%v", wire, flat, op), func(t *testing.T) {
						r := rand.New(rand.NewPCG(seed, 1))
						n := []int{1, 777, 5}
						xs, hs := floatGrads(t, g, r, flat, n)
						red, err := ddp.NewReducer(g, xs, &ddp.ReducerConfig{Compress: wire, Op: &op})
						require.NoError(t, err)
						defer red.Close()
						reduceAll(t, g, red, len(n))
						for i := range xs {
							for j := range n {
								h := read(t, g, i, xs[i][j])
								for k := range h {
									want := reduced(op, to, hs[0][j][k], hs[1][j][k])
									if h[k] != want {
										t.Fatalf("rank %d gradient %d element %d: %v: want %v of %v and %v", i, j, k, h[k], want, hs[0][j][k], hs[1][j][k])
									}
								}
							}
						}
					})
				}
			}
		}
	})
}

func reduced(op comm.Op, round func(float32) float32, a, b float32) float32 {
	switch op {
	case comm.Avg:
		return round(round(a/2) + round(b/2))
	case comm.Sum:
		return round(round(a) + round(b))
	}
	return max(round(a), round(b))
}

// floatGrads allocates random gradients on the group's streams.
func floatGrads(t *testing.T, g *comm.Group, r *rand.Rand, flat bool, lens []int) (xs [][]memory.Slice[float32], hs [][][]float32) {
	t.Helper()
	for i := range g.Locals() {
		var parts []memory.Slice[float32]
		if flat {
			whole, ps, err := memory.MakeFlat[float32](g.Stream(i), lens...)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, whole.Close()) })
			require.NoError(t, whole.Zero(g.Stream(i)))
			parts = ps
		}
		var values [][]float32
		for j, n := range lens {
			h := make([]float32, n)
			for k := range h {
				h[k] = float32(r.NormFloat64())
			}
			if !flat {
				x, err := memory.Make[float32](g.Stream(i), n)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, x.Close()) })
				parts = append(parts, x)
			}
			require.NoError(t, parts[j].CopyFrom(g.Stream(i), h))
			values = append(values, h)
		}
		xs, hs = append(xs, parts), append(hs, values)
	}
	return xs, hs
}

func reduceAll(t *testing.T, g *comm.Group, red *ddp.Reducer, n int) {
	t.Helper()
	for i := range g.Locals() {
		for j := n - 1; j >= 0; j-- {
			require.NoError(t, red.Ready(g.Stream(i), j))
		}
	}
	require.NoError(t, red.Finish(g.Streams()...))
}

// The mean of large numbers is in the range of a float16, and their sum is not.
func TestCompressedMeanStaysInRange(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		var xs [][]memory.Slice[float64]
		for i := range devs {
			x, err := memory.MakeFrom(g.Stream(i), []float64{60000, -48000, 1})
			require.NoError(t, err)
			defer x.Close()
			xs = append(xs, []memory.Slice[float64]{x})
		}
		red, err := ddp.NewReducer(g, xs, &ddp.ReducerConfig{Compress: memory.Float16})
		require.NoError(t, err)
		defer red.Close()
		reduceAll(t, g, red, 1)
		for i := range devs {
			h := make([]float64, 3)
			require.NoError(t, xs[i][0].CopyTo(g.Stream(i), h))
			require.Equal(t, []float64{60000, -48000, 1}, h, "rank %d", i)
		}
	})
}

func TestReducerConfigErrors(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	g := local(t, devs)
	x, err := memory.Make[float32](g.Stream(0), 4)
	require.NoError(t, err)
	defer x.Close()
	h, err := memory.Make[memory.Float16Bits](g.Stream(0), 4)
	require.NoError(t, err)
	defer h.Close()
	n, err := memory.Make[int32](g.Stream(0), 4)
	require.NoError(t, err)
	defer n.Close()
	for want, err := range map[string]error{
		"want memory.Float16 or memory.BFloat16":   refused(g, &ddp.ReducerConfig{Compress: memory.Float8E4M3}, x),
		"gradients of float16 reduced in bfloat16": refused(g, &ddp.ReducerConfig{Compress: memory.BFloat16}, h),
		"a factor of another type":                 refused(g, &ddp.ReducerConfig{Compress: memory.BFloat16, Op: new(comm.Op(5))}, x),
		"max with unused gradients":                refused(g, &ddp.ReducerConfig{FindUnused: true, Op: new(comm.Max)}, x),
		"prod with unused gradients":               refused(g, &ddp.ReducerConfig{StaticGraph: true, Op: new(comm.Prod)}, x),
		"unused gradients of int32":                refused(g, &ddp.ReducerConfig{FindUnused: true, Op: new(comm.Sum)}, n),
	} {
		require.ErrorContains(t, err, want)
	}
	require.NoError(t, refused(g, &ddp.ReducerConfig{Compress: memory.Float16}, h), "which is no compression")
}

func refused[T memory.Element](g *comm.Group, cfg *ddp.ReducerConfig, x memory.Slice[T]) error {
	red, err := ddp.NewReducer(g, [][]memory.Slice[T]{{x}}, cfg)
	if err != nil {
		return err
	}
	return red.Close()
}

// A step with a missing gradient and a NaN leaves nothing that the next step is blamed for.
func TestVerifyForgetsAFailedStep(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		m, red := powerModel(t, g, memory.Float32, &ddp.ReducerConfig{Verify: true}, []int{2}, []int{3})
		s := g.Stream(0)
		write(t, g, 0, m.grads[0][1], []float64{1, math.NaN(), 1})
		require.NoError(t, red.Ready(s, 1))
		require.ErrorContains(t, red.Finish(s), "gradient 0 of 2 is not ready")
		write(t, g, 0, m.grads[0][1], []float64{1, 1, 1})
		reduceAll(t, g, red, 2)
	})
}
