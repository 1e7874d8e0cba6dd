package rng_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// A parameter that shares memory with the filled slice is an error that names both, unless each
// thread reads an element before it writes the same element.
func TestParametersShareNoMemory(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	g := rng.New(s.Device(), 1)
	x, wide := upload(t, s, make([]float32, 8)...), upload(t, s, make([]float64, 8)...)
	long, err := memory.View[int64](wide.Buffer(), 0, 8)
	require.NoError(t, err)
	half, err := memory.View[memory.Float16Bits](x.Buffer(), 0, 8)
	require.NoError(t, err)
	flags, err := memory.View[bool](x.Buffer(), 0, 8)
	require.NoError(t, err)
	separate, same := "want separate memory", "want the same elements of the same size, or separate memory"
	for name, c := range map[string]struct {
		err               error
		parameter, advice string
	}{
		"normal, mean is x":              {rng.Normal(g, s, x, x, 1), "mean", separate},
		"normal, std is x":               {rng.Normal(g, s, x, 0, x), "std", separate},
		"normal, one mean in x":          {rng.Normal(g, s, x, x.Slice(7, 8), 1), "mean", separate},
		"normal, std overlaps":           {rng.Normal(g, s, x.Slice(1, 5), 0, x.Slice(0, 4)), "std", separate},
		"poisson, one rate in x":         {rng.Poisson(g, s, x, x.Slice(0, 1)), "rate", same},
		"poisson, the last one in x":     {rng.Poisson(g, s, x, x.Slice(7, 8)), "rate", same},
		"poisson, rates before x":        {rng.Poisson(g, s, x.Slice(1, 5), x.Slice(0, 4)), "rate", same},
		"poisson, rates behind x":        {rng.Poisson(g, s, x.Slice(0, 4), x.Slice(3, 7)), "rate", same},
		"poisson, smaller rates in x":    {rng.Poisson(g, s, x, half), "rate", same},
		"bernoulli, one p in x":          {rng.Bernoulli(g, s, x, x.Slice(2, 3)), "p", same},
		"bernoulli, p before x":          {rng.Bernoulli(g, s, x.Slice(1, 5), x.Slice(0, 4)), "p", same},
		"bernoulli, bool over p":         {rng.Bernoulli(g, s, flags, x), "p", same},
		"multinomial, with replacement":  {rng.Multinomial(g, s, long.Slice(0, 2), wide, 4, true), "weights", separate},
		"multinomial, one sample":        {rng.Multinomial(g, s, long.Slice(7, 8), wide, 8, false), "weights", separate},
		"multinomial, all permuted":      {rng.Multinomial(g, s, long, wide, 8, false), "weights", separate},
		"multinomial, half of the bytes": {rng.Multinomial(g, s, long.Slice(0, 1), wide, 8, true), "weights", separate},
	} {
		require.ErrorContains(t, c.err, ": "+c.parameter+" (", name)
		require.ErrorContains(t, c.err, " and the filled slice (", name)
		require.ErrorContains(t, c.err, " share memory: "+c.advice, name)
	}
	require.Zero(t, g.Offset(), "a refused fill draws nothing")
	require.NoError(t, rng.Poisson(g, s, x.Slice(0, 4), x.Slice(4, 8)), "neighbours")
	require.NoError(t, rng.Poisson(g, s, x.Slice(4, 8), x.Slice(0, 4)), "neighbours")
	require.NoError(t, rng.Normal(g, s, x.Slice(0, 4), x.Slice(4, 8), x.Slice(4, 8)), "mean is std")
}

// Poisson and Bernoulli read a parameter before they overwrite it.
func TestFillsInPlace(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		for n := range 40 {
			params := make([]float32, n)
			for i := range params {
				params[i] = float32(i%7) / 6
			}
			inPlace(t, s, func(x, p memory.Slice[float32]) error { return rng.Poisson(rng.New(devs[0], 6), s, x, p) }, params)
			inPlace(t, s, func(x, p memory.Slice[float32]) error { return rng.Bernoulli(rng.New(devs[0], 6), s, x, p) }, params)
		}
		p := upload(t, s, 0.5, 0.5, 0.5)
		whole, err := memory.View[int64](p.Buffer(), 0, 3)
		require.NoError(t, err)
		want := fetch(t, s, 3, func(x memory.Slice[int64]) error { return rng.Bernoulli(rng.New(devs[0], 6), s, x, p) })
		require.NoError(t, rng.Bernoulli(rng.New(devs[0], 6), s, whole, p))
		got := make([]int64, 3)
		require.NoError(t, whole.CopyTo(s, got))
		require.Equal(t, want, got)
	})
}

// inPlace compares a fill in place with a fill of other memory.
func inPlace(t *testing.T, s *stream.Stream, fill func(x, p memory.Slice[float32]) error, params []float32) {
	t.Helper()
	p := upload(t, s, params...)
	want := fetch(t, s, len(params), func(x memory.Slice[float32]) error { return fill(x, p) })
	got := make([]float32, len(params))
	require.NoError(t, fill(p, p))
	require.NoError(t, p.CopyTo(s, got))
	require.Equal(t, want, got)
}

// Bernoulli rounds a limit of float64 to float32, unless the elements are of float64.
func TestBernoulliRoundsLimits(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		var limits []float64 // a little below the numbers that Bernoulli draws
		for _, w := range rng.Words(5, 0, 0, 0) {
			limits = append(limits, float64(rng.Unit32(w))*(1-0x1p-27))
		}
		p := upload(t, s, limits...)
		require.Equal(t, []float32{1, 1, 1, 1}, fetch(t, s, 4, func(x memory.Slice[float32]) error { return rng.Bernoulli(rng.New(devs[0], 5), s, x, p) }))
		require.Equal(t, []float64{0, 0, 0, 0}, fetch(t, s, 4, func(x memory.Slice[float64]) error { return rng.Bernoulli(rng.New(devs[0], 5), s, x, p) }))
	})
}

// The samples of a row with replacement begin at the next block of 128 threads, as in torch:
// equal rows continue the samples of one row.
func TestMultinomialRowsInBlocks(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		weights := upload(t, s, 1., 1, 1, 1, 1, 1, 1, 1)
		sample := func(n, columns int) []int64 {
			return fetch(t, s, n, func(x memory.Slice[int64]) error {
				return rng.Multinomial(rng.New(devs[0], 7), s, x, weights.Slice(0, columns), 4, true)
			})
		}
		one := sample(400, 4)
		for samples, next := range map[int]int{5: 128, 127: 128, 128: 128, 129: 256} {
			two := sample(2*samples, 8)
			require.Equal(t, one[:samples], two[:samples], "%d samples", samples)
			require.Equal(t, one[next:next+samples], two[samples:], "%d samples", samples)
		}
	})
}
