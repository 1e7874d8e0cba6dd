package memory_test

import (
	"errors"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/spin"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func errorsOf(errs ...error) error { return errors.Join(errs...) }

func streamQuery(s cudadrv.Stream) func(cudadrv.Driver) cudadrv.Result {
	return func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(s) }
}

// pages returns n elements in memory of their own pages.
func pages(t testing.TB, n int) []int32 {
	t.Helper()
	mem, err := syscall.Mmap(-1, 0, 4*n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(mem)) })
	return unsafe.Slice((*int32)(unsafe.Pointer(&mem[0])), n)
}

// Memory of Go and of a mapping is copied from and to without the host's waiting.
func TestPinSlice(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) { testPinSlice(t, devs) })
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) { testPinSlice(t, devs) })
}

func testPinSlice(t *testing.T, devs []*device.Device) {
	const n = 1 << 16
	for name, mem := range map[string][]int32{"go": make([]int32, n), "mapped": pages(t, n)} {
		before := memory.ReadHostStats(devs[0])
		h, err := memory.PinSlice(devs[0], mem)
		require.NoError(t, err, name)
		require.Equal(t, before, memory.ReadHostStats(devs[0]), "it is not the allocator's")
		require.Same(t, &mem[0], &h.Data()[0])
		for _, d := range devs {
			s := newStream(t, d)
			for i := range mem {
				mem[i] = int32(i) ^ 77
			}
			x, y := makeInts(t, s, n), makeInts(t, s, n)
			open := spin.Hold(t, s)
			require.NoError(t, x.CopyFromPinned(s, h))
			require.NoError(t, memory.Copy(s, y, x))
			require.NoError(t, x.Zero(s))
			require.NoError(t, y.CopyToPinned(s, h))
			open()
			require.NoError(t, s.Sync(testgpu.Context(t)))
			for i := range mem {
				require.EqualValues(t, i^77, mem[i], name)
			}
		}
		require.NoError(t, h.Close())
		require.NoError(t, h.Close())
		require.Nil(t, h.Data())
		again, err := memory.PinSlice(devs[0], mem)
		require.NoError(t, err, "Close has unlocked it")
		require.NoError(t, again.Close())
	}
}

func TestPinSliceRefuses(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		mem := pages(t, 4096)
		h, err := memory.PinSlice(devs[0], mem[1024:2048])
		require.NoError(t, err)
		for _, part := range [][]int32{mem, mem[1024:2048], mem[1500:1501], mem[:1025], mem[2047:]} {
			_, err := memory.PinSlice(devs[0], part)
			require.ErrorContains(t, err, "it is pinned already, in whole or in part")
			require.ErrorIs(t, err, device.Status(cudadrv.ErrorHostMemoryAlreadyRegistered))
		}
		beside, err := memory.PinSlice(devs[0], mem[2048:])
		require.NoError(t, err)
		require.NoError(t, beside.Close())
		own := makePinned(t, devs[0], 64)
		_, err = memory.PinSlice(devs[0], own.Data()[8:])
		require.ErrorContains(t, err, "it is pinned already")
		_, err = memory.PinSlice(devs[0], mem[:0])
		require.ErrorContains(t, err, "it is empty")
		_, err = memory.PinSlice[int32](nil, mem)
		require.ErrorContains(t, err, "no device given")
		require.NoError(t, h.Close())
	})
}

// Close unlocks nothing that a stream or a graph uses.
func TestUnpinWaits(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		mem := pages(t, 1<<16)
		x := makeInts(t, s, len(mem))
		h, err := memory.PinSlice(devs[0], mem)
		require.NoError(t, err)
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			_, plain := errors.AsType[*device.CaptureError](h.Close())
			require.False(t, plain, "nothing of the capture uses it yet")
			return nil
		}, nil)
		require.NoError(t, err)
		require.NoError(t, g.Close())
		require.Nil(t, h.Data())

		h, err = memory.PinSlice(devs[0], mem)
		require.NoError(t, err)
		require.NoError(t, x.CopyFromPinned(s, h))
		g, err = graph.Capture([]*stream.Stream{s}, func() error {
			_, ok := errors.AsType[*device.CaptureError](h.Close())
			require.True(t, ok, "the stream that used it is captured")
			return x.CopyFromPinned(s, h)
		}, nil)
		require.NoError(t, err)
		require.ErrorContains(t, h.Close(), "uses it: close that first")
		require.NotNil(t, h.Data(), "it is still open")
		open := spin.Hold(t, s)
		require.NoError(t, g.Launch(s))
		require.NoError(t, x.CopyToPinned(s, h))
		require.NoError(t, g.Close())
		closed := make(chan error, 1)
		go func() { closed <- h.Close() }()
		require.False(t, poll.UntilNoLaterThan(20*time.Millisecond, func() bool { return len(closed) > 0 }), "Close did not wait for the stream")
		open()
		require.NoError(t, <-closed)
		done, err := s.Query()
		require.NoError(t, err)
		require.True(t, done)
	})
}

// What the driver fails to unlock stays open, and a second Close does it.
func TestUnpinWithFaults(t *testing.T) {
	for _, fault := range []string{"cuMemHostUnregister#1=CUDA_ERROR_UNKNOWN", "cuStreamSynchronize#1=CUDA_ERROR_UNKNOWN"} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: fault})
		s := newStream(t, devs[0])
		mem := pages(t, 1024)
		h, err := memory.PinSlice(devs[0], mem)
		require.NoError(t, err)
		require.NoError(t, h.RecordStream(s))
		require.ErrorContains(t, h.Close(), "memory: unpin slice of 4096 bytes")
		require.NotNil(t, h.Data())
		require.NoError(t, h.RecordStream(s))
		require.NoError(t, h.Close())
	}
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuMemHostRegister#1=CUDA_ERROR_OUT_OF_MEMORY"})
	mem := pages(t, 1024)
	_, err := memory.PinSlice(devs[0], mem)
	require.ErrorIs(t, err, device.ErrorOutOfMemory)
	h, err := memory.PinSlice(devs[0], mem)
	require.NoError(t, err)
	require.NoError(t, h.Close())
}
