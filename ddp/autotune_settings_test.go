package ddp_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// Empty lists are the default, the configured value alone is one setting, and settings that are the same are tried once.
func TestAutotuneSettings(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}))
	steps := func(settings int) int { return 3 + 2*settings*2 }
	grads := separateGrads(t, g, 20) // of 400 bytes
	for _, x := range []struct {
		bytes, prefetch []int
		settings        int
	}{
		{nil, nil, 3}, {[]int{}, []int{}, 3}, {[]int{1600}, nil, 1}, {[]int{400}, nil, 2},
	} {
		r, err := ddp.NewReducer(g, grads, &ddp.ReducerConfig{BucketBytes: 1600, Autotune: &ddp.Autotune{BucketBytes: x.bytes, Prefetch: x.prefetch, Steps: 1}})
		require.NoError(t, err)
		require.Equal(t, steps(x.settings), r.TrialSteps(), "%+v", x)
		require.NoError(t, r.Close())
	}
	for _, x := range []struct {
		units           int
		prefetch, bytes []int
		settings        int
	}{
		{3, nil, nil, 2}, {3, []int{}, []int{}, 2}, {3, []int{1}, nil, 1}, {3, []int{0, 2, 3, 9}, nil, 3},
		{1, nil, nil, 1}, {2, nil, nil, 1}, {1, []int{0, 5}, nil, 1}, {2, []int{0, 5}, nil, 2},
	} {
		lens := make([][]int, x.units)
		for k := range lens {
			lens[k] = []int{4}
		}
		u, err := ddp.NewUnits[float32, float32](g, lens, &ddp.UnitsConfig{Autotune: &ddp.Autotune{BucketBytes: x.bytes, Prefetch: x.prefetch, Steps: 1}})
		require.NoError(t, err)
		require.Equal(t, steps(x.settings), u.TrialSteps(), "%+v", x)
		require.NoError(t, u.Close())
	}
	for _, n := range []int{1, 1000} {
		r, err := ddp.NewReducer(g, grads, &ddp.ReducerConfig{Autotune: &ddp.Autotune{Steps: n}})
		require.NoError(t, err)
		require.NoError(t, r.Close())
	}
}
