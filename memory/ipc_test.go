package memory

import (
	"bytes"
	"context"
	"encoding/gob"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/stream"
)

// A kind of memory that processes can share. Its freed counts what was given back.
type shareable func(t testing.TB, s *stream.Stream, n int, freed *atomic.Int32) Slice[int32]

var shareables = map[string]shareable{
	"segment": plainSlice, "pages": pagedSlice,
	"Make": makeSlice(""), "Make expandable": makeSlice("expandable_segments:True"),
}

// makeSlice is memory of the caching allocator, with other blocks around it.
func makeSlice(conf string) shareable {
	return func(t testing.TB, s *stream.Stream, n int, freed *atomic.Int32) Slice[int32] {
		t.Helper()
		was, err := settings()
		require.NoError(t, err)
		text := optionsText.Load()
		require.NoError(t, SetAllocatorSettings(conf))
		before, err := Make[int32](s, 1000)
		require.NoError(t, err)
		x, err := Make[int32](s, n)
		require.NoError(t, err)
		require.NoError(t, before.Close())
		options.Store(&was)
		optionsText.Store(text)
		x.buf.by = countingFreer{x.buf.by, freed}
		return x
	}
}

// countingFreer counts what is given back.
type countingFreer struct {
	freer
	freed *atomic.Int32
}

func (f countingFreer) Free(addr uint64) error {
	f.freed.Add(1)
	return f.freer.Free(addr)
}

// plainSlice is memory of cuMemAlloc, which begins before the slice.
func plainSlice(t testing.TB, s *stream.Stream, n int, freed *atomic.Int32) Slice[int32] {
	t.Helper()
	const before = 512
	p, err := Driver.Alloc(s, before+4*n)
	require.NoError(t, err)
	return foreignSlice(t, s, cudadrv.DevicePtr(p)+before, n, func() error {
		freed.Add(1)
		return Driver.Free(s, p, before+4*n)
	})
}

func openOnPeer[T Element](s *stream.Stream, h IPCHandle) (Slice[T], error) {
	inside.OpenOnPeer(&h)
	return OpenIPC[T](s, h)
}

// newPrivatePool returns the pool of a graph.
func newPrivatePool() *Pool {
	var c PoolConfig
	inside.MakePrivate(&c)
	return NewPool(&c)
}

func foreignSlice(t testing.TB, s *stream.Stream, p cudadrv.DevicePtr, n int, free func() error) Slice[int32] {
	b := newBuffer(s, 4*n)
	b.ptr, b.foreign = p, free
	require.True(t, gpu.StreamOf(s).Retain())
	handle.Init(b, &b.in().Owner, handle.About{Kind: "buffer"})
	return Slice[int32]{buf: b, n: n, root: true}
}

// pagedSlice is memory of mapped pages; it begins behind the start of the first.
func pagedSlice(t testing.TB, s *stream.Stream, n int, freed *atomic.Int32) Slice[int32] {
	t.Helper()
	const before, page = 4096, 2 << 20
	d := s.Device()
	do := func(call func(cudadrv.Driver) cudadrv.Result) {
		t.Helper()
		require.NoError(t, gpu.DeviceOf(d).Do(call))
	}
	bytes := roundUp(uintptr(before+4*n), page)
	var base cudadrv.DevicePtr
	do(func(drv cudadrv.Driver) (r cudadrv.Result) { base, r = drv.MemAddressReserve(bytes, page, 0); return r })
	var handles []cudadrv.MemHandle
	for at := uintptr(0); at < bytes; at += page {
		var h cudadrv.MemHandle
		do(func(drv cudadrv.Driver) (r cudadrv.Result) {
			h, r = drv.MemCreate(page, cudadrv.MemAllocationProp{Device: gpu.DeviceOf(d).Handle(), HandleTypes: cudadrv.MemHandlePosixFD})
			return r
		})
		do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemMap(base+cudadrv.DevicePtr(at), page, 0, h) })
		pagesOf(d).mapped(uint64(base)+uint64(at), page, h)
		handles = append(handles, h)
	}
	do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemSetAccess(base, bytes, cudadrv.MemAccessReadWrite, gpu.DeviceOf(d).Handle())
	})
	return foreignSlice(t, s, base+before, n, func() error {
		freed.Add(1)
		pagesOf(d).unmapped(uint64(base), uint64(bytes))
		err := gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemUnmap(base, bytes) })
		for _, h := range handles {
			err = errors.Join(err, gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemRelease(h) }))
		}
		return errors.Join(err, gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.MemAddressFree(base, bytes) }))
	})
}

