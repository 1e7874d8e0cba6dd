package device_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

func TestProperties(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		seen := map[string]bool{}
		for i, d := range devs {
			require.Equal(t, i, d.Ordinal())
			p, err := d.Properties()
			require.NoError(t, err)
			require.NotEmpty(t, p.Name)
			require.Regexp(t, `^GPU-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$`, p.UUID)
			require.False(t, seen[p.UUID])
			seen[p.UUID] = true
			require.Regexp(t, `^[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]$`, p.PCIBusID)
			require.GreaterOrEqual(t, p.Major, 5)
			require.Equal(t, 32, p.WarpSize)
			require.Positive(t, p.Multiprocessors)
			free, total, err := d.MemoryInfo()
			require.NoError(t, err)
			require.LessOrEqual(t, free, total)
			require.InEpsilon(t, float64(p.TotalMemory), float64(total), 0.01)
			require.NoError(t, d.Sync(context.Background()))
			require.NoError(t, d.Sync(testgpu.Context(t)))
		}
	})
}

func TestPeers(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		self, err := devs[0].CanAccessPeer(devs[0])
		require.NoError(t, err)
		require.True(t, self)
		ok, err := devs[0].CanAccessPeer(devs[1])
		require.NoError(t, err)
		require.NoError(t, gpu.DeviceOf(devs[0]).EnablePeer(gpu.DeviceOf(devs[1])))
		require.NoError(t, gpu.DeviceOf(devs[0]).EnablePeer(gpu.DeviceOf(devs[1])), "again is no error")
		if ok {
			_, err = devs[0].PeerRank(devs[1])
			require.NoError(t, err)
			_, err = devs[0].PeerAtomics(devs[1])
			require.NoError(t, err)
		}
		other := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
		_, err = devs[0].CanAccessPeer(other[0])
		require.ErrorContains(t, err, "two systems")
		_, err = devs[0].PeerAtomics(other[0])
		require.ErrorContains(t, err, "two systems")
	})
}

// The links of virtual devices are NVLink but for those that are said to be PCIe.
func TestVirtualLinks(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, VirtualPCIe: [][2]int{{2, 0}}})
	for i, a := range devs {
		for j, b := range devs {
			if i == j {
				_, err := a.PeerAtomics(b)
				require.ErrorIs(t, err, device.ErrorInvalidDevice)
				continue
			}
			atomics, err := a.PeerAtomics(b)
			require.NoError(t, err)
			rank, err := a.PeerRank(b)
			require.NoError(t, err)
			require.Equal(t, i+j != 2, atomics, "%d and %d", i, j)
			require.Equal(t, i+j == 2, rank > 0, "%d and %d", i, j)
		}
	}
}

func TestOpen(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 3})
	require.Equal(t, "virtual", sys.Backend())
	d, err := sys.Open(2)
	require.NoError(t, err)
	require.Same(t, sys.Devices()[2], d)
	require.Equal(t, "virtual:2", d.String())
	for _, n := range []int{-1, 3} {
		_, err = sys.Open(n)
		require.ErrorIs(t, err, device.ErrorInvalidDevice)
		require.ErrorContains(t, err, "there are 3 (0 to 2)")
	}
}

func TestEnvironment(t *testing.T) {
	for name, c := range map[string]struct{ env, value, want string }{
		"backend":  {"CHORUS_BACKEND", "opencl", "one of auto, cuda, virtual"},
		"devices":  {"CHORUS_VIRTUAL_DEVICES", "none", "a whole number"},
		"too many": {"CHORUS_VIRTUAL_DEVICES", "65", "a whole number from 1 to 64"},
		"seed":     {"CHORUS_VIRTUAL_SEED", "x", "64 bits"},
		"faults":   {"CHORUS_VIRTUAL_FAULTS", "cuInit", "fault"},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := &device.SystemConfig{Backend: "virtual"}
			if c.env == "CHORUS_BACKEND" {
				cfg.Backend = ""
			}
			t.Setenv(c.env, c.value)
			_, err := device.NewSystem(cfg)
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, c.value)
		})
	}
}

// Where CUDA is asked for and is not there, the error says what was tried.
func TestNoCUDA(t *testing.T) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "cuda"})
	if err == nil {
		require.Equal(t, "cuda", sys.Backend())
		return
	}
	lib, ok := errors.AsType[*device.LibraryError](err)
	if !ok {
		require.ErrorContains(t, err, "CUDA is not available on this machine")
		return
	}
	require.NotEmpty(t, lib.Tried)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "libcuda.so.1")
}

