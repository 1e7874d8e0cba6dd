package nccl

import (
	"runtime"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// each calls f for all ranks at the same time.
func (c *clan) each(f func(rank int) ncclapi.Result) {
	c.T.Helper()
	results := make([]ncclapi.Result, len(c.comms))
	var wg sync.WaitGroup
	for rank := range c.comms {
		wg.Go(func() { results[rank] = f(rank) })
	}
	wg.Wait()
	require.Equal(c.T, make([]ncclapi.Result, len(c.comms)), results, c.api.GetLastError(0))
}

// group calls f between GroupStart and GroupEnd.
func (c *clan) group(f func()) {
	c.T.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c.good(c.api.GroupStart())
	f()
	c.good(c.api.GroupEnd())
}

// public returns memory of ncclMemAlloc.
func (c *clan) public(rank int, n uintptr) (p cudadrv.DevicePtr) {
	c.T.Helper()
	c.Do(rank, func() cudadrv.Result {
		var r ncclapi.Result
		p, r = c.api.MemAlloc(n)
		c.good(r)
		return 0
	})
	return p
}

func TestRegistrations(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 2})
	p, foreign := c.public(0, 64), c.public(1, 64)
	h := c.comms[0]
	a, r := c.api.CommRegister(h, p, 64)
	c.good(r)
	b, r := c.api.CommRegister(h, p+16, 8) // a part of what is registered
	c.good(r)
	require.NotEqual(t, a, b)
	var w, other ncclapi.Window
	c.group(func() {
		c.good(c.api.CommWindowRegister(h, p, 64, &w, ncclapi.WindowCollSymmetric))
		c.good(c.api.CommWindowRegister(c.comms[1], foreign, 64, &other, ncclapi.WindowCollSymmetric))
	})

	for want, f := range map[string]func() ncclapi.Result{
		"needs 65 bytes and has 64":     func() ncclapi.Result { _, r := c.api.CommRegister(h, p, 65); return r },
		"the buffer is empty":           func() ncclapi.Result { _, r := c.api.CommRegister(h, p, 0); return r },
		"the communicator is on device": func() ncclapi.Result { _, r := c.api.CommRegister(h, foreign, 8); return r },
		"flags 4":                       func() ncclapi.Result { return c.api.CommWindowRegister(h, p, 64, &w, 4) },
		"result at":                     func() ncclapi.Result { return c.api.CommWindowRegister(h, p, 64, nil, ncclapi.WindowDefault) },
		"does not belong":               func() ncclapi.Result { return c.api.CommDeregister(c.comms[1], a) },
		"not a communicator":            func() ncclapi.Result { return c.api.CommWindowDeregister(4711, w) },
	} {
		require.Equal(t, ncclapi.InvalidArgument, f(), want)
		require.Contains(t, c.api.GetLastError(0), want)
	}

	for want, x := range map[string]struct {
		p cudadrv.DevicePtr
		r ncclapi.Result
	}{
		"is at byte 8 of":                     {p + 8, ncclapi.InvalidArgument},
		"which is not memory of ncclMemAlloc": {c.Alloc(0, 64), ncclapi.UnhandledCUDAError},
	} {
		require.Equal(t, x.r, c.api.CommWindowRegister(h, x.p, 8, &w, ncclapi.WindowDefault), want)
		require.Contains(t, c.api.GetLastError(0), want)
	}

	// A collective on registered memory is like any other.
	q := c.Alloc(1, 64)
	virtualtest.Upload(c.Rig, 0, c.streams[0], p, []int32{1})
	virtualtest.Upload(c.Rig, 1, c.streams[1], q, []int32{2})
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: h, Stream: c.streams[0]}))
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: q, Recv: q, Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[1], Stream: c.streams[1]}))
	require.Equal(t, []int32{3}, virtualtest.Download[int32](c.Rig, 0, c.streams[0], p, 1))

	c.good(c.api.CommDeregister(h, b))
	c.good(c.api.CommDeregister(h, a))
	require.Equal(t, ncclapi.InvalidArgument, c.api.CommDeregister(h, a))
	c.good(c.api.CommWindowDeregister(h, w))
	require.Equal(t, ncclapi.InvalidArgument, c.api.CommWindowDeregister(h, w))
}

