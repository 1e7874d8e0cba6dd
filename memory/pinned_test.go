package memory_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func makePinned(t testing.TB, d *device.Device, n int) *memory.Pinned[int32] {
	t.Helper()
	h, err := memory.MakePinned[int32](d, n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, h.Close()) })
	return h
}

func makeInts(t testing.TB, s *stream.Stream, n int) memory.Slice[int32] {
	t.Helper()
	x, err := memory.Make[int32](s, n)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// at tells where pinned memory lies.
func at(h *memory.Pinned[int32]) *int32 { return &h.Data()[0] }

// newSize returns a length of which there is no free block: none that is there was
// of a recent test.
func newSize(t testing.TB, d *device.Device) int {
	t.Helper()
	require.NoError(t, memory.EmptyHostCache(d))
	if lastSize *= 2; lastSize > 1<<20 {
		lastSize = 1 << 10
	}
	return lastSize
}

var lastSize = 1 << 9

func TestPinnedIsUsedAgain(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		require.NoError(t, memory.EmptyHostCache(devs[0]))
		before := memory.ReadHostStats(devs[0])
		h := makePinned(t, devs[0], 1000)
		was := at(h)
		require.NoError(t, h.Close())
		require.NoError(t, h.Close())
		again := makePinned(t, devs[0], 1024)
		require.Same(t, was, at(again), "both sizes are 4096 bytes when rounded")
		require.Len(t, again.Data(), 1024)
		other := makePinned(t, devs[0], 1025)
		require.NotSame(t, was, at(other))
		after := memory.ReadHostStats(devs[0])
		require.EqualValues(t, 2, after.NumHostAlloc-before.NumHostAlloc)
		require.EqualValues(t, 2, after.Allocations.Current-before.Allocations.Current)
		require.EqualValues(t, 4096+8192, after.ActiveBytes.Current-before.ActiveBytes.Current)
		require.EqualValues(t, 3, after.ActiveRequests.Allocated-before.ActiveRequests.Allocated)
		require.NoError(t, other.Close())
		require.NoError(t, memory.EmptyHostCache(devs[0]))
		after = memory.ReadHostStats(devs[0])
		require.EqualValues(t, 1, after.NumHostFree-before.NumHostFree, "what is in use stays")
		require.EqualValues(t, 4096, after.AllocatedBytes.Current-before.AllocatedBytes.Current)
		again.Data()[0] = 1
	})
}

// Memory that was closed goes to nobody before the streams that used it are past
// their copies.
func TestPinnedStaysWhileStreamsUseIt(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		a, b := newStream(t, devs[0]), newStream(t, devs[0])
		n := newSize(t, devs[0])
		for _, users := range [][]*stream.Stream{{a}, {b, a}} {
			h := makePinned(t, devs[0], n)
			was := at(h)
			for i := range h.Data() {
				h.Data()[i] = int32(i)
			}
			x, y := makeInts(t, a, n), makeInts(t, a, n)
			require.NoError(t, b.WaitStream(a))
			for i, s := range users {
				open := streamtest.Hold(t, s)
				defer open()
				to := []memory.Slice[int32]{x, y}[i]
				require.NoError(t, to.RecordStream(s))
				require.NoError(t, to.CopyFromPinned(s, h))
			}
			require.NoError(t, h.Close())
			require.ErrorIs(t, x.CopyFromPinned(a, h), device.ErrClosed)
			require.ErrorIs(t, x.CopyToPinned(a, h), device.ErrClosed)
			require.ErrorIs(t, h.RecordStream(a), device.ErrClosed)
			require.ErrorContains(t, h.RecordStream(a), fmt.Sprintf("the pinned memory of %d elements: use after Close", h.Len()))
			for range len(users) {
				other := makePinned(t, devs[0], n)
				require.NotSame(t, was, at(other), "its copy has not run")
				for i := range other.Data() {
					other.Data()[i] = -1
				}
				require.NotZero(t, memory.ReadHostStats(devs[0]).ActiveBytes.Current)
			}
		}
	})
}

