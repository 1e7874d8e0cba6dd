package stream_test

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A callback comes after what is before it and before what is after it, and what
// it wrote is seen after Sync.
func TestCallbackOrder(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		const n = 1 << 16
		x, err := memory.Make[int32](s, n)
		require.NoError(t, err)
		defer x.Close()
		in := must(memory.MakePinned[int32](devs[0], n))
		defer in.Close()
		out := must(memory.MakePinned[int32](devs[0], n))
		defer out.Close()
		var order []int
		for round := range 50 {
			require.NoError(t, s.Callback(func() {
				order = append(order, round)
				for i := range in.Data() {
					in.Data()[i] = int32(round + i)
				}
			}))
			require.NoError(t, x.CopyFromPinned(s, in))
			require.NoError(t, x.CopyToPinned(s, out))
			require.NoError(t, s.Callback(func() {
				for i, v := range out.Data() {
					if v != int32(round+i) {
						panic("the copy has not come between")
					}
				}
			}))
		}
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.Len(t, order, 50)
		require.True(t, slices.IsSorted(order))
	})
}

// A panic stays in Go, and the stream goes on.
func TestCallbackPanics(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		boom := errors.New("boom")
		later := false
		require.NoError(t, s.Callback(func() { panic(boom) }))
		require.NoError(t, s.Callback(func() { later = true }))
		err := s.Sync(testgpu.Context(t))
		var ce *stream.CallbackError
		require.ErrorAs(t, err, &ce)
		require.ErrorIs(t, err, boom)
		require.Contains(t, ce.Stack, "callback_test.go")
		require.True(t, later)
		require.NoError(t, s.Sync(testgpu.Context(t)), "it is told once")
		require.NoError(t, s.Callback(func() { panic("text") }))
		e, err := s.Record(nil)
		require.NoError(t, err)
		defer e.Close()
		require.NoError(t, e.Sync(testgpu.Context(t)))
		require.ErrorContains(t, poll.Until(testgpu.Context(t), s.Query), "panicked: text")
		require.ErrorContains(t, s.Callback(nil), "no function given")
		// Who finds the stream at work finds no panic, and of two the first is told.
		gate := make(chan struct{})
		require.NoError(t, s.Callback(func() { panic("first") }))
		passed, err := s.Record(nil)
		require.NoError(t, err)
		defer passed.Close()
		require.NoError(t, s.Callback(func() { <-gate; panic("second") }))
		require.NoError(t, passed.Sync(testgpu.Context(t)))
		done, err := s.Query()
		require.NoError(t, err)
		require.False(t, done)
		close(gate)
		require.ErrorContains(t, s.Sync(background), "panicked: first")
		require.NoError(t, s.Sync(background))
	})
}

// A callback that fails a test by FailNow ends the process, because its thread is the driver's. The log says why.
func TestCallbackGoexit(t *testing.T) {
	const child = "CHORUS_TEST_GOEXIT"
	if os.Getenv(child) != "" {
		s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
		require.NoError(t, s.Callback(func() { t.FailNow() }))
		_ = s.Sync(testgpu.Context(t))
		return
	}
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestCallbackGoexit$")
	c.Env = append(os.Environ(), child+"=yes")
	out, err := c.CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(out), "a callback called runtime.Goexit, as testing.T.FailNow does")
	require.Contains(t, string(out), "callback_test.go", "the stack names the callback")
}

// A captured callback runs at each launch, also of a graph that is closed while
// it runs and of one that took it over.
func TestCallbackInGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		capture := func(n *atomic.Int32) *graph.Exec {
			x, err := graph.Capture([]*stream.Stream{s}, func() error {
				return s.Callback(func() { n.Add(1) })
			}, nil)
			require.NoError(t, err)
			return x
		}
		var a, b atomic.Int32
		x, y := capture(&a), capture(&b)
		require.Equal(t, 1, x.Nodes())
		require.Zero(t, a.Load())
		for range 3 {
			require.NoError(t, x.Launch(s))
		}
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.Equal(t, int32(3), a.Load())

		require.NoError(t, x.Update(y))
		require.NoError(t, y.Close())
		require.NoError(t, x.Launch(s))
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.Equal(t, []int32{3, 1}, []int32{a.Load(), b.Load()})
		require.NoError(t, x.Close())

		z := capture(&a)
		gate := make(chan struct{})
		require.NoError(t, s.Callback(func() { <-gate }))
		require.NoError(t, z.Launch(s))
		require.NoError(t, z.Close())
		close(gate)
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.Equal(t, int32(4), a.Load())
	})
}

// The functions of a closed graph are collected.
func TestCallbackOfClosedGraphIsFreed(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		freed := make(chan struct{})
		func() {
			big := newCanary(freed)
			x, err := graph.Capture([]*stream.Stream{s}, func() error { return s.Callback(big.sing) }, nil)
			require.NoError(t, err)
			require.NoError(t, x.Launch(s))
			require.NoError(t, s.Sync(testgpu.Context(t)))
			require.NoError(t, x.Close())
		}()
		require.True(t, poll.UntilNoLaterThan(10*time.Second, func() bool { return collected(freed) }))
	})
}

// So are those that the driver refuses.
func TestCallbackThatFailsIsFreed(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuLaunchHostFunc#1=CUDA_ERROR_INVALID_VALUE"})
	s := newStream(t, devs[0])
	freed := make(chan struct{})
	func() { require.ErrorIs(t, s.Callback(newCanary(freed).sing), device.ErrorInvalidValue) }()
	require.True(t, poll.UntilNoLaterThan(10*time.Second, func() bool { return collected(freed) }))
}

// A graph that other code captures cannot say how long it needs the function.
func TestCallbackInForeignCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		own := newStream(t, devs[0])
		s, err := stream.External(devs[0], own.Handle())
		require.NoError(t, err)
		defer s.Close()
		require.NoError(t, s.Callback(func() {}))
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.NoError(t, gpu.DeviceOf(devs[0]).Do(func(drv cudadrv.Driver) cudadrv.Result {
			return drv.StreamBeginCapture(gpu.StreamOf(own).Raw(), cudadrv.CaptureRelaxed)
		}))
		var ce *device.CaptureError
		require.ErrorAs(t, s.Callback(func() {}), &ce)
		var g cudadrv.Graph
		require.NoError(t, gpu.DeviceOf(devs[0]).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
			g, r = drv.StreamEndCapture(gpu.StreamOf(own).Raw())
			return r
		}), "the capture is still good")
		require.NoError(t, gpu.DeviceOf(devs[0]).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.GraphDestroy(g) }))
	})
}

// Virtual devices refuse the driver to a callback; CUDA may hang.
func TestCallbackUsesDevice(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s := newStream(t, devs[0])
	var err error
	require.NoError(t, s.Callback(func() { _, err = s.Query() }))
	require.NoError(t, s.Sync(testgpu.Context(t)))
	require.ErrorIs(t, err, device.ErrorNotPermitted)
}