// aside returns a stream on virtual devices of their own, which stand for another
// process.
func aside(t testing.TB) *stream.Stream {
	t.Helper()
	s, err := stream.New(testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0], nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	lengthenClose(s.Device())
	return s
}

// lengthenClose gives other processes much time to answer a request to close.
func lengthenClose(dev *device.Device) { ipcOf(dev).closeTimeout = time.Minute }

// ints returns numbers that ascend. Nobody else has the slice yet, so the race detector need
// not look at it.
//
//go:norace
func ints(n int, from int32) []int32 {
	x := make([]int32, n)
	for i := range x {
		x[i] = from + int32(i)
	}
	return x
}

func read(t testing.TB, s *stream.Stream, x Slice[int32]) []int32 {
	t.Helper()
	out := make([]int32, x.Len())
	require.NoError(t, x.CopyTo(s, out))
	return out
}

// sent is what a handle is at the other end.
func sent(t testing.TB, h IPCHandle) (got IPCHandle) {
	t.Helper()
	text, err := json.Marshal(h)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &got))
	var buf bytes.Buffer
	require.NoError(t, gob.NewEncoder(&buf).Encode(h))
	var again IPCHandle
	require.NoError(t, gob.NewDecoder(&buf).Decode(&again))
	require.Equal(t, len(got.Segment), len(again.Segment))
	return got
}

// nothingOpen checks that nothing of other processes is left.
func nothingOpen(t testing.TB, s *stream.Stream) {
	t.Helper()
	x := ipcOf(s.Device())
	require.Empty(t, x.links)
	require.Empty(t, x.mappings)
}

// soon waits for what another goroutine does by itself.
func soon(t testing.TB, is func() bool) {
	t.Helper()
	require.True(t, poll.UntilNoLaterThan(time.Minute, is))
}

// One writes, the other reads and writes, and the memory is freed when both have
// closed it.
func TestIPC(t *testing.T) {
	for name, kind := range shareables {
		t.Run(name, func(t *testing.T) {
			for _, n := range []int{1, 1000, testhost.Rounds(1<<18+1, 3<<19)} {
				a, b := aside(t), aside(t)
				var freed atomic.Int32
				x := kind(t, a, n, &freed)
				require.NoError(t, x.CopyFrom(a, ints(n, 5)))
				h, err := x.IPCHandle()
				require.NoError(t, err)
				y, err := OpenIPC[int32](b, sent(t, h))
				require.NoError(t, err)
				require.Equal(t, n, y.Len())
				require.True(t, testgpu.SameBits(ints(n, 5), read(t, b, y)))
				require.NoError(t, y.CopyFrom(b, ints(n, 70)))
				require.NoError(t, b.Sync(testgpu.Context(t)))
				require.True(t, testgpu.SameBits(ints(n, 70), read(t, a, x)))
				require.NoError(t, x.Close())
				require.Zero(t, freed.Load(), "the other has it")
				require.True(t, testgpu.SameBits(ints(n, 70), read(t, b, y)))
				late, err := OpenIPC[int32](b, h)
				require.NoError(t, err, "as long as somebody has it, others may come")
				require.NoError(t, y.Close())
				require.Zero(t, freed.Load())
				require.NoError(t, late.Close())
				require.EqualValues(t, 1, freed.Load(), "when Close returns, the other knows")
				nothingOpen(t, b)
				_, err = OpenIPC[int32](b, h)
				require.ErrorContains(t, err, "it has closed the memory")
				nothingOpen(t, b)
			}
		})
	}
}

