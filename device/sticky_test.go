package device_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// bench is a device with one of each thing that can be used on it.
type bench struct {
	dev    *device.Device
	s      *stream.Stream
	e      *stream.Event
	x, y   memory.Slice[float32]
	pinned *memory.Pinned[float32]
	a, c   tensor.Tensor
	module *kernel.Module
	k      *kernel.Kernel
	comm   *nccl.Communicator
	graph  *graph.Exec
}

const side = 4

func newBench(t *testing.T, d *device.Device) *bench {
	t.Helper()
	b := &bench{dev: d}
	do := func(err error) { t.Helper(); require.NoError(t, err) }
	var err error
	b.s, err = stream.New(d, nil)
	do(err)
	b.e, err = stream.NewEvent(d, nil)
	do(err)
	b.x, err = memory.MakeFrom(b.s, make([]float32, side*side))
	do(err)
	b.y, err = memory.MakeFrom(b.s, make([]float32, side*side))
	do(err)
	b.pinned, err = memory.MakePinned[float32](d, side*side)
	do(err)
	b.a, err = tensor.Of(b.x, side, side)
	do(err)
	b.c, err = tensor.Of(b.y, side, side)
	do(err)
	b.module, err = kernel.Compile(d, &kernel.Source{Name: "sticky.cu", CUDA: `extern "C" __global__ void nothing(int n) {}`,
		Kernels: []kernel.Def{{Name: "nothing", Params: []kernel.Param{kernel.I32}, Go: func(*kernel.Call) {}}}})
	do(err)
	b.k, err = b.module.Kernel("nothing")
	do(err)
	id, err := nccl.NewUniqueID(d)
	do(err)
	b.comm, err = nccl.NewCommunicator(testgpu.Context(t), d, id, 0, 1, nil)
	do(err)
	b.graph, err = graph.Capture([]*stream.Stream{b.s}, func() error { return b.x.Zero(b.s) }, nil)
	do(err)
	do(b.matmul())
	do(b.s.Sync(testgpu.Context(t)))
	t.Cleanup(func() { // Close frees what it can: what the device says then is no matter here
		_ = b.graph.Close()
		_ = b.comm.Close()
		_ = b.module.Close()
		_ = b.pinned.Close()
		_ = b.x.Close()
		_ = b.y.Close()
		_ = b.e.Close()
		_ = b.s.Close()
	})
	return b
}

func (b *bench) matmul() error { return tensor.MatMul(b.s, b.c, b.a, b.a, nil) }

// calls has every kind of call that reaches the device.
func (b *bench) calls(ctx context.Context) map[string]func() error {
	host := make([]float32, side*side)
	return map[string]func() error{
		"Device.Sync":        func() error { return b.dev.Sync(context.Background()) },
		"Device.MemoryInfo":  func() error { _, _, err := b.dev.MemoryInfo(); return err },
		"Device.Profiler":    func() error { return b.dev.StartProfiler() },
		"stream.New":         func() error { s, err := stream.New(b.dev, nil); closes(s, err); return err },
		"Stream.Sync":        func() error { return b.s.Sync(context.Background()) },
		"Stream.Sync(ctx)":   func() error { return b.s.Sync(ctx) },
		"Stream.Query":       func() error { _, err := b.s.Query(); return err },
		"Stream.Wait":        func() error { return b.s.Wait(b.e) },
		"stream.NewEvent":    func() error { e, err := stream.NewEvent(b.dev, nil); closes(e, err); return err },
		"Event.Record":       func() error { return b.e.Record(b.s) },
		"Event.Query":        func() error { _, err := b.e.Query(); return err },
		"Event.Sync":         func() error { return b.e.Sync(context.Background()) },
		"memory.Make":        func() error { x, err := memory.Make[int32](b.s, 8); closes(x, err); return err },
		"memory.MakePinned":  func() error { x, err := memory.MakePinned[int32](b.dev, 8); closes(x, err); return err },
		"Slice.Zero":         func() error { return b.x.Zero(b.s) },
		"Slice.CopyFrom":     func() error { return b.x.CopyFrom(b.s, host) },
		"Slice.CopyTo":       func() error { return b.x.CopyTo(b.s, host) },
		"Slice.CopyToPinned": func() error { return b.x.CopyToPinned(b.s, b.pinned) },
		"memory.Copy":        func() error { return memory.Copy(b.s, b.y, b.x) },
		"Kernel.Launch":      func() error { return b.k.Launch(b.s, kernel.Cover(1), kernel.Scalar[int32](1)) },
		"tensor.MatMul":      b.matmul,
		"nccl.AllReduce":     func() error { return nccl.AllReduce(b.comm, b.s, b.y, b.x, nccl.Sum) },
		"Exec.Launch":        func() error { return b.graph.Launch(b.s) },
	}
}