// TestFinalizeThenDestroy has CommFinalize wait for what was enqueued, of which
// nothing may come behind it.
func TestFinalizeThenDestroy(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 3})
	bufs := make([]cudadrv.DevicePtr, 3)
	for rank := range bufs {
		bufs[rank] = c.Alloc(rank, 4<<16)
		virtualtest.Upload(c.Rig, rank, c.streams[rank], bufs[rank], make([]int32, 1<<16))
		virtualtest.Upload(c.Rig, rank, c.streams[rank], bufs[rank], []int32{int32(rank + 1)})
	}
	for range 5 {
		for rank, p := range bufs {
			c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1 << 16, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: c.streams[rank]}))
		}
	}
	c.each(func(rank int) ncclapi.Result { return c.api.CommFinalize(c.comms[rank]) })
	for rank, p := range bufs {
		require.Equal(t, ncclapi.InvalidArgument, c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: c.streams[rank]}))
		require.Contains(t, c.api.GetLastError(0), "is finalized")
		async, r := c.api.CommGetAsyncError(c.comms[rank])
		c.good(r)
		require.Equal(t, ncclapi.Success, async)
	}
	// One after the other: no rank needs the others to be destroyed.
	for rank, p := range bufs {
		c.good(c.api.CommDestroy(c.comms[rank]))
		require.Equal(t, []int32{6 * 81, 0}, virtualtest.Download[int32](c.Rig, rank, c.streams[rank], p, 2))
	}
	require.Equal(t, ncclapi.InvalidArgument, c.api.CommFinalize(c.comms[0]))
	require.Empty(t, c.m.Reports())
}

func TestGroupSimulateEnd(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 1})
	p := c.Alloc(0, 4<<20)
	virtualtest.Upload(c.Rig, 0, c.streams[0], p, []float32{7})
	c.Sync(0, c.streams[0])
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	times := []float32{0, 0}
	for i, count := range []uintptr{1, 1 << 20} {
		info := ncclapi.NewSimInfo(defaultVersion)
		c.good(c.api.GroupStart())
		c.good(c.api.GroupStart())
		c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: count, Type: ncclapi.Float32, Op: ncclapi.Avg, Comm: c.comms[0], Stream: c.streams[0]}))
		c.good(c.api.GroupEnd())
		c.good(c.api.GroupSimulateEnd(info))
		times[i] = info.EstimatedTime
	}
	require.Positive(t, times[0])
	require.Greater(t, times[1], times[0])
	c.Do(0, func() cudadrv.Result { return c.Drv.StreamQuery(c.streams[0]) }) // nothing was enqueued
	require.Equal(t, []float32{7}, virtualtest.Download[float32](c.Rig, 0, c.streams[0], p, 1))
	require.Equal(t, ncclapi.InvalidUsage, c.api.GroupSimulateEnd(ncclapi.NewSimInfo(defaultVersion)))
	require.Equal(t, ncclapi.InvalidArgument, c.api.GroupSimulateEnd(nil))
}

// TestPreMulSumOfDeviceScalar reads the scalar when the stream reaches the
// operation.
func TestPreMulSumOfDeviceScalar(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 2})
	ops := make([]ncclapi.RedOp, 2)
	in, out, scalars := make([]cudadrv.DevicePtr, 2), make([]cudadrv.DevicePtr, 2), make([]cudadrv.DevicePtr, 2)
	for rank := range 2 {
		in[rank], out[rank], scalars[rank] = c.Alloc(rank, 64), c.Alloc(rank, 64), c.Alloc(rank, 4)
		// An address of the device, which no pointer of Go's may hold.
		at := *(*unsafe.Pointer)(unsafe.Pointer(&scalars[rank]))
		op, r := c.api.RedOpCreatePreMulSum(at, ncclapi.Float32, ncclapi.ScalarDevice, c.comms[rank])
		c.good(r)
		ops[rank] = op
		virtualtest.Upload(c.Rig, rank, c.streams[rank], in[rank], []float32{1, 10})
	}
	for round := range 3 {
		for rank := range 2 {
			virtualtest.Upload(c.Rig, rank, c.streams[rank], scalars[rank], []float32{float32(round + rank)})
			c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: in[rank], Recv: out[rank], Count: 2, Type: ncclapi.Float32, Op: ops[rank], Comm: c.comms[rank], Stream: c.streams[rank]}))
		}
		want := float32(2*round + 1)
		for rank := range 2 {
			require.Equal(t, []float32{want, 10 * want}, virtualtest.Download[float32](c.Rig, rank, c.streams[rank], out[rank], 2))
		}
	}
	require.Equal(t, ncclapi.InvalidArgument,
		c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: in[0], Recv: out[0], Count: 2, Type: ncclapi.Float16, Op: ops[0], Comm: c.comms[0], Stream: c.streams[0]}), "the scalar is of another type")
	for rank := range 2 {
		c.good(c.api.RedOpDestroy(ops[rank], c.comms[rank]))
		require.Equal(t, ncclapi.InvalidArgument, c.api.RedOpDestroy(ops[rank], c.comms[rank]))
	}
	require.Equal(t, ncclapi.InvalidArgument,
		c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: in[0], Recv: out[0], Count: 2, Type: ncclapi.Float32, Op: ops[0], Comm: c.comms[0], Stream: c.streams[0]}), "the reduction was destroyed")
	require.Empty(t, c.m.Reports())
}