// A device opens the memory of a peer, on which no context is made.
func TestPeerIPC(t *testing.T) {
	for name, kind := range shareables {
		t.Run(name, func(t *testing.T) {
			const n = 1000
			streamOf := func(ordinal int) *stream.Stream {
				s, err := stream.New(testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})[ordinal], nil)
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, s.Close()) })
				return s
			}
			a, b := streamOf(1), streamOf(0)
			var freed atomic.Int32
			x := kind(t, a, n, &freed)
			require.NoError(t, x.CopyFrom(a, ints(n, 5)))
			h, err := x.IPCHandle()
			require.NoError(t, err)
			_, err = OpenIPC[int32](b, h)
			require.ErrorContains(t, err, "use a stream of that GPU")
			_, err = openOnPeer[uint32](b, h)
			require.ErrorContains(t, err, "not uint32")
			_, err = openOnPeer[int32](nil, h)
			require.ErrorContains(t, err, "no stream given")
			y, err := openOnPeer[int32](b, sent(t, h))
			require.NoError(t, err)
			require.Equal(t, b.Device(), y.Device(), "whose kernels use it")
			require.Equal(t, ints(n, 5), read(t, b, y))
			require.NoError(t, y.CopyFrom(b, ints(n, 70)))
			require.NoError(t, b.Sync(testgpu.Context(t)))
			require.Equal(t, ints(n, 70), read(t, a, x))
			_, active, result := gpu.DeviceOf(b.Device()).Driver().DevicePrimaryCtxGetState(1)
			require.Zero(t, result)
			require.Zero(t, active, "no context on the peer")
			require.NoError(t, x.Close())
			require.NoError(t, y.Close())
			require.EqualValues(t, 1, freed.Load())
			nothingOpen(t, b)
		})
	}
}

// Parts of one segment share its mapping, and each has its place.
func TestIPCSharesMappings(t *testing.T) {
	for name, kind := range shareables {
		t.Run(name, func(t *testing.T) {
			a, b := aside(t), aside(t)
			var freed atomic.Int32
			x := kind(t, a, 1000, &freed)
			require.NoError(t, x.CopyFrom(a, ints(1000, 0)))
			var open []Slice[int32]
			for i := range 10 {
				h, err := x.Slice(i*100, i*100+50).IPCHandle()
				require.NoError(t, err)
				y, err := OpenIPC[int32](b, h)
				require.NoError(t, err)
				open = append(open, y)
				require.Equal(t, ints(50, int32(i*100)), read(t, b, y))
			}
			require.Len(t, ipcOf(b.Device()).mappings, 1)
			require.Len(t, ipcOf(b.Device()).links, 1)
			require.NoError(t, x.Close())
			for i, y := range open {
				require.Zero(t, freed.Load(), "%d closed", i)
				require.NoError(t, y.Close())
			}
			require.EqualValues(t, 1, freed.Load())
			nothingOpen(t, b)
		})
	}
}

// Close waits for the streams that use the memory before it unmaps it; virtual
// devices report it otherwise.
func TestIPCCloseWaits(t *testing.T) {
	for name, kind := range shareables {
		t.Run(name, func(t *testing.T) {
			a, b := aside(t), aside(t)
			other, err := stream.New(b.Device(), nil)
			require.NoError(t, err)
			defer other.Close()
			var freed atomic.Int32
			x := kind(t, a, 1<<16, &freed)
			require.NoError(t, x.Zero(a))
			h, err := x.IPCHandle()
			require.NoError(t, err)
			y, err := OpenIPC[int32](b, h)
			require.NoError(t, err)
			require.NoError(t, y.RecordStream(other))
			require.NoError(t, y.Zero(b))
			require.NoError(t, other.WaitStream(b))
			gate := make(chan struct{})
			require.NoError(t, other.Callback(func() { <-gate }))
			require.NoError(t, y.Zero(other))
			closed := make(chan error, 1)
			go func() { closed <- y.Close() }()
			require.False(t, poll.UntilNoLaterThan(20*time.Millisecond, func() bool { return len(closed) > 0 }), "Close did not wait")
			close(gate)
			require.NoError(t, <-closed)
			require.NoError(t, x.Close())
			require.EqualValues(t, 1, freed.Load())
		})
	}
}