// All that was closed with streams that are past it is found again.
func TestPinnedComesBack(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		a, b := newStream(t, devs[0]), newStream(t, devs[0])
		n := newSize(t, devs[0])
		x := makeInts(t, a, n)
		h := makePinned(t, devs[0], n)
		was := at(h)
		// Callbacks of a device run one after the other, so a's must have begun before b's.
		entered, gate := make(chan struct{}), make(chan struct{})
		require.NoError(t, a.Callback(func() { close(entered); <-gate }))
		<-entered
		openB := streamtest.Hold(t, b)
		require.NoError(t, x.CopyToPinned(a, h))
		require.NoError(t, h.RecordStream(b))
		require.NoError(t, h.Close())
		require.NoError(t, makeAndClose(devs[0], n, func(p *int32) { require.NotSame(t, was, p) }))
		close(gate)
		require.NoError(t, a.Sync(testgpu.Context(t)))
		first := makePinned(t, devs[0], n) // the one that was just closed
		require.NotSame(t, was, at(first))
		second := makePinned(t, devs[0], n)
		require.NotSame(t, was, at(second), "b may use it still")
		openB()
		require.NoError(t, b.Sync(testgpu.Context(t)))
		made := memory.ReadHostStats(devs[0]).NumHostAlloc
		third := makePinned(t, devs[0], n)
		require.Same(t, was, at(third))
		require.Equal(t, made, memory.ReadHostStats(devs[0]).NumHostAlloc)
	})
}

// A part shares the memory, and its copies keep it as those of the whole do.
func TestPartOfPinned(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		n := newSize(t, devs[0])
		x := makeInts(t, s, 3)
		h := makePinned(t, devs[0], n)
		was := at(h)
		for i := range h.Data() {
			h.Data()[i] = int32(i)
		}
		part := h.Slice(10, 20).Slice(2, 5)
		require.Equal(t, []int32{12, 13, 14}, part.Data())
		require.ErrorIs(t, part.Close(), memory.ErrView)
		open := streamtest.Hold(t, s)
		require.NoError(t, x.CopyFromPinned(s, part))
		require.NoError(t, h.Close())
		require.Nil(t, part.Data())
		require.NotSame(t, was, at(makePinned(t, devs[0], n)), "the copy of the part has not run")
		require.ErrorIs(t, x.CopyFromPinned(s, part), device.ErrClosed)
		open()
		got := make([]int32, 3)
		require.NoError(t, x.CopyTo(s, got))
		require.Equal(t, []int32{12, 13, 14}, got)
		require.Panics(t, func() { h.Slice(1, n+1) })
		none := makePinned(t, devs[0], 0)
		require.Zero(t, none.Slice(0, 0).Len())
	})
}

func makeAndClose(d *device.Device, n int, look func(*int32)) error {
	h, err := memory.MakePinned[int32](d, n)
	if err != nil {
		return err
	}
	look(at(h))
	return h.Close()
}

// A graph that captured a copy has the memory for each launch, until it is closed
// and its last launch is over.
func TestGraphHoldsPinned(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, o := newStream(t, devs[0]), newStream(t, devs[0])
		n := newSize(t, devs[0])
		x := makeInts(t, s, n)
		var h *memory.Pinned[int32]
		var was *int32
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			h = makePinned(t, devs[0], n)
			was = at(h)
			for i := range h.Data() {
				h.Data()[i] = int32(i)
			}
			return x.CopyFromPinned(s, h)
		}, nil)
		require.NoError(t, err)
		defer g.Close()
		want := append([]int32(nil), h.Data()...)
		require.NoError(t, h.Close())
		for range 2 {
			other := makePinned(t, devs[0], n)
			require.NotSame(t, was, at(other), "the graph uses it")
			clear(other.Data())
			require.NoError(t, x.Zero(s))
			require.NoError(t, g.Launch(s))
			got := make([]int32, n)
			require.NoError(t, x.CopyTo(s, got))
			require.Equal(t, want, got)
		}
		open := streamtest.Hold(t, o)
		require.NoError(t, o.WaitStream(s))
		require.NoError(t, g.Launch(o))
		require.NoError(t, g.Close())
		for range 3 {
			require.NotSame(t, was, at(makePinned(t, devs[0], n)), "a launch of the closed graph uses it")
		}
		open()
		require.NoError(t, o.Sync(testgpu.Context(t)))
		// What is not the one that was is kept: closed, it would be the next again.
		require.NoError(t, poll.Until(testgpu.Context(t), func() (bool, error) {
			return at(makePinned(t, devs[0], n)) == was, nil
		}), "the end of the launch is noticed a little later")
	})
}

