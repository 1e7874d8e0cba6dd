package memory_test

import (
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/stretchr/testify/require"
)

// foreignMemory returns memory that the caching allocator does not know, and frees it when the test ends.
func foreignMemory(t *testing.T, s *stream.Stream, bytes int) uint64 {
	t.Helper()
	p, err := memory.Driver.Alloc(s, bytes)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, memory.Driver.Free(s, p, bytes)) })
	return p
}

func adoptedBytes(t *testing.T, d *device.Device) (n uint64) {
	t.Helper()
	u, err := memory.Ledger(d)
	require.NoError(t, err)
	for _, x := range u.Uses {
		if x.Owner == "adopted memory" {
			n += x.Bytes
		}
	}
	return n
}

// blocked keeps the stream from completing anything until the function is called.
func blocked(t *testing.T, s *stream.Stream) (open func()) {
	t.Helper()
	gate := make(chan struct{})
	require.NoError(t, s.Callback(func() { <-gate }))
	var once atomic.Bool
	open = func() {
		if once.CompareAndSwap(false, true) {
			close(gate)
		}
	}
	t.Cleanup(open)
	return open
}

func TestAdopt(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := devs[0]
		s := newStream(t, d)
		const n = 1000
		p := foreignMemory(t, s, 4*(n+1))
		before, err := memory.StatsOf(d)
		require.NoError(t, err)

		released := make(chan struct{})
		x, err := memory.Adopt[float32](s, p+4, n, func() { close(released) }) // aligned as float32 only
		require.NoError(t, err)
		require.Equal(t, p+4, x.Ptr())
		againReleased := make(chan struct{})
		again, err := memory.Adopt[uint8](s, p+8, 4*n-4, func() { close(againReleased) }) // in part the same
		require.NoError(t, err)
		require.EqualValues(t, 4*n, adoptedBytes(t, d), "the common part counts once")
		after, err := memory.StatsOf(d)
		require.NoError(t, err)
		require.Equal(t, before, after, "the caching allocator does not count it")

		in, out := make([]float32, n), make([]float32, n)
		r := rand.New(rand.NewPCG(1, 2))
		for i := range in {
			in[i] = r.Float32()
		}
		require.NoError(t, x.CopyFrom(s, in))
		require.NoError(t, again.Close())
		<-againReleased // on a goroutine of its own: the copy may be pending
		require.NoError(t, x.CopyTo(s, out))
		require.Equal(t, in, out)

		open := blocked(t, s)
		require.NoError(t, x.Zero(s))
		require.NoError(t, x.Close())
		require.NoError(t, x.Close(), "idempotent")
		select {
		case <-released:
			t.Fatal("released while work is pending")
		default:
		}
		require.EqualValues(t, 4*n, adoptedBytes(t, d))
		open()
		<-released
		require.Zero(t, adoptedBytes(t, d))
		require.ErrorIs(t, x.CopyFrom(s, in), device.ErrClosed)
	})
}

// The memory is released behind other streams, too, and at once if nothing is pending.
func TestAdoptOnStreams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := devs[0]
		s, other := newStream(t, d), newStream(t, d)
		p := foreignMemory(t, s, 4096)
		var released atomic.Bool
		x, err := memory.Adopt[int64](s, p, 512, func() { released.Store(true) })
		require.NoError(t, err)
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.NoError(t, x.Close())
		require.True(t, released.Load(), "nothing was pending")

		done := make(chan struct{})
		x, err = memory.Adopt[int64](s, p, 512, func() { close(done) })
		require.NoError(t, err)
		require.NoError(t, x.RecordStream(other))
		open := blocked(t, other)
		require.NoError(t, x.Zero(other))
		require.NoError(t, x.Close())
		select {
		case <-done:
			t.Fatal("released while the other stream uses it")
		default:
		}
		open()
		<-done

		empty, err := memory.Adopt[int64](s, 0, 0, func() { released.Store(false) })
		require.NoError(t, err)
		require.NoError(t, empty.Close())
		require.False(t, released.Load())
	})
}

