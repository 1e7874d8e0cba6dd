package device_test

import (
	"errors"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func sensors(d *device.Device) map[string]func() (int, error) {
	return map[string]func() (int, error){
		"utilization": d.Utilization, "memory activity": d.MemoryActivity,
		"temperature": d.Temperature, "power draw": d.PowerDraw, "clock rate": d.ClockRate,
	}
}

// What a GPU tells is plausible; what NVML and the driver both know agrees.
func TestTelemetryOfGPU(t *testing.T) {
	d := testgpu.CUDA(t, 1)[0]
	if _, err := d.MemoryUsed(); errors.Is(err, errors.ErrUnsupported) {
		for name, read := range sensors(d) {
			_, err := read()
			require.ErrorIs(t, err, errors.ErrUnsupported, name)
		}
		t.Skip("needs NVML: ", err)
	}
	bounds := map[string][2]int{
		"utilization": {0, 100}, "memory activity": {0, 100}, "temperature": {5, 110},
		"power draw": {1_000, 2_000_000}, "clock rate": {100, 5_000},
	}
	for name, read := range sensors(d) {
		v, err := read()
		require.NoError(t, err, name)
		require.GreaterOrEqual(t, v, bounds[name][0], name)
		require.LessOrEqual(t, v, bounds[name][1], name)
	}
	const size = 1 << 30
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	defer s.Close()
	x, err := memory.Make[byte](s, size)
	require.NoError(t, err)
	defer x.Close()
	require.NoError(t, s.Sync(testgpu.Context(t)))
	used, err := d.MemoryUsed()
	require.NoError(t, err)
	_, total, err := d.MemoryInfo()
	require.NoError(t, err)
	require.Greater(t, used, uint64(size))
	require.LessOrEqual(t, used, total+total/20)
	ps, err := d.Processes()
	require.NoError(t, err)
	for _, p := range ps { // perhaps none: a container may hide them
		require.Positive(t, p.PID)
	}
	if links, err := d.NVLinks(); !errors.Is(err, errors.ErrUnsupported) {
		require.NoError(t, err)
		require.NotEmpty(t, links)
	}
}

// A virtual device tells the truth about its memory and its process, and that
// it has no sensors.
func TestTelemetryOfVirtualDevice(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	d := devs[1]
	ps, err := d.Processes()
	require.NoError(t, err)
	require.Empty(t, ps, "no context yet")
	requireActive(t, d, false)

	s, err := stream.New(d, nil)
	require.NoError(t, err)
	defer s.Close()
	before, err := d.MemoryUsed()
	require.NoError(t, err)
	x, err := memory.Make[byte](s, 12345)
	require.NoError(t, err)
	used, err := d.MemoryUsed()
	require.NoError(t, err)
	free, total, err := d.MemoryInfo()
	require.NoError(t, err)
	require.Equal(t, total-free, used)
	require.GreaterOrEqual(t, used-before, uint64(12345))
	ps, err = d.Processes()
	require.NoError(t, err)
	require.Equal(t, []device.Process{{PID: os.Getpid(), MemoryBytes: used}}, ps)
	require.NoError(t, x.Close())
	other, err := devs[0].MemoryUsed()
	require.NoError(t, err)
	require.Zero(t, other)

	all := sensors(d)
	all["NVLink state"] = func() (int, error) { up, err := d.NVLinks(); return len(up), err }
	for name, read := range all {
		_, err := read()
		u, ok := errors.AsType[*device.UnsupportedError](err)
		require.True(t, ok, "%s: %v", name, err)
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.Equal(t, "the "+name+" of virtual:1", u.Feature)
		require.ErrorContains(t, err, "needs a GPU; this machine has virtual devices")
	}
}