func TestIPCRefuses(t *testing.T) {
	a, b := aside(t), aside(t)
	var freed atomic.Int32
	x := plainSlice(t, a, 100, &freed)
	good, err := x.Slice(10, 20).IPCHandle()
	require.NoError(t, err)
	for want, change := range map[string]func(*IPCHandle){
		`its elements are "float32", not int32`:                    func(h *IPCHandle) { h.DType = "float32" },
		"the memory is of the GPU GPU-1":                           func(h *IPCHandle) { h.Device = "GPU-1" },
		"the handle is not one of its handles":                     func(h *IPCHandle) { h.Token = slices.Clone(h.Token); h.Token[3]++ },
		"it has closed the memory":                                 func(h *IPCHandle) { h.Export += 5 },
		"that process is gone, or in another container":            func(h *IPCHandle) { h.Socket += "0" },
		"it reaches beyond the memory":                             func(h *IPCHandle) { h.Bytes = 404 },
		"handle of process 77: the handle is damaged: it reaches ": func(h *IPCHandle) { h.Offset -= 44; h.PID = 77 },
		"beyond the memory that is shared":                         func(h *IPCHandle) { h.Segment = nil },
		"open ipc handle: the handle is damaged":                   func(h *IPCHandle) { h.Token = nil },
		"CUDA_ERROR_INVALID_VALUE":                                 func(h *IPCHandle) { h.Segment = make([]byte, 64) },
		"ipc handle: the handle is damaged":                        func(h *IPCHandle) { h.Bytes = 6 },
	} {
		h := good
		change(&h)
		_, err := OpenIPC[int32](b, h)
		require.ErrorContains(t, err, want)
		nothingOpen(t, b)
		require.Zero(t, x.buf.export.receiversNow())
	}
	_, err = OpenIPC[int32](a, good)
	require.ErrorContains(t, err, "the memory is this process's own")
	_, err = OpenIPC[int32](nil, good)
	require.ErrorContains(t, err, "no stream given")

	y, err := OpenIPC[int32](b, good)
	require.NoError(t, err)
	_, err = y.IPCHandle()
	require.ErrorContains(t, err, "the memory belongs to another process")
	require.ErrorIs(t, y.Slice(0, 1).Close(), ErrView)
	require.NoError(t, y.Close())
	require.NoError(t, y.Close())

	_, err = x.Slice(3, 3).IPCHandle()
	require.ErrorContains(t, err, "the slice is empty")
	require.NoError(t, x.Close())
	_, err = x.IPCHandle()
	require.ErrorIs(t, err, device.ErrClosed)
	require.ErrorIs(t, x.AwaitIPC(testgpu.Context(t), 1), device.ErrClosed)
	require.ErrorContains(t, IPCCollect(nil), "no device given")
	require.NoError(t, IPCCollect(b.Device()))
}

// TestIPCOfLessMemory: memory that is smaller than its owner says is not opened, neither at first
// nor while another opening uses it.
func TestIPCOfLessMemory(t *testing.T) {
	a, b := aside(t), aside(t)
	var freed atomic.Int32
	h, err := plainSlice(t, a, 100, &freed).IPCHandle()
	require.NoError(t, err)
	x := ipcOf(b.Device())
	whole := &ipcAnswer{High: 400}
	_, err = x.mapHandle(b.Device(), nil, &h, &ipcAnswer{High: 64 << 20})
	require.ErrorContains(t, err, "the memory would have at least 67108864 bytes, and has ")
	require.Empty(t, x.mappings)

	m, err := x.mapHandle(b.Device(), nil, &h, whole)
	require.NoError(t, err)
	_, err = x.mapHandle(b.Device(), nil, &h, &ipcAnswer{High: 64 << 20})
	require.ErrorContains(t, err, "the memory would have at least 67108864 bytes, and has ")
	require.Equal(t, 1, m.uses)
	require.NoError(t, x.exit(m))
	require.Empty(t, x.mappings)

	pages := IPCHandle{Socket: "a", Export: 3}
	x.mappings[ipcKey{dev: b.Device(), socket: "a", export: 3}] = &ipcMapped{pages: true, bytes: 400, uses: 1}
	_, err = x.mapHandle(b.Device(), nil, &pages, &ipcAnswer{High: 401, Pages: 401, PageBytes: 1})
	require.ErrorContains(t, err, "the memory would have at least 401 bytes, and has 400")
	clear(x.mappings)
}