// RecordStream in a capture is as a copy in it.
func TestGraphHoldsRecordedPinned(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		n := newSize(t, devs[0])
		x := makeInts(t, s, n)
		h := makePinned(t, devs[0], n)
		was := at(h)
		g, err := graph.Capture([]*stream.Stream{s}, func() error { return errorsOf(h.RecordStream(s), x.Zero(s)) }, nil)
		require.NoError(t, err)
		require.NoError(t, h.Close())
		require.NotSame(t, was, at(makePinned(t, devs[0], n)))
		require.NoError(t, g.Close())
		require.Same(t, was, at(makePinned(t, devs[0], n)), "it was never launched")
	})
}

// Many goroutines fill, copy and close pinned memory at once, and none finds the
// bytes of another.
func TestPinnedOfManyStreams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		const workers, rounds = 8, 60
		var wg sync.WaitGroup
		for w := range workers {
			s := newStream(t, devs[0])
			x := makeInts(t, s, rounds*1024)
			rnd := rand.New(rand.NewPCG(7, uint64(w)))
			wg.Go(func() {
				for r := range rounds {
					n := 1 + rnd.IntN(1024)
					h, err := memory.MakePinned[int32](devs[0], n)
					if err != nil {
						t.Error(err)
						return
					}
					for i := range h.Data() {
						h.Data()[i] = int32(w<<16 | r)
					}
					if err := errorsOf(x.Slice(r*1024, r*1024+n).CopyFromPinned(s, h), h.Close()); err != nil {
						t.Error(err)
						return
					}
				}
				got := make([]int32, rounds*1024)
				if err := x.CopyTo(s, got); err != nil {
					t.Error(err)
				}
				for r := range rounds {
					if got[r*1024] != int32(w<<16|r) {
						t.Errorf("worker %d, round %d: %#x", w, r, got[r*1024])
					}
				}
			})
		}
		wg.Wait()
	})
}

// Memory that lives long keeps no stream alive that has done its work.
func TestPinnedForgetsIdleStreams(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	h := makePinned(t, devs[0], 8)
	first, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	require.NoError(t, h.RecordStream(first))
	raw := gpu.StreamOf(first).Raw()
	require.NoError(t, first.Close())
	for range 20 {
		s := newStream(t, devs[0])
		require.NoError(t, h.RecordStream(s))
		require.NoError(t, s.Sync(testgpu.Context(t)))
	}
	require.Error(t, gpu.DeviceOf(devs[0]).Do(streamQuery(raw)), "the stream was destroyed")
}

// Where the driver fails, memory that streams may still use goes to nobody.
func TestPinnedWithFaults(t *testing.T) {
	for fault, back := range map[string]bool{
		"cuEventRecord#1=CUDA_ERROR_UNKNOWN":       true,
		"cuEventQuery#1=CUDA_ERROR_UNKNOWN":        true,
		"cuEventCreate#1=CUDA_ERROR_OUT_OF_MEMORY": true,
		"cuStreamIsCapturing#1=CUDA_ERROR_UNKNOWN": true,
		"cuEventRecord#*=CUDA_ERROR_UNKNOWN":       false,
	} {
		t.Run(fault, func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: fault})
			s := newStream(t, devs[0])
			h := makePinned(t, devs[0], 100)
			was := at(h)
			require.NoError(t, h.RecordStream(s))
			require.NoError(t, h.Close())
			require.NotSame(t, was, at(makePinned(t, devs[0], 100)), "nobody knows where the stream is")
			found := false
			for range 3 {
				require.NoError(t, s.Sync(testgpu.Context(t)))
				found = found || was == at(makePinned(t, devs[0], 100))
			}
			require.Equal(t, back, found)
		})
	}
}