func closes(x interface{ Close() error }, err error) {
	if err == nil {
		_ = x.Close()
	}
}

// After a sticky error every call on the device says what happened first, also
// those of libraries above the driver, and another device goes on working.
func TestEveryCallTellsTheFirstError(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: "cuProfilerStop#1=CUDA_ERROR_ILLEGAL_ADDRESS"})
	devs := sys.Devices()
	ctx := testgpu.Context(t)
	lost, good := newBench(t, devs[0]), newBench(t, devs[1])
	for name, call := range lost.calls(ctx) {
		require.NoError(t, call(), "%s, before", name)
	}
	require.NoError(t, devs[0].Err())
	require.ErrorIs(t, devs[0].StopProfiler(), device.ErrorIllegalAddress)
	first, ok := errors.AsType[*device.Error](devs[0].Err())
	require.True(t, ok)
	for name, call := range lost.calls(ctx) {
		err := call()
		require.ErrorContains(t, err, "the device was lost before: device: cuProfilerStop on device 0: CUDA_ERROR_ILLEGAL_ADDRESS", name)
		e, ok := errors.AsType[*device.Error](err)
		require.True(t, ok, name)
		require.True(t, e == first || e.First == first, "%s: %v", name, err)
	}
	for name, call := range good.calls(ctx) {
		require.NoError(t, call(), "%s, on the other device", name)
	}
	require.NoError(t, devs[1].Err())
}

// A library above the driver may be the first to meet the error.
func TestBecauseAsksTheDriver(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuMemGetInfo#1=CUDA_ERROR_ASSERT"})
	d := sys.Devices()[0]
	other := errors.New("the library says: CUDA failed")
	require.Equal(t, other, gpu.DeviceOf(d).Because(other), "no context: nothing can be lost")
	require.NoError(t, d.Sync(context.Background()))
	err := gpu.DeviceOf(d).Bound(func() error { return other })
	require.ErrorIs(t, err, other)
	require.ErrorIs(t, err, d.Err())
	require.ErrorContains(t, err, "CUDA failed; the device was lost before: device: cuMemGetInfo on device 0: CUDA_ERROR_ASSERT")
	require.NoError(t, gpu.DeviceOf(d).Bound(func() error { return nil }))
}

// Under CUDA_LAUNCH_BLOCKING the call that broke the device says so itself, and
// nothing advises to set it.
func TestLaunchBlocking(t *testing.T) {
	e := &device.Error{Op: "cuStreamSynchronize", Err: device.ErrorIllegalAddress}
	require.ErrorContains(t, e, "perhaps by an earlier operation: CUDA_LAUNCH_BLOCKING=1")
	t.Setenv("CUDA_LAUNCH_BLOCKING", "1")
	require.NotContains(t, e.Error(), "CUDA_LAUNCH_BLOCKING")
	d := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1}).Devices()[0]
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	defer s.Close()
	x, err := memory.Make[byte](s, 1000)
	require.NoError(t, err)
	err = gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(cudadrv.DevicePtr(x.Ptr()), 1, 1<<40, gpu.StreamOf(s).Raw())
	})
	require.ErrorIs(t, err, device.ErrorIllegalAddress)
	require.ErrorContains(t, err, "cuMemsetD8Async on device 0")
	_ = x.Close()
}
