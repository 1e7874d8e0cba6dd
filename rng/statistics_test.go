package rng_test

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// samples is how many elements the tests below look at, and sigmas how many
// standard deviations of its own a statistic may be off. The seeds are fixed, so
// that a test that passes does so for ever; a correct generator fails one in
// 16000 statistics at a new seed.
const (
	samples = 100_003
	sigmas  = 4
)

// moments checks mean and variance against a distribution whose fourth central
// moment is kurtosis times the squared variance.
func moments(t *testing.T, xs []float64, mean, variance, kurtosis float64) {
	t.Helper()
	n, sum, squares := float64(len(xs)), 0.0, 0.0
	for _, x := range xs {
		sum += x
	}
	for _, x := range xs {
		squares += (x - mean) * (x - mean)
	}
	require.InDelta(t, mean, sum/n, sigmas*math.Sqrt(variance/n), "mean")
	require.InDelta(t, variance, squares/n, sigmas*variance*math.Sqrt((kurtosis-1)/n), "variance")
}

// shape checks the whole distribution by the test of Kolmogorov and Smirnov: the
// largest distance of the distribution functions exceeds 2.2/sqrt(n) with
// probability 2 exp(-2 2.2^2), one in 8000. step is the distance of values that
// rounding returns one.
func shape(t *testing.T, xs []float64, step float64, cdf func(float64) float64) {
	t.Helper()
	xs = slices.Clone(xs)
	slices.Sort(xs)
	n, worst := float64(len(xs)), 0.0
	for i, x := range xs {
		// Where values are rounded, so is their distribution function.
		lo, hi := cdf(x-step), cdf(x+step)
		worst = max(worst, lo-float64(i+1)/n, float64(i)/n-hi)
	}
	require.Less(t, worst, 2.2/math.Sqrt(n), "the largest distance of the distribution functions")
}

func draw[T memory.Element](t *testing.T, s *stream.Stream, fill func(g *rng.Generator, x memory.Slice[T]) error) []float64 {
	t.Helper()
	g := rng.New(s.Device(), 2024)
	out := make([]float64, samples)
	for i, v := range fetch(t, s, samples, func(x memory.Slice[T]) error { return fill(g, x) }) {
		out[i] = float(v)
	}
	return out
}

func floats[T rng.Float](t *testing.T, s *stream.Stream, epsilon float64) {
	uniform := draw(t, s, func(g *rng.Generator, x memory.Slice[T]) error { return rng.Uniform(g, s, x, -2, 3) })
	moments(t, uniform, 0.5, 25./12, 1.8)
	shape(t, uniform, 3*epsilon, func(x float64) float64 { return min(max((x+2)/5, 0), 1) })
	require.GreaterOrEqual(t, slices.Min(uniform), -2.0)
	require.Less(t, slices.Max(uniform), 3.0)

	gauss := func(x float64) float64 { return math.Erfc((1-x)/2/math.Sqrt2) / 2 } // mean 1, deviation 2
	normal := draw(t, s, func(g *rng.Generator, x memory.Slice[T]) error { return rng.Normal(g, s, x, 1, 2) })
	moments(t, normal, 1, 4, 3)
	shape(t, normal, 8*epsilon, gauss)

	logs := draw(t, s, func(g *rng.Generator, x memory.Slice[T]) error { return rng.LogNormal(g, s, x, 0.25, 0.5) })
	require.Positive(t, slices.Min(logs))
	for i, x := range logs {
		logs[i] = math.Log(x)
	}
	moments(t, logs, 0.25, 0.25, 3)
	shape(t, logs, epsilon, func(x float64) float64 { return gauss((x-0.25)*4 + 1) })

	waits := draw(t, s, func(g *rng.Generator, x memory.Slice[T]) error { return rng.Exponential(g, s, x, 1.5) })
	moments(t, waits, 1/1.5, 1/2.25, 9)
	shape(t, waits, 8*epsilon, func(x float64) float64 { return -math.Expm1(-1.5 * max(x, 0)) })
}

// The fills have the distributions that their names say, whatever torch does.
func TestDistributions(t *testing.T) {
	testhost.Serial(t)
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		t.Run("float32", func(t *testing.T) { floats[float32](t, s, 0x1p-23) })
		t.Run("float64", func(t *testing.T) { floats[float64](t, s, 0x1p-52) })
		t.Run("float16", func(t *testing.T) { floats[memory.Float16Bits](t, s, 0x1p-10) })
		t.Run("bernoulli", func(t *testing.T) {
			const p = 0.3
			xs := draw(t, s, func(g *rng.Generator, x memory.Slice[bool]) error { return rng.Bernoulli(g, s, x, p) })
			moments(t, xs, p, p*(1-p), (1-3*p*(1-p))/(p*(1-p)))
		})
		t.Run("geometric", func(t *testing.T) {
			const p = 0.25
			xs := draw(t, s, func(g *rng.Generator, x memory.Slice[int64]) error { return rng.Geometric(g, s, x, p) })
			moments(t, xs, 1/p, (1-p)/(p*p), 9+p*p/(1-p))
		})
		t.Run("random", func(t *testing.T) {
			xs := draw(t, s, func(g *rng.Generator, x memory.Slice[uint16]) error { return rng.Random(g, s, x) })
			moments(t, xs, 32767.5, (65536.*65536-1)/12, 1.8)
			for i := range xs {
				xs[i] /= 65536
			}
			shape(t, xs, 1./65536, func(x float64) float64 { return min(max(x, 0), 1) })
		})
		t.Run("each value of a range", func(t *testing.T) {
			xs := draw(t, s, func(g *rng.Generator, x memory.Slice[int8]) error { return rng.RandomFromTo(g, s, x, -5, 95) })
			var count [100]float64
			for _, x := range xs {
				count[int(x)+5]++
			}
			chi := 0.0 // its mean is 99 and its variance 198
			for _, c := range count {
				chi += (c - samples/100.) * (c - samples/100.) / (samples / 100.)
			}
			require.InDelta(t, 99, chi, sigmas*math.Sqrt(198))
		})
	})
}

// Neighbours, and elements that one thread draws, have nothing to do with each
// other. The second element of a thread is as normal as the first.
func TestIndependence(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		p, err := devs[0].Properties()
		require.NoError(t, err)
		threads := p.Multiprocessors * p.ThreadsPerMultiproc
		xs := make([]float64, 2*threads)
		for i, x := range fetch(t, s, len(xs), func(x memory.Slice[float32]) error {
			return rng.Normal(rng.New(devs[0], 2024), s, x, 0, 1)
		}) {
			xs[i] = float64(x)
		}
		for _, lag := range []int{1, 2, 32, 256, threads - 1, threads} {
			sum, n := 0.0, len(xs)-lag
			for i := range n {
				sum += xs[i] * xs[i+lag]
			}
			require.InDelta(t, 0, sum/float64(n), sigmas/math.Sqrt(float64(n)), "lag %d", lag)
		}
		moments(t, xs[threads:], 0, 1, 3)
	})
}