// A handle that a driver's failure kept from being opened holds nothing.
func TestIPCWithFaults(t *testing.T) {
	for _, fault := range []string{"cuIpcOpenMemHandle", "cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemRelease"} {
		for name, kind := range shareables {
			a := aside(t)
			dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: fault + "#1=CUDA_ERROR_UNKNOWN"})[0]
			b, err := stream.New(dev, nil)
			require.NoError(t, err)
			var freed atomic.Int32
			x := kind(t, a, 1<<20, &freed)
			h, err := x.IPCHandle()
			require.NoError(t, err)
			before := files(t)
			free, _, err := dev.MemoryInfo()
			require.NoError(t, err)
			y, err := OpenIPC[int32](b, h)
			if err != nil {
				require.ErrorContains(t, err, fault)
			} else {
				require.Equal(t, name == "segment" || name == "Make", fault != "cuIpcOpenMemHandle")
				require.NoError(t, y.Close())
			}
			nothingOpen(t, b)
			y, err = OpenIPC[int32](b, h)
			require.NoError(t, err, "the second time it is well")
			require.NoError(t, y.Close())
			now, _, err := dev.MemoryInfo()
			require.NoError(t, err)
			require.Equal(t, free, now)
			if fault != "cuMemRelease" { // what the driver does not take back it keeps
				soon(t, func() bool { return files(t) <= before })
			}
			require.NoError(t, x.Close())
			require.EqualValues(t, 1, freed.Load())
			require.NoError(t, b.Close())
		}
	}
	// What the driver cannot close stays open.
	a := aside(t)
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuStreamSynchronize#1=CUDA_ERROR_UNKNOWN"})[0]
	b, err := stream.New(dev, nil)
	require.NoError(t, err)
	var freed atomic.Int32
	x := plainSlice(t, a, 8, &freed)
	h, err := x.IPCHandle()
	require.NoError(t, err)
	y, err := OpenIPC[int32](b, h)
	require.NoError(t, err)
	require.ErrorContains(t, y.Close(), "CUDA_ERROR_UNKNOWN")
	require.NoError(t, x.Close())
	require.Zero(t, freed.Load())
	require.NoError(t, y.Close())
	require.EqualValues(t, 1, freed.Load())
	require.NoError(t, b.Close())
}

func TestAwaitIPC(t *testing.T) {
	a, b := aside(t), aside(t)
	var freed atomic.Int32
	x := plainSlice(t, a, 8, &freed)
	require.ErrorContains(t, x.AwaitIPC(testgpu.Context(t), 1), "call IPCHandle before")
	require.ErrorContains(t, Slice[int32]{}.AwaitIPC(testgpu.Context(t), 1), "a slice without memory")
	h, err := x.IPCHandle()
	require.NoError(t, err)
	require.NoError(t, x.AwaitIPC(testgpu.Context(t), 0))
	ctx, cancel := context.WithCancelCause(testgpu.Context(t))
	cancel(errors.New("enough"))
	require.ErrorContains(t, x.AwaitIPC(ctx, 2), "opened 0 times, not 2: enough")
	waited := make(chan error)
	go func() { waited <- x.AwaitIPC(testgpu.Context(t), 2) }()
	for range 2 {
		select {
		case <-waited:
			t.Fatal("it was opened fewer times")
		default:
		}
		y, err := OpenIPC[int32](b, h)
		require.NoError(t, err)
		require.NoError(t, y.Close())
	}
	require.NoError(t, <-waited)
	require.NoError(t, x.Close())
}

// Memory that a capture keeps from being freed is freed after it.
func TestIPCCollectAfterCapture(t *testing.T) {
	a, b := aside(t), aside(t)
	var freed atomic.Int32
	x := plainSlice(t, a, 8, &freed)
	h, err := x.IPCHandle()
	require.NoError(t, err)
	y, err := OpenIPC[int32](b, h)
	require.NoError(t, err)
	require.NoError(t, x.Close())
	pool, g := inside.PoolOf(newPrivatePool()), &fakeGraph{}
	require.NoError(t, gpu.StreamOf(a).BeginCapture(cudadrv.CaptureRelaxed, g, pool))
	require.NoError(t, y.Close())
	require.Zero(t, freed.Load())
	require.Error(t, IPCCollect(a.Device()))
	require.Zero(t, freed.Load())
	_, err = gpu.StreamOf(a).EndCapture(g)
	require.NoError(t, err)
	pool.LetGo(g)
	require.NoError(t, IPCCollect(a.Device()))
	require.EqualValues(t, 1, freed.Load())
}