// Collectives on symmetric windows need the same offsets on all ranks.
func TestOffsetsInSymmetricWindows(t *testing.T) {
	for _, offset := range []cudadrv.DevicePtr{0, 4096} {
		c := newClan(t, machine.Config{Devices: 2})
		p := []cudadrv.DevicePtr{c.public(0, 1<<14), c.public(1, 1<<14)}
		w := make([]ncclapi.Window, 2)
		c.group(func() {
			for rank := range w {
				c.good(c.api.CommWindowRegister(c.comms[rank], p[rank], 1<<14, &w[rank], ncclapi.WindowCollSymmetric))
			}
		})
		p[1] += offset
		for rank := range w {
			c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p[rank], Recv: p[rank], Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: c.streams[rank]}))
		}
		if offset == 0 {
			c.Sync(0, c.streams[0])
			c.Sync(1, c.streams[1])
			continue
		}
		text := c.wait(0, ncclapi.InvalidUsage)
		require.Contains(t, text, "rank 0 issued all_reduce(4 x float32, sum, source at byte 0 of window 1, destination at byte 0 of window 1)")
		require.Contains(t, text, "rank 1 issued all_reduce(4 x float32, sum, source at byte 4096 of window 1, destination at byte 4096 of window 1)")
	}
}

// TestShrink leaves out a rank that is well. The old communicator goes on.
func TestShrink(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 4})
	smaller := make([]ncclapi.Comm, 4)
	kept := []int{0, 2, 3}
	var wg sync.WaitGroup
	for _, rank := range kept {
		wg.Go(func() {
			if r := c.api.CommShrink(c.comms[rank], []int32{1}, &smaller[rank], nil, ncclapi.ShrinkDefault); r != ncclapi.Success {
				t.Error(r, c.api.GetLastError(0))
			}
		})
	}
	wg.Wait()
	bufs := make([]cudadrv.DevicePtr, 4)
	for rank := range 4 {
		bufs[rank] = c.Alloc(rank, 64)
		virtualtest.Upload(c.Rig, rank, c.streams[rank], bufs[rank], []int32{1 << rank})
	}
	for place, rank := range kept {
		me, r := c.api.CommUserRank(smaller[rank])
		c.good(r)
		require.Equal(t, int32(place), me)
		wg.Go(func() { // the first operation blocks until all ranks have issued theirs
			c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: bufs[rank], Recv: bufs[rank], Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: smaller[rank], Stream: c.streams[rank]}))
		})
	}
	wg.Wait()
	for rank := range 4 {
		c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: bufs[rank], Recv: bufs[rank], Count: 1, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: c.streams[rank]}))
	}
	for rank := range 4 {
		require.Equal(t, []int32{3*13 + 2}, virtualtest.Download[int32](c.Rig, rank, c.streams[rank], bufs[rank], 1))
	}
	for _, rank := range kept {
		c.good(c.api.CommDestroy(smaller[rank]))
	}
	for want, exclude := range map[string][]int32{"or is empty": {}, "excludes this rank": {0}, "is not one of 4": {4}} {
		require.Equal(t, ncclapi.InvalidArgument, c.api.CommShrink(c.comms[0], exclude, &smaller[0], nil, ncclapi.ShrinkDefault))
		require.Contains(t, c.api.GetLastError(0), want)
	}
	// By default a communicator that has failed is not shrunk.
	c.good(c.api.CommAbort(c.comms[1]))
	c.wait(0, ncclapi.RemoteError)
	require.Equal(t, ncclapi.RemoteError, c.api.CommShrink(c.comms[0], []int32{1}, &smaller[0], nil, ncclapi.ShrinkDefault))
}

