package ddp_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A step without memory for the factors returns an error, and the next one allocates them.
func TestPowerSGDOutOfMemory(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	m, red := powerModel(t, g, memory.Float32, &ddp.ReducerConfig{Hook: &ddp.PowerSGD{StartStep: -1}}, []int{64, 64})
	ones := make([]float64, 64*64)
	for k := range ones {
		ones[k] = 1
	}
	fill := func() {
		for i, list := range m.grads {
			write(t, g, i, list[0], ones)
		}
	}
	fill()
	require.NoError(t, memory.EmptyCache(g.Device(1)))
	var all []memory.Slice[byte] // of the device's memory
	for size := 1 << 36; size >= 512; size /= 2 {
		for {
			x, err := memory.Make[byte](g.Stream(1), size)
			if err != nil {
				require.ErrorIs(t, err, device.ErrorOutOfMemory)
				break
			}
			all = append(all, x)
		}
	}
	require.NoError(t, red.Ready(g.Stream(0), 0))
	require.ErrorIs(t, red.Ready(g.Stream(1), 0), device.ErrorOutOfMemory)
	require.Error(t, red.Finish(g.Stream(0), g.Stream(1)))
	for _, x := range all {
		require.NoError(t, x.Close())
	}
	fill()
	reduceAll(t, g, red, 1)
	for i := range m.grads {
		require.InDelta(t, 1, m.read(t, i, 0)[77], 1e-4)
	}
}

// A hook that is a nil pointer is refused.
func TestPowerSGDNil(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}))
	x, err := memory.Make[float32](g.Stream(0), 4)
	require.NoError(t, err)
	defer x.Close()
	_, err = ddp.NewReducer(g, [][]memory.Slice[float32]{{x}}, &ddp.ReducerConfig{Hook: (*ddp.PowerSGD)(nil)})
	require.ErrorContains(t, err, "nil *PowerSGD")
}
