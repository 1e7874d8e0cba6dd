package graph_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// pair has memory of two devices, and streams that one may wait for the other.
func pair(t *testing.T, devs []*device.Device) (s [2]*stream.Stream, x, y memory.Slice[int32]) {
	t.Helper()
	s = [2]*stream.Stream{newStream(t, devs[0]), newStream(t, devs[1])}
	x, err := memory.MakeFrom(s[0], []int32{1, 2, 3})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	y, err = memory.MakeFrom(s[1], []int32{0, 0, 0})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, y.Close()) })
	require.NoError(t, s[0].WaitStream(s[1]))
	return s, x, y
}

// A capture cannot test the way to another device: it takes the direct one.
func TestCaptureBetweenUntestedDevices(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	s, x, y := pair(t, devs)
	g, err := graph.Capture(s[:1], func() error { return memory.Copy(s[0], y, x) }, nil)
	require.NoError(t, err)
	_, tested := gpu.DeviceOf(devs[0]).PeerTested(gpu.DeviceOf(devs[1]))
	require.False(t, tested)
	require.NoError(t, g.Launch(s[0]))
	require.NoError(t, s[1].WaitStream(s[0]))
	out := make([]int32, 3)
	require.NoError(t, y.CopyTo(s[1], out))
	require.Equal(t, []int32{1, 2, 3}, out)
	require.NoError(t, g.Close())
}

// CHORUS_P2P=off holds in a capture too, where a staged copy is refused.
func TestCaptureOfStagedCopy(t *testing.T) {
	t.Setenv("CHORUS_P2P", "off")
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	s, x, y := pair(t, devs)
	_, err := graph.Capture(s[:1], func() error { return memory.Copy(s[0], y, x) }, nil)
	require.ErrorIs(t, err, graph.ErrorUnsupported)
	require.ErrorContains(t, err, "memory: copy: ")
	require.ErrorContains(t, err, "copy before the capture")
}