func TestErrorText(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuMemAlloc#1=CUDA_ERROR_OUT_OF_MEMORY"})
	d := sys.Devices()[0]
	err := gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) cudadrv.Result {
		_, r := drv.MemAlloc(1 << 20)
		return r
	})
	require.ErrorIs(t, err, device.ErrorOutOfMemory)
	e, ok := errors.AsType[*device.Error](err)
	require.True(t, ok)
	require.Equal(t, 0, e.Device)
	require.False(t, e.Sticky())
	require.EqualError(t, err, "device: cuMemAlloc on device 0: CUDA_ERROR_OUT_OF_MEMORY (the device or host has not enough free memory)")
	require.True(t, (&device.Error{Err: device.ErrorIllegalAddress}).Sticky())
	u := &device.UnsupportedError{Feature: "ncclCommRevoke", Need: "NCCL 2.28.7", Have: "NCCL 2.28.3"}
	require.ErrorIs(t, u, errors.ErrUnsupported)
	require.EqualError(t, u, "ncclCommRevoke needs NCCL 2.28.7; this machine has NCCL 2.28.3")
}

// A goroutine moves between OS threads all the time; every call binds anew.
func TestBindFromManyGoroutines(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		errs := make(chan error)
		for i := range 64 {
			go func() {
				for range 20 {
					if _, _, err := devs[i%2].MemoryInfo(); err != nil {
						errs <- err
						return
					}
				}
				errs <- nil
			}()
		}
		for range 64 {
			select {
			case err := <-errs:
				require.NoError(t, err)
			case <-time.After(time.Minute):
				t.Fatal("no answer")
			}
		}
	})
}

// A wait whose context has ended waits for nothing, and returns the cause.
func TestSyncOfEndedContext(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		cause := errors.New("enough")
		ended, end := context.WithCancelCause(context.Background())
		end(cause)
		before := runtime.NumGoroutine()
		for range 50 {
			require.ErrorIs(t, devs[0].Sync(ended), cause)
		}
		require.Eventually(t, func() bool { return runtime.NumGoroutine() <= before+3 }, time.Minute, time.Millisecond) // one is Eventually's
		gate := make(chan struct{})
		require.NoError(t, s.Callback(func() { <-gate }))
		waiting, end := context.WithCancelCause(context.Background())
		time.AfterFunc(time.Millisecond, func() { end(cause) })
		require.ErrorIs(t, devs[0].Sync(waiting), cause)
		close(gate)
		require.NoError(t, s.Sync(testgpu.Context(t)))
	})
}

// DoRelaxed leaves the thread's capture mode as it was.
func TestDoRelaxed(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		mode := func(d *device.Device) (m cudadrv.CaptureMode) {
			exchange := func(to cudadrv.CaptureMode) (was cudadrv.CaptureMode) {
				require.NoError(t, gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
					was, r = drv.ThreadExchangeStreamCaptureMode(to)
					return r
				}))
				return was
			}
			m = exchange(cudadrv.CaptureRelaxed)
			exchange(m)
			return m
		}
		before := mode(devs[0])
		require.NotEqual(t, cudadrv.CaptureRelaxed, before)
		require.NoError(t, gpu.DeviceOf(devs[0]).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result {
			_, _, r := drv.MemGetInfo()
			return r
		}))
		require.Equal(t, before, mode(devs[0]))
	})
}

func TestSystemClose(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2})
	_, _, err := sys.Devices()[1].MemoryInfo()
	require.NoError(t, err)
	require.NoError(t, sys.Close())
	require.NoError(t, sys.Close())
	require.NoError(t, (*device.System)(nil).Close())
}

// A device of a System that was closed has no context any more; that of another has
// one, whatever became of the first.
func TestUseAfterSystemClose(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		for range 3 {
			sys, err := device.NewSystem(&device.SystemConfig{Backend: devs[0].System().Backend()})
			require.NoError(t, err)
			free, total, err := sys.Devices()[0].MemoryInfo()
			require.NoError(t, err)
			require.Positive(t, free)
			require.LessOrEqual(t, free, total)
			require.NoError(t, sys.Close())
			_, _, err = sys.Devices()[0].MemoryInfo()
			require.ErrorIs(t, err, device.ErrClosed)
			_, err = gpu.DeviceOf(sys.Devices()[0]).Context()
			require.ErrorIs(t, err, device.ErrClosed)
			active, err := sys.Devices()[0].Active()
			require.NoError(t, err)
			require.False(t, active && sys.Backend() == "virtual", "nothing was made")
		}
	})
}