// A System that is closed answers nobody, and those who had its memory can close
// it.
func TestIPCOfAClosedSystem(t *testing.T) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	require.NoError(t, err)
	a, err := stream.New(sys.Devices()[0], nil)
	require.NoError(t, err)
	b := aside(t)
	var freed atomic.Int32
	x := plainSlice(t, a, 8, &freed)
	h, err := x.IPCHandle()
	require.NoError(t, err)
	y, err := OpenIPC[int32](b, h)
	require.NoError(t, err)
	require.NoError(t, x.Close())
	require.NoError(t, a.Close())
	require.NoError(t, sys.Close())
	_, err = OpenIPC[int32](b, h)
	require.Error(t, err)
	require.NoError(t, y.Close())
	nothingOpen(t, b)
}

// The pages behind addresses are found, or none where one is missing.
func TestMappedPages(t *testing.T) {
	m := &mappedPages{at: map[uint64]cudadrv.MemHandle{}}
	_, _, list := m.find(8192, 10)
	require.Empty(t, list)
	m.unmapped(0, 100)
	for i := range uint64(4) {
		m.mapped(8192+i*4096, 4096, cudadrv.MemHandle(i+1))
	}
	first, page, list := m.find(8192+4100, 4096)
	require.Equal(t, []any{uint64(12288), uint64(4096), []cudadrv.MemHandle{2, 3}}, []any{first, page, list})
	_, _, list = m.find(8192, 4*4096)
	require.Len(t, list, 4)
	_, _, list = m.find(8192, 4*4096+1)
	require.Empty(t, list)
	m.unmapped(12288, 4096)
	_, _, list = m.find(8192, 4097)
	require.Empty(t, list)
	_, _, list = m.find(8192, 4096)
	require.Equal(t, []cudadrv.MemHandle{1}, list)
}

// files counts the open files of the process.
func files(t testing.TB) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(list)
}

func (e *ipcExport) receiversNow() int {
	e.server.mu.Lock()
	defer e.server.mu.Unlock()
	return e.receivers
}

// A process that answers a request to close too late does not fail an opening that waits behind it.
func TestSlowCloseFailsNoOpening(t *testing.T) {
	ln, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: fmt.Sprintf("@chorus-test-%d-%s", os.Getpid(), t.Name()), Net: "unixpacket"})
	require.NoError(t, err)
	defer ln.Close()
	closing := make(chan struct{})
	go func() {
		for {
			c, err := ln.AcceptUnix()
			if err != nil {
				return
			}
			go answerOpenings(c, closing)
		}
	}()
	x := &ipc{timeout: time.Minute, closeTimeout: 200 * time.Millisecond, links: map[string]*ipcLink{}}
	l, err := x.link(ln.Addr().String())
	require.NoError(t, err)
	slow := make(chan error)
	go func() {
		_, _, err := x.ask(l, &ipcRequest{Op: "close"}, x.closeTimeout)
		slow <- err
	}()
	<-closing
	other, a, err := x.askToOpen(&IPCHandle{Socket: ln.Addr().String()})
	require.NoError(t, err)
	require.EqualValues(t, 7, a.Pages)
	require.NotSame(t, l, other)
	require.ErrorContains(t, <-slow, "that process does not answer")
	x.unlink(l)
	x.unlink(other)
}

// answerOpenings answers requests to open, and no request to close.
func answerOpenings(c *net.UnixConn, closing chan struct{}) {
	defer c.Close()
	for {
		var q ipcRequest
		if _, err := receivePacket(c, &q); err != nil {
			return
		}
		if q.Op == "close" {
			close(closing)
			continue
		}
		if sendPacket(c, &ipcAnswer{Pages: 7}, nil) != nil {
			return
		}
	}
}
