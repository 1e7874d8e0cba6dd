package device_test

import (
	"os"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// worker is set in a process that is started to be the first user of its GPUs.
const worker = "DEVICE_TEST_WORKER"

// A device that was not used has no context, whatever was asked about it and
// whatever was done on another one.
func TestNoContextOnUnusedDevices(t *testing.T) {
	t.Run("virtual", func(t *testing.T) {
		useSecond(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}))
	})
	t.Run("cuda", func(t *testing.T) {
		devs := testgpu.CUDA(t, 2)
		if os.Getenv(worker) != "" {
			useSecond(t, devs)
			return
		}
		cmd := exec.Command(os.Args[0], "-test.run=^TestNoContextOnUnusedDevices$/^cuda$", "-test.v")
		cmd.Env = append(os.Environ(), worker+"=1")
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, string(out))
		require.Contains(t, string(out), "--- PASS: TestNoContextOnUnusedDevices/cuda")
	})
}

func useSecond(t *testing.T, devs []*device.Device) {
	for _, d := range devs {
		_, err := d.Properties()
		require.NoError(t, err)
		_, err = d.Supports(device.TF32)
		require.NoError(t, err)
		_, err = d.CanAccessPeer(devs[0])
		require.NoError(t, err)
		requireActive(t, d, false)
	}
	s, err := stream.New(devs[1], nil)
	require.NoError(t, err)
	defer s.Close()
	x, err := memory.MakeFrom(s, []float32{1, 2, 3})
	require.NoError(t, err)
	defer x.Close()
	out := make([]float32, 3)
	require.NoError(t, x.CopyTo(s, out))
	require.Equal(t, []float32{1, 2, 3}, out)
	pinned, err := memory.MakePinned[float32](devs[1], 3)
	require.NoError(t, err)
	require.NoError(t, x.CopyToPinned(s, pinned))
	require.NoError(t, s.Sync(testgpu.Context(t)))
	require.NoError(t, pinned.Close())
	for i, d := range devs {
		requireActive(t, d, i == 1)
	}
}

func requireActive(t *testing.T, d *device.Device, want bool) {
	t.Helper()
	active, err := d.Active()
	require.NoError(t, err)
	require.Equal(t, want, active, "%s", d)
}

func TestProfiler(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		profiling := func(i int) bool {
			return gpu.DeviceOf(devs[i]).System().Machine.Profiling(gpu.DeviceOf(devs[i]).Handle())
		}
		for range 2 {
			require.NoError(t, devs[1].StartProfiler())
		}
		if gpu.DeviceOf(devs[1]).System().Machine != nil {
			require.False(t, profiling(0))
			require.True(t, profiling(1))
		}
		for range 2 {
			require.NoError(t, devs[1].StopProfiler())
		}
		if gpu.DeviceOf(devs[1]).System().Machine != nil {
			require.False(t, profiling(1))
		}
	})
	d := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuProfilerStart#1=CUDA_ERROR_PROFILER_DISABLED"})[0]
	err := d.StartProfiler()
	require.ErrorContains(t, err, "cuProfilerStart on device 0: CUDA_ERROR_PROFILER_DISABLED")
}

// Counting without the driver and with it agree.
func TestCount(t *testing.T) {
	t.Run("virtual", func(t *testing.T) {
		t.Setenv("CHORUS_BACKEND", "virtual")
		t.Setenv("CHORUS_VIRTUAL_DEVICES", "3")
		n, err := device.Count()
		require.NoError(t, err)
		require.Equal(t, 3, n)
	})
	t.Run("cuda", func(t *testing.T) {
		devs := testgpu.CUDA(t, 1)
		t.Setenv("CHORUS_BACKEND", "cuda")
		for _, nvml := range []string{"1", "0"} {
			t.Setenv("PYTORCH_NVML_BASED_CUDA_CHECK", nvml)
			n, err := device.Count()
			require.NoError(t, err)
			require.Len(t, devs[0].System().Devices(), n)
		}
	})
	t.Setenv("CHORUS_BACKEND", "opencl")
	_, err := device.Count()
	require.ErrorContains(t, err, "device: count: env: CHORUS_BACKEND")
}