func TestAdoptRefuses(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := devs[0]
		s := newStream(t, d)
		const bytes = 1 << 20
		p := foreignMemory(t, s, bytes)
		release := func() { t.Error("released memory that was not adopted") }
		pinned, err := memory.MakePinned[int32](d, 16)
		require.NoError(t, err)
		defer pinned.Close()
		adopt := func(ptr uint64, n int) error {
			_, err := memory.Adopt[int32](s, ptr, n, release)
			return err
		}
		require.ErrorContains(t, adopt(p+2, 1), "misaligned: want a multiple of 4")
		require.ErrorContains(t, adopt(p, -1), "out of range")
		require.ErrorContains(t, adopt(p+bytes-8, 1<<30), "the memory ends after 8 bytes")
		require.ErrorContains(t, adopt(4096, 1), "the driver knows no memory at this address")
		require.ErrorContains(t, adopt(^uint64(0)-3, 2), "beyond the address space")
		require.ErrorContains(t, adopt(uint64(uintptr(unsafe.Pointer(&pinned.Data()[0]))), 4), "page-locked memory of the host")
		_, err = memory.Adopt[int32](nil, p, 1, release)
		require.Error(t, err)

		x, err := memory.Adopt[int32](s, p, 4, nil)
		require.NoError(t, err)
		var adopted, closed error
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			adopted, closed = adopt(p, 4), x.Close()
			return x.Zero(s)
		}, nil)
		require.NoError(t, err)
		require.NoError(t, g.Close())
		for _, err := range []error{adopted, closed} {
			_, refused := errors.AsType[*device.CaptureError](err)
			require.True(t, refused, "%v", err)
		}
		var in error
		require.NoError(t, s.Callback(func() { in = x.Close() }))
		require.NoError(t, s.Sync(t.Context()))
		require.ErrorIs(t, in, device.ErrorNotPermitted)
		require.NoError(t, x.Close())
	})
}

func TestAdoptOfAnotherDevice(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s, other := newStream(t, devs[0]), newStream(t, devs[1])
		p := foreignMemory(t, s, 4096)
		_, err := memory.Adopt[int32](other, p, 4, nil)
		require.ErrorIs(t, err, device.ErrorInvalidContext)
		require.ErrorContains(t, err, "it is memory of device 0")
	})
}

// Two Systems stand for two processes. A real one opens the handle of its own process never.
func TestCUDAIPC(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := devs[0]
		s := newStream(t, d)
		in := make([]int16, 3000)
		r := rand.New(rand.NewPCG(5, 6))
		for i := range in {
			in[i] = int16(r.Uint32())
		}
		x, err := memory.MakeFrom(s, in)
		require.NoError(t, err)
		defer x.Close()
		require.NoError(t, s.Sync(t.Context()))
		h, offset, err := x.Slice(1000, 3000).CUDAIPCHandle()
		require.NoError(t, err)
		_, first, err := x.CUDAIPCHandle()
		require.NoError(t, err)
		require.Equal(t, first+2000, offset)

		_, err = memory.OpenCUDAIPC[int16](s, h, offset+1, 4)
		require.ErrorContains(t, err, "misaligned")
		_, err = memory.OpenCUDAIPC[int16](s, h, -2, 4)
		require.ErrorContains(t, err, "out of range")
		_, err = memory.OpenCUDAIPC[int16](s, h, offset, 0)
		require.ErrorContains(t, err, "out of range")
		_, err = memory.OpenCUDAIPC[int16](s, h, offset, 4)
		require.ErrorIs(t, err, device.ErrorInvalidContext, "its own")
		_, err = memory.OpenCUDAIPC[int16](s, memory.CUDAIPCHandle{1}, 0, 4)
		require.Error(t, err)
		_, _, err = memory.Slice[int16]{}.CUDAIPCHandle()
		require.ErrorContains(t, err, "empty")
	})
}
