package kernel_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// set writes 1 into the first element.
var set = kernel.Source{
	Name: "set.cu",
	CUDA: `extern "C" __global__ void set(float* x) { x[0] = 1; }`,
	Kernels: []kernel.Def{{Name: "set", Params: []kernel.Param{kernel.Pointer}, Go: func(c *kernel.Call) {
		kernel.Update[float32](c, 0, 1)[0] = 1
	}}},
}

// A module that a graph uses is not unloaded.
func TestModuleOfAGraphStays(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		m, err := kernel.Compile(devs[0], &set)
		require.NoError(t, err)
		k, err := m.Kernel("set")
		require.NoError(t, err)
		x := makeFrom[float32](t, s, 0)
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			require.NoError(t, k.Launch(s, kernel.Cover(1), kernel.Ptr(x)))
			require.ErrorContains(t, m.Close(), "close the graph first")
			return k.Launch(s, kernel.Cover(1), kernel.Ptr(x))
		}, nil)
		require.NoError(t, err)
		err = m.Close()
		require.ErrorContains(t, err, "kernel: close the module of set.cu on "+devs[0].String()+": graph ")
		require.ErrorContains(t, err, "uses it: close the graph first")
		require.NoError(t, g.Launch(s))
		require.NoError(t, k.Launch(s, kernel.Cover(1), kernel.Ptr(x)), "it is as good as before")
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.NoError(t, g.Close())
		require.NoError(t, m.Close())
		require.NoError(t, m.Close())
		require.ErrorIs(t, k.Launch(s, kernel.Cover(1), kernel.Ptr(x)), device.ErrClosed)
	})
}

// A graph that has got the launches of another one by an update holds their module.
func TestModuleOfAnUpdatedGraphStays(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		x := makeFrom[float32](t, s, 0)
		var ms [2]*kernel.Module
		var gs [2]*graph.Exec
		for i := range ms {
			var err error
			ms[i], err = kernel.Compile(devs[0], &set)
			require.NoError(t, err)
			k, err := ms[i].Kernel("set")
			require.NoError(t, err)
			gs[i], err = graph.Capture([]*stream.Stream{s}, func() error { return k.Launch(s, kernel.Cover(1), kernel.Ptr(x)) }, nil)
			require.NoError(t, err)
		}
		require.NoError(t, gs[0].Update(gs[1]))
		require.NoError(t, gs[1].Close())
		require.ErrorContains(t, ms[1].Close(), "close the graph first")
		require.NoError(t, gs[0].Launch(s))
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.NoError(t, gs[0].Close())
		for _, m := range ms {
			require.NoError(t, m.Close())
		}
	})
}

func TestElementwiseOfAGraphStays(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		e, err := kernel.NewElementwise(axpyCode, axpyConfig())
		require.NoError(t, err)
		x, y, z := makeFrom[float32](t, s, 1), makeFrom[float32](t, s, 2), makeFrom[float32](t, s, 0)
		launch := func() error {
			return e.Launch(s, kernel.Out(z), kernel.In(x), kernel.In(y), kernel.Set("a", float32(3)))
		}
		require.NoError(t, launch())
		g, err := graph.Capture([]*stream.Stream{s}, launch, nil)
		require.NoError(t, err)
		require.ErrorContains(t, e.Close(), "kernel: close the element-wise kernel of ")
		require.NoError(t, g.Launch(s))
		require.NoError(t, launch())
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.NoError(t, g.Close())
		require.NoError(t, e.Close())
	})
}

// Pinned memory that is closed while a kernel that was enqueued before has yet to write it must not be the next owner's.
func TestPinnedMemoryOfAPendingKernel(t *testing.T) {
	for _, recorded := range []bool{true, false} {
		sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
		dev := sys.Devices()[0]
		s, k := compiled(t, dev, &set)
		h, err := memory.MakePinned[float32](dev, 1024)
		require.NoError(t, err)
		open := streamtest.Hold(t, s)
		require.NoError(t, k.Launch(s, kernel.Cover(1), kernel.PinnedPtr(h)))
		if recorded {
			require.NoError(t, h.RecordStream(s))
		}
		require.NoError(t, h.Close())
		next, err := memory.MakePinned[float32](dev, 1024)
		require.NoError(t, err)
		next.Data()[0] = 7
		open()
		err = s.Sync(testgpu.Context(t))
		require.Equal(t, float32(7), next.Data()[0])
		if recorded {
			require.NoError(t, err)
			require.NoError(t, k.Launch(s, kernel.Cover(1), kernel.PinnedPtr(next)))
			require.NoError(t, s.Sync(testgpu.Context(t)))
			require.Equal(t, float32(1), next.Data()[0])
			require.Empty(t, sys.Reports())
		} else {
			require.ErrorIs(t, err, device.ErrorIllegalAddress)
			require.ErrorContains(t, err, "kernel set on stream 0x")
			require.ErrorContains(t, err, "have another owner since the operation was enqueued: call RecordStream for the memory")
			require.Len(t, sys.Reports(), 1)
		}
		require.NoError(t, next.Close())
	}
}