func TestDoAllocatesNothing(t *testing.T) {
	d := testgpu.CUDA(t, 1)[0]
	var free uintptr
	require.Zero(t, testing.AllocsPerRun(100, func() {
		err := gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
			free, _, r = drv.MemGetInfo()
			return r
		})
		if err != nil {
			t.Fatal(err)
		}
	}))
	require.NotZero(t, free)
}

// After a sticky error every call on the device tells what happened first; other
// devices are as good as before.
func TestStickyErrorTellsTheFirst(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "cuCtxSynchronize#1=CUDA_ERROR_ILLEGAL_ADDRESS,cuMemGetInfo#1=CUDA_ERROR_ILLEGAL_ADDRESS"})
	d := sys.Devices()[0]
	err := d.Sync(context.Background())
	first, ok := errors.AsType[*device.Error](err)
	require.True(t, ok)
	require.True(t, first.Sticky())
	require.Nil(t, first.First)
	require.ErrorContains(t, err, "the device is lost to this process")
	_, _, err = d.MemoryInfo()
	later, ok := errors.AsType[*device.Error](err)
	require.True(t, ok)
	require.Equal(t, "cuMemGetInfo", later.Op)
	require.Same(t, first, later.First)
	require.ErrorContains(t, err, "the device was lost before: device: cuCtxSynchronize on device 0")
	_, _, err = sys.Devices()[1].MemoryInfo()
	require.NoError(t, err)
}

func TestFeatures(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := devs[0]
		major, minor, err := d.Capability()
		require.NoError(t, err)
		p, err := d.Properties()
		require.NoError(t, err)
		require.Equal(t, []int{p.Major, p.Minor}, []int{major, minor})
		arch, err := d.Arch()
		require.NoError(t, err)
		require.Equal(t, fmt.Sprintf("sm_%d%d", major, minor), arch)
		for _, c := range []struct {
			major, minor int
			want         bool
		}{
			{major, minor, true}, {major, minor + 1, false}, {major + 1, 0, false},
			{major - 1, 9, true}, {5, 0, true}, {99, 9, false},
		} {
			f := device.Feature{Name: "tea", Major: c.major, Minor: c.minor}
			ok, err := d.Supports(f)
			require.NoError(t, err)
			require.Equal(t, c.want, ok, "%d.%d on %s", c.major, c.minor, arch)
			err = d.Require(f)
			if c.want {
				require.NoError(t, err)
				continue
			}
			u, isUnsupported := errors.AsType[*device.UnsupportedError](err)
			require.True(t, isUnsupported)
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.Equal(t, "tea", u.Feature)
			require.ErrorContains(t, err, fmt.Sprintf("needs a device of sm_%d%d or newer; this machine has %s of %s", c.major, c.minor, d, arch))
		}
	})
	// A virtual device answers as an H200 does.
	d := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	for _, f := range []device.Feature{device.TensorCores, device.BFloat16, device.TF32, device.Float8} {
		require.NoError(t, d.Require(f))
	}
}

func TestCurrent(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ctx := context.Background()
	require.Nil(t, device.Current(ctx))
	outer := device.NewContext(ctx, devs[0])
	inner := device.NewContext(outer, devs[1])
	require.Same(t, devs[1], device.Current(inner))
	require.Same(t, devs[0], device.Current(outer), "the outer context is as it was")

	s, err := stream.New(devs[1], nil)
	require.NoError(t, err)
	defer s.Close()
	work := stream.NewContext(outer, s)
	require.Same(t, devs[1], device.Current(work), "a stream tells its device")
	require.Same(t, s, stream.Current(work, device.Current(work)))
	require.Same(t, stream.Default(devs[0]), stream.Current(work, devs[0]))
	back := device.NewContext(work, devs[0])
	require.Same(t, devs[0], device.Current(back))
	require.Same(t, s, stream.Current(back, devs[1]), "each device keeps its stream")
}
