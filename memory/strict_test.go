package memory_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// set enqueues a write of bytes at an address.
func set(s *stream.Stream, p cudadrv.DevicePtr, bytes int) error {
	return gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(p, 1, uintptr(bytes), gpu.StreamOf(s).Raw())
	})
}

// Virtual devices know which parts of a segment somebody has, and report every use
// of the others, and every use that is in no order with what the part was before.
func TestStrictDevicesKnowTheBlocks(t *testing.T) {
	type bench struct {
		a, b *stream.Stream
		x    memory.Slice[int32] // on a, with others around it in its segment
	}
	for _, conf := range []string{"", "expandable_segments:True"} {
		for name, c := range map[string]struct {
			do   func(t *testing.T, m *bench) error
			want string // in the error; "" is none
		}{
			"use": {func(_ *testing.T, m *bench) error { return set(m.a, cudadrv.DevicePtr(m.x.Ptr()), 4000) }, ""},
			"use after free": {func(t *testing.T, m *bench) error {
				p := cudadrv.DevicePtr(m.x.Ptr())
				require.NoError(t, m.x.Close())
				return set(m.a, p, 4)
			}, "freed by MemFreed"},
			"use of a part after free": {func(t *testing.T, m *bench) error {
				part := cudadrv.DevicePtr(m.x.Slice(100, 200).Ptr())
				require.NoError(t, m.x.Close())
				return set(m.a, part, 4)
			}, "freed by MemFreed"},
			"use beyond the end": {func(t *testing.T, m *bench) error {
				y, err := memory.Make[int32](m.a, 128)
				require.NoError(t, err)
				p := cudadrv.DevicePtr(y.Ptr())
				require.NoError(t, y.Close())
				return set(m.a, p-4, 8)
			}, "MemFreed"},
			"use before free": {func(t *testing.T, m *bench) error {
				err := set(m.a, cudadrv.DevicePtr(m.x.Ptr()), 4000)
				require.NoError(t, m.x.Close())
				return err
			}, ""},
			"free and a new owner": {func(t *testing.T, m *bench) error {
				was := cudadrv.DevicePtr(m.x.Ptr())
				require.NoError(t, m.x.Close())
				y, err := memory.Make[int32](m.a, 1000)
				require.NoError(t, err)
				require.Equal(t, was, cudadrv.DevicePtr(y.Ptr()))
				m.x = y
				return set(m.a, was, 4000)
			}, ""},
			"another stream without an event": {func(_ *testing.T, m *bench) error { return set(m.b, cudadrv.DevicePtr(m.x.Ptr()), 4000) }, "race"},
			"another stream with an event": {func(t *testing.T, m *bench) error {
				require.NoError(t, m.b.WaitStream(m.a))
				err := set(m.b, cudadrv.DevicePtr(m.x.Ptr()), 4000)
				require.NoError(t, m.a.WaitStream(m.b))
				return err
			}, ""},
			"no record of another stream": {func(t *testing.T, m *bench) error {
				require.NoError(t, m.b.WaitStream(m.a))
				open := streamtest.Hold(t, m.b)
				err := set(m.b, cudadrv.DevicePtr(m.x.Ptr()), 4000)
				require.NoError(t, m.x.Close())
				require.NoError(t, m.a.Sync(testgpu.Context(t)))
				open()
				return err
			}, "MemFreed"},
			"a record of another stream": {func(t *testing.T, m *bench) error {
				require.NoError(t, m.b.WaitStream(m.a))
				require.NoError(t, m.x.RecordStream(m.b))
				open := streamtest.Hold(t, m.b)
				err := set(m.b, cudadrv.DevicePtr(m.x.Ptr()), 4000)
				require.NoError(t, m.x.Close())
				require.NoError(t, m.a.Sync(testgpu.Context(t)))
				open()
				return err
			}, ""},
			"in a capture": {func(t *testing.T, m *bench) error {
				var p cudadrv.DevicePtr
				g, err := graph.Capture([]*stream.Stream{m.a}, func() error {
					y, err := memory.Make[int32](m.a, 1000)
					require.NoError(t, err)
					p = cudadrv.DevicePtr(y.Ptr())
					require.NoError(t, y.Zero(m.a))
					require.NoError(t, y.Close())
					z, err := memory.Make[int32](m.a, 1000)
					require.NoError(t, err)
					require.Equal(t, p, cudadrv.DevicePtr(z.Ptr()))
					require.NoError(t, z.Zero(m.a))
					return z.Close()
				}, nil)
				require.NoError(t, err)
				for range 3 {
					require.NoError(t, g.Launch(m.a))
				}
				return g.Close()
			}, ""},
		} {
			t.Run(conf+"/"+name, func(t *testing.T) {
				configure(t, conf)
				sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
				d := sys.Devices()[0]
				m := &bench{a: newStream(t, d), b: newStream(t, d)}
				before, err := memory.Make[int32](m.a, 1000)
				require.NoError(t, err)
				m.x, err = memory.Make[int32](m.a, 1000)
				require.NoError(t, err)
				behind, err := memory.Make[int32](m.a, 1000)
				require.NoError(t, err)
				require.NoError(t, m.x.Zero(m.a))
				err = c.do(t, m)
				if c.want == "" {
					require.NoError(t, err)
				}
				errA, errB := m.a.Sync(testgpu.Context(t)), m.b.Sync(testgpu.Context(t))
				if c.want == "" {
					require.NoError(t, errorsOf(errA, errB))
					require.Empty(t, sys.Reports())
				} else {
					require.ErrorContains(t, errorsOf(errA, errB), c.want)
					require.NotEmpty(t, sys.Reports())
					require.Contains(t, sys.Reports()[0], c.want)
				}
				for _, x := range []memory.Slice[int32]{before, m.x, behind} {
					_ = x.Close() // of a device that may be lost
				}
			})
		}
	}
}

// A program that lacks a RecordStream is reported every time, whether the other stream
// comes before or after the block is taken back, and the report names both uses.
func TestMissingRecordStreamIsReported(t *testing.T) {
	for range 30 {
		sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
		a, b := newStream(t, sys.Devices()[0]), newStream(t, sys.Devices()[0])
		x, err := memory.Make[int32](a, 1000)
		require.NoError(t, err)
		require.NoError(t, x.Zero(a))
		require.NoError(t, b.WaitStream(a))
		err = x.Zero(b)
		_ = x.Close() // without x.RecordStream(b); the device may be lost by now
		errA, errB := a.Sync(testgpu.Context(t)), b.Sync(testgpu.Context(t))
		require.Error(t, errorsOf(err, errA, errB))
		require.NotEmpty(t, sys.Reports())
		for _, use := range []string{"cuMemsetD8Async on " + streamName(b), "MemFreed on " + streamName(a)} {
			require.Contains(t, sys.Reports()[0], use)
		}
	}
}

// streamName is the name that virtual devices have for a stream.
func streamName(s *stream.Stream) string { return fmt.Sprintf("stream %#x", s.Handle()) }
