package ddp_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// structured are matrices of low rank whose products have columns that depend on each other
// exactly, which leaves rounding errors in the direction of earlier columns.
var structured = map[string]func(i, j int) float64{
	"equal rows":    func(_, j int) float64 { return float64(j%7) - 2.5 },
	"equal columns": func(i, _ int) float64 { return float64(i%5) + 0.3 },
	"ones":          func(_, _ int) float64 { return 1 },
	"one row": func(i, j int) float64 {
		if i == 3 {
			return float64(j + 1)
		}
		return 0
	},
	"zeros": func(_, _ int) float64 { return 0 },
}

// ofRank returns a random n×m matrix of a rank.
func ofRank(r *rand.Rand, n, m, rank int) []float64 {
	x := make([]float64, n*m)
	for range rank {
		u, v := make([]float64, n), make([]float64, m)
		for i := range u {
			u[i] = r.NormFloat64()
		}
		for j := range v {
			v[j] = r.NormFloat64()
		}
		for k := range x {
			x[k] += u[k/m] * v[k%m]
		}
	}
	return x
}

// A gradient whose rank is at most that of the product is exact in every step, whatever the rank
// and the numbers of the steps before. If the ranks are equal, error feedback enlarges rounding
// errors from step to step when the directions change, so these are tested in float64.
func TestPowerSGDIsExactOfLowRank(t *testing.T) {
	r := rand.New(rand.NewPCG(seedOf(t), 9))
	check := func(rank, steps int, x memory.DType, n, m int, what string, next func() []float64) {
		g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
		hook := &ddp.PowerSGD{Rank: rank, StartStep: -1, Seed: r.Uint64(), NoWarmStart: r.IntN(3) == 0}
		model, red := powerModel(t, g, x, &ddp.ReducerConfig{Hook: hook}, []int{n, m})
		largest := 1.0 // the norm of a gradient; its rounding error is part of the next steps
		for step := range steps {
			want := next()
			largest = max(largest, math.Sqrt(total2(want)))
			for i, list := range model.grads {
				write(t, g, i, list[0], want)
			}
			reduceAll(t, g, red, 1)
			off := 0.0
			for k, y := range model.read(t, 0, 0) {
				off += (y - want[k]) * (y - want[k])
			}
			bound := 1e-6
			if x == memory.Float32 {
				bound = 2e-3
			}
			require.LessOrEqual(t, math.Sqrt(off), bound*largest, "%s of %d×%d %s, %s, step %d", what, n, m, x, hook, step)
		}
	}
	types := []memory.DType{memory.Float32, memory.Float64}
	for rank := 1; rank <= 5; rank++ {
		n, m, x := 30+r.IntN(10), 40+r.IntN(30), types[rank%2]
		check(rank, 6, x, n, m, "random matrices", func() []float64 { return ofRank(r, n, m, r.IntN(rank+rank%2)) })
		for what, value := range structured {
			for _, x := range types {
				check(rank, 4, x, 33, 64, what, func() []float64 {
					h := make([]float64, 33*64)
					for k := range h {
						h[k] = value(k/64, k%64)
					}
					return h
				})
			}
		}
	}
}

// The error of a gradient of any rank does not grow from step to step.
func TestPowerSGDErrorStaysBounded(t *testing.T) {
	r := rand.New(rand.NewPCG(seedOf(t), 10))
	for rank := 2; rank <= 4; rank++ {
		g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}))
		model, red := powerModel(t, g, memory.Float32, &ddp.ReducerConfig{Hook: &ddp.PowerSGD{Rank: rank, StartStep: -1, Seed: r.Uint64()}}, []int{33, 48})
		base, sum := ofRank(r, 33, 48, rank+3), make([]float64, 33*48)
		norm := math.Sqrt(total2(base))
		for step := range 12 {
			write(t, g, 0, model.grads[0][0], base)
			reduceAll(t, g, red, 1)
			for k, y := range model.read(t, 0, 0) {
				sum[k] += base[k] - y
			}
			require.LessOrEqual(t, math.Sqrt(total2(sum)), 12*norm, "rank %d: error after step %d", rank, step)
		}
	}
}

func total2(xs []float64) (sum float64) {
	for _, x := range xs {
		sum += x * x
	}
	return sum
}