// TestSplitWithoutColor has a rank that takes part in the split and not in what
// comes of it.
func TestSplitWithoutColor(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 3})
	parts := []ncclapi.Comm{99, 99, 99}
	c.each(func(rank int) ncclapi.Result {
		color := int32(5)
		if rank == 1 {
			color = splitNoColor
		}
		return c.api.CommSplit(c.comms[rank], color, 0, &parts[rank], nil)
	})
	require.Zero(t, parts[1])
	var wg sync.WaitGroup
	for _, rank := range []int{0, 2} {
		n, r := c.api.CommCount(parts[rank])
		c.good(r)
		require.Equal(t, int32(2), n)
		p := c.Alloc(rank, 4)
		virtualtest.Upload(c.Rig, rank, c.streams[rank], p, []int32{int32(rank)})
		wg.Go(func() {
			c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncBroadcast, Send: p, Recv: p, Count: 1, Type: ncclapi.Int32, Root: 1, Comm: parts[rank], Stream: c.streams[rank]}))
		})
		defer func() {
			require.Equal(t, []int32{2}, virtualtest.Download[int32](c.Rig, rank, c.streams[rank], p, 1))
			c.good(c.api.CommDestroy(parts[rank]))
		}()
	}
	wg.Wait()
	require.Equal(t, ncclapi.InvalidArgument, c.api.CommSplit(c.comms[1], -2, 0, &parts[1], nil))
	require.Contains(t, c.api.GetLastError(0), "is not a valid color")
}

// TestGroupOfStreams issues operations on several streams of one communicator in
// one group: each stream's earlier work comes before all of them, and its later
// work after.
func TestGroupOfStreams(t *testing.T) {
	const ranks, streams, n = 2, 3, 1000
	c := newClan(t, machine.Config{Devices: ranks})
	var s [ranks][streams]cudadrv.Stream
	var bufs [ranks][streams]cudadrv.DevicePtr
	for rank := range ranks {
		for i := range streams {
			s[rank][i], bufs[rank][i] = c.Stream(rank), c.Alloc(rank, 4*n)
		}
	}
	for round := range 10 {
		for rank := range ranks {
			for i := range streams {
				in := make([]int32, n)
				in[n-1] = int32(round + 10*i + 100*rank)
				virtualtest.Upload(c.Rig, rank, s[rank][i], bufs[rank][i], in)
			}
		}
		c.group(func() {
			for rank := range ranks {
				for i := range streams {
					// The second operation on a buffer is on another stream.
					p, next := bufs[rank][i], s[rank][(i+1)%streams]
					c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: n, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: s[rank][i]}))
					c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: n, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: next}))
				}
			}
		})
		for rank := range ranks {
			for i := range streams {
				got := virtualtest.Download[int32](c.Rig, rank, s[rank][i], bufs[rank][i], n)
				require.Equal(t, int32(2*(2*round+20*i+100)), got[n-1])
			}
		}
	}
	require.Empty(t, c.m.Reports())
}

// The order of a sum depends on the size of an all-reduce, on the place of the element and on the root of a reduction, as on GPUs: a
// program that compares bits of different operations is wrong there, too.
func TestOrderOfSums(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 3})
	const most = 48
	sums := func(call ncclapi.Call) []float32 {
		var dst []cudadrv.DevicePtr
		for rank, x := range []float32{1, 1 << 24, -1 << 24} { // the sum is 0 if the 1 is added to the first large number
			call.Comm, call.Stream = c.comms[rank], c.streams[rank]
			call.Send, call.Recv = c.Alloc(rank, 4*most), c.Alloc(rank, 4*most)
			virtualtest.Upload(c.Rig, rank, c.streams[rank], call.Send, slices.Repeat([]float32{x}, most))
			c.good(c.api.Collective(call))
			dst = append(dst, call.Recv)
		}
		return virtualtest.Download[float32](c.Rig, int(call.Root), c.streams[call.Root], dst[call.Root], int(call.Count))
	}
	one, two := ncclapi.Call{Func: ncclapi.FuncAllReduce, Count: 1, Type: ncclapi.Float32, Op: ncclapi.Sum}, ncclapi.Call{Func: ncclapi.FuncAllReduce, Count: 2, Type: ncclapi.Float32, Op: ncclapi.Sum}
	require.NotEqual(t, sums(one)[0], sums(two)[0])
	many := one
	many.Count = most
	require.Len(t, slices.Compact(slices.Sorted(slices.Values(sums(many)))), 2)
	one.Func, two.Func, two.Count, two.Root = ncclapi.FuncReduce, ncclapi.FuncReduce, 1, 2
	require.NotEqual(t, sums(one), sums(two))
	require.Empty(t, c.m.Reports())
}