// Out of memory, the cache is emptied before an error is returned.
func TestPinnedOutOfMemory(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1,
		Faults: "cuMemHostAlloc#2=CUDA_ERROR_OUT_OF_MEMORY,cuMemHostAlloc#4=CUDA_ERROR_OUT_OF_MEMORY,cuMemHostAlloc#5=CUDA_ERROR_OUT_OF_MEMORY"})
	h := makePinned(t, devs[0], 100)
	require.NoError(t, h.Close())
	makePinned(t, devs[0], 1000)
	s := memory.ReadHostStats(devs[0])
	require.EqualValues(t, 1, s.NumHostFree, "the cached block")
	require.EqualValues(t, 1, s.Allocations.Current)
	_, err := memory.MakePinned[int32](devs[0], 5000)
	require.ErrorIs(t, err, device.ErrorOutOfMemory)
	require.ErrorContains(t, err, "make 32768 pinned bytes")
	require.Equal(t, s.ActiveBytes, memory.ReadHostStats(devs[0]).ActiveBytes)
}

// The memory of a System that was closed is not handed out by it again.
func TestPinnedOfAClosedSystem(t *testing.T) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	require.NoError(t, err)
	dev := sys.Devices()[0]
	late, err := memory.MakePinned[int32](dev, 100)
	require.NoError(t, err)
	h, err := memory.MakePinned[int32](dev, 100)
	require.NoError(t, err)
	require.NoError(t, h.Close())
	require.NoError(t, sys.Close())
	require.NoError(t, late.Close())
	require.Zero(t, memory.ReadHostStats(dev).Allocations)
	_, err = memory.MakePinned[int32](dev, 100)
	require.ErrorIs(t, err, device.ErrClosed)
	_, err = memory.PinSlice(dev, make([]byte, 100))
	require.ErrorIs(t, err, device.ErrClosed)
	require.NoError(t, sys.Close())
}

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
			open := streamtest.Hold(t, s)
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
		open := streamtest.Hold(t, s)
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

// TestEmptyHostCacheAfterSync: memory goes back if it was closed while a stream used it, and the
// device has done its work since.
func TestEmptyHostCacheAfterSync(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		n := newSize(t, devs[0])
		x := makeInts(t, s, n)
		h := makePinned(t, devs[0], n)
		require.NoError(t, devs[0].Sync(testgpu.Context(t)))
		require.NoError(t, memory.EmptyHostCache(devs[0]))
		before := memory.ReadHostStats(devs[0])
		require.NoError(t, x.CopyFromPinned(s, h))
		require.NoError(t, h.Close())
		require.NoError(t, devs[0].Sync(testgpu.Context(t)))
		require.NoError(t, memory.EmptyHostCache(devs[0]))
		after := memory.ReadHostStats(devs[0])
		require.Equal(t, before.ActiveRequests.Current-1, after.ActiveRequests.Current)
		require.Equal(t, before.Allocations.Current-1, after.Allocations.Current)
	})
}

// TestCopyOfPartlyPinnedMemory: CUDA copies host memory that is pinned as a whole or not at all.
func TestCopyOfPartlyPinnedMemory(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		x := makeInts(t, s, 30000)
		host := make([]int32, 90000)
		h, err := memory.PinSlice(devs[0], host[30000:60000])
		require.NoError(t, err)
		for from, fits := range map[int]bool{0: true, 1: false, 29999: false, 30000: true, 30001: false, 59999: false, 60000: true} {
			part := host[from : from+30000]
			for _, err := range []error{x.CopyFrom(s, part), x.CopyTo(s, part)} {
				if fits {
					require.NoError(t, err, from)
					continue
				}
				require.ErrorIs(t, err, device.ErrorInvalidValue, from)
				require.ErrorContains(t, err, "only a part of the 120000 bytes at ")
			}
		}
		require.ErrorContains(t, makeInts(t, s, 90000).CopyFrom(s, host), "pin all of them together, or copy the parts one by one")
		require.NoError(t, h.Close())
		require.NoError(t, x.CopyFrom(s, host[1:30001]))
	})
}
