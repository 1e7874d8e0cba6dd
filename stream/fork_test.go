package stream_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// One stream writes what all others read afterwards, and they what it reads: virtual
// devices would say so if a wait was missing.
func TestForkAndJoin(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		others := []*stream.Stream{newStream(t, devs[0]), s, newStream(t, devs[1]), newStream(t, devs[1])}
		able, err := inside.Reach(devs[0], devs[1])
		require.NoError(t, err)
		if !able {
			t.Skip("the devices do not reach each other")
		}
		const n = 1 << 12
		mid := make([]memory.Slice[int32], len(others))
		x, err := memory.Make[int32](s, n)
		require.NoError(t, err)
		defer x.Close()
		for i, o := range others {
			mid[i], err = memory.Make[int32](o, n)
			require.NoError(t, err)
			defer mid[i].Close()
		}
		got, want := make([]int32, n), make([]int32, n)
		for round := range 20 {
			for i := range want {
				want[i] = int32(i * (round + 1))
			}
			require.NoError(t, x.CopyFrom(s, want))
			require.NoError(t, gpu.Fork(s, others))
			for i, o := range others {
				require.NoError(t, memory.Copy(o, mid[i], x))
			}
			require.NoError(t, gpu.Join(s, others))
			for _, m := range mid {
				require.NoError(t, x.Zero(s))
				require.NoError(t, memory.Copy(s, x, m))
				require.NoError(t, x.CopyTo(s, got))
				require.Equal(t, want, got)
			}
		}
	})
}

func TestForkChecks(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	other := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s, far := newStream(t, devs[0]), newStream(t, other[0])
	closed := newStream(t, devs[0])
	require.NoError(t, closed.Close())
	for want, list := range map[string][]*stream.Stream{"no stream given": {nil}, "use after Close": {s, closed}, "another system": {far}} {
		require.ErrorContains(t, gpu.Fork(s, list), want)
		require.ErrorContains(t, gpu.Join(s, list), want)
	}
	require.NoError(t, gpu.Fork(s, []*stream.Stream{s}))
	require.NoError(t, gpu.Join(s, nil))
}
