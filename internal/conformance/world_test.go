package conformance

import (
	"fmt"
	"runtime"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/stretchr/testify/require"
)

const (
	bufferBytes = 2 << 20
	guardBytes  = 256
	poisonByte  = 0xee
)

// testNCCL tests an implementation of NCCL with one rank for each device, up to four,
// in this process.
func testNCCL(t *testing.T, drv cudadrv.Driver, api ncclapi.API) {
	w := newWorld(t, drv, api)
	t.Run("Queries", w.queries)
	t.Run("AllReduce", w.allReduce)
	t.Run("Reduce", w.reduce)
	t.Run("ReduceScatter", w.reduceScatter)
	t.Run("PreMulSum", w.preMulSum)
	t.Run("Broadcast", w.broadcast)
	t.Run("AllGather", w.allGather)
	if api.Has(ncclapi.FuncAlltoAll) {
		t.Run("AlltoAll", w.allToAll)
		t.Run("GatherScatter", w.gatherScatter)
	}
	t.Run("PointToPoint", w.pointToPoint)
	if w.n > 1 { // NCCL does not order the collectives of a single rank, which are copies
		t.Run("TwoStreams", w.twoStreams)
	}
	t.Run("MemAlloc", w.memAlloc)
	t.Run("Split", w.split)
	if api.Has(ncclapi.FuncCommShrink) && w.n > 1 {
		t.Run("Shrink", w.shrink)
	}
	t.Run("InitRank", w.initRank)
	t.Run("Errors", w.errors)
}

// A world is a communicator with all of its ranks. Each rank has two buffers and
// a stream.
type world struct {
	*rig
	api     ncclapi.API
	n       int
	comms   []ncclapi.Comm
	streams []cudadrv.Stream
	send    []cudadrv.DevicePtr
	recv    []cudadrv.DevicePtr
}

func newWorld(t *testing.T, drv cudadrv.Driver, api ncclapi.API) *world {
	t.Helper()
	r := newRig(t, drv)
	w := &world{rig: r, api: api, n: len(r.devs), comms: make([]ncclapi.Comm, len(r.devs))}
	for i := range r.devs {
		w.streams = append(w.streams, r.stream(t, i))
		w.send = append(w.send, r.alloc(t, i, bufferBytes))
		w.recv = append(w.recv, r.alloc(t, i, bufferBytes))
	}
	id, res := api.GetUniqueID()
	good(t, api, res)
	w.all(t, func(rank int) ncclapi.Result {
		ok(t, drv.CtxSetCurrent(r.ctxs[rank]))
		return api.CommInitRankScalable(&w.comms[rank], int32(w.n), int32(rank), []ncclapi.UniqueID{id}, nil)
	})
	t.Cleanup(func() { w.destroy(t, w.comms) })
	return w
}

func good(t *testing.T, api ncclapi.API, r ncclapi.Result) {
	t.Helper()
	if r != ncclapi.Success {
		require.Fail(t, "an NCCL call failed", "%v: %s: %s", r, r.Meaning(), api.GetLastError(0))
	}
}

func (w *world) destroy(t *testing.T, comms []ncclapi.Comm) {
	t.Helper()
	w.group(t, func() {
		for _, c := range comms {
			good(t, w.api, w.api.CommDestroy(c))
		}
	})
}

// bound calls f on a locked thread with the context of a device.
func (w *world) bound(t *testing.T, dev int, f func()) {
	t.Helper()
	w.do(t, dev, func() cudadrv.Result { f(); return cudadrv.Success })
}

// group calls f between GroupStart and GroupEnd on one thread.
func (w *world) group(t *testing.T, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	ok(t, w.drv.CtxSetCurrent(w.ctxs[0]))
	good(t, w.api, w.api.GroupStart())
	f()
	good(t, w.api, w.api.GroupEnd())
}

// all calls f for each rank within one group.
func (w *world) all(t *testing.T, f func(rank int) ncclapi.Result) {
	t.Helper()
	w.group(t, func() {
		for rank := range w.n {
			good(t, w.api, f(rank))
		}
	})
}

// issue has all ranks issue a call from send to recv, which change makes a rank's own unless it is nil.
func (w *world) issue(t *testing.T, call ncclapi.Call, change func(rank int, c *ncclapi.Call)) {
	t.Helper()
	w.all(t, func(rank int) ncclapi.Result {
		c := call
		c.Send, c.Recv, c.Comm, c.Stream = w.send[rank], w.recv[rank], w.comms[rank], w.streams[rank]
		if change != nil {
			change(rank, &c)
		}
		return w.api.Collective(c)
	})
}

// fill uploads the inputs to the send buffers of all ranks and poisons the
// receive buffers.
func (w *world) fill(t *testing.T, in func(rank int) []byte) [][]byte {
	t.Helper()
	inputs := make([][]byte, w.n)
	for rank := range w.n {
		inputs[rank] = in(rank)
		w.upload(t, rank, w.streams[rank], w.send[rank], inputs[rank])
		w.set(t, rank, w.streams[rank], w.recv[rank], poisonByte, bufferBytes)
	}
	return inputs
}

// results reads n bytes of a rank's buffer. If the buffer was poisoned, it checks
// that no bytes after them were written.
func (w *world) results(t *testing.T, rank int, p cudadrv.DevicePtr, n int) []byte {
	t.Helper()
	got := w.download(t, rank, w.streams[rank], p, n+guardBytes)
	if p == w.recv[rank] {
		for _, b := range got[n:] {
			require.Equal(t, byte(poisonByte), b, "rank %d: bytes behind the output were written", rank)
		}
	}
	return got[:n]
}

// each runs a test for all types and reductions. NCCL 2.28 refuses the mean of 8-bit floats of a single rank, and may
// omit the last elements of other floats.
func (w *world) each(t *testing.T, f func(t *testing.T, dt ncclapi.DType, op ncclapi.RedOp)) {
	for _, dt := range dtypes {
		for _, op := range redops {
			if w.n == 1 && op == ncclapi.Avg && dt >= ncclapi.Float16 {
				continue
			}
			t.Run(dtypeNames[dt]+"/"+redopNames[op], func(t *testing.T) { f(t, dt, op) })
		}
	}
}

// counts adds a large count for some types, because NCCL then uses another algorithm.
func counts(dt ncclapi.DType, list ...int) []int {
	switch dt {
	case ncclapi.Float32, ncclapi.BFloat16, ncclapi.Int64:
		list = append(list, 33001)
	}
	return list
}

func (w *world) queries(t *testing.T) {
	v, r := w.api.GetVersion()
	good(t, w.api, r)
	require.GreaterOrEqual(t, v, int32(22300))
	for rank, c := range w.comms {
		n, r := w.api.CommCount(c)
		good(t, w.api, r)
		require.Equal(t, int32(w.n), n)
		me, r := w.api.CommUserRank(c)
		good(t, w.api, r)
		require.Equal(t, int32(rank), me)
		dev, r := w.api.CommCuDevice(c)
		good(t, w.api, r)
		require.Equal(t, int32(w.devs[rank]), dev)
		async, r := w.api.CommGetAsyncError(c)
		good(t, w.api, r)
		require.Equal(t, ncclapi.Success, async)
	}
}

func (w *world) allReduce(t *testing.T) {
	w.each(t, func(t *testing.T, dt ncclapi.DType, op ncclapi.RedOp) {
		for _, count := range counts(dt, 0, 1, 7, 1021) {
			for _, inPlace := range []bool{false, true} {
				inputs := w.fill(t, func(rank int) []byte { return input(dt, op, count, uint64(rank+count)) })
				out := w.recv
				if inPlace {
					out = w.send
				}
				w.issue(t, ncclapi.Call{Func: ncclapi.FuncAllReduce, Count: uintptr(count), Type: dt, Op: op}, func(rank int, c *ncclapi.Call) { c.Recv = out[rank] })
				for rank := range w.n {
					checkReduced(t, dt, op, w.results(t, rank, out[rank], count*int(dt.Size())), inputs, 0)
				}
			}
		}
	})
}

func (w *world) reduce(t *testing.T) {
	w.each(t, func(t *testing.T, dt ncclapi.DType, op ncclapi.RedOp) {
		for i, count := range counts(dt, 1, 517) {
			root := i % w.n
			inputs := w.fill(t, func(rank int) []byte { return input(dt, op, count, uint64(rank*3+1)) })
			w.issue(t, ncclapi.Call{Func: ncclapi.FuncReduce, Count: uintptr(count), Type: dt, Op: op, Root: int32(root)}, nil)
			checkReduced(t, dt, op, w.results(t, root, w.recv[root], count*int(dt.Size())), inputs, 0)
		}
	})
}

func (w *world) reduceScatter(t *testing.T) {
	w.each(t, func(t *testing.T, dt ncclapi.DType, op ncclapi.RedOp) {
		for _, count := range counts(dt, 1, 513) {
			inputs := w.fill(t, func(rank int) []byte { return input(dt, op, count*w.n, uint64(rank*5+2)) })
			w.issue(t, ncclapi.Call{Func: ncclapi.FuncReduceScatter, Count: uintptr(count), Type: dt, Op: op}, nil)
			for rank := range w.n {
				checkReduced(t, dt, op, w.results(t, rank, w.recv[rank], count*int(dt.Size())), inputs, rank*count)
			}
		}
	})
}

// preMulSum scales each rank's input by a different power of two, which is exact.
func (w *world) preMulSum(t *testing.T) {
	const count = 1000
	ops := make([]ncclapi.RedOp, w.n)
	for rank := range w.n {
		scalar := new(float32(int(1) << rank))
		op, r := w.api.RedOpCreatePreMulSum(unsafe.Pointer(scalar), ncclapi.Float32, ncclapi.ScalarHostImmediate, w.comms[rank])
		good(t, w.api, r)
		ops[rank] = op
	}
	inputs := w.fill(t, func(rank int) []byte { return input(ncclapi.Float32, ncclapi.Sum, count, uint64(rank)) })
	w.issue(t, ncclapi.Call{Func: ncclapi.FuncAllReduce, Count: count, Type: ncclapi.Float32}, func(rank int, c *ncclapi.Call) { c.Op = ops[rank] })
	for rank := range w.n {
		for i := range count {
			bits := bitsAt(ncclapi.Float32, inputs[rank], i)
			putBits(ncclapi.Float32, inputs[rank], i, bits+uint64(rank)<<23)
		}
	}
	for rank := range w.n {
		checkReduced(t, ncclapi.Float32, ncclapi.Sum, w.results(t, rank, w.recv[rank], 4*count), inputs, 0)
		good(t, w.api, w.api.RedOpDestroy(ops[rank], w.comms[rank]))
	}
}

func (w *world) broadcast(t *testing.T) {
	for _, bytes := range []int{0, 1, 77, 65537, 700000} {
		for root := range w.n {
			inputs := w.fill(t, func(rank int) []byte { return pattern(bytes, uint64(rank)) })
			w.issue(t, ncclapi.Call{Func: ncclapi.FuncBroadcast, Count: uintptr(bytes), Type: ncclapi.Uint8, Root: int32(root)}, nil)
			for rank := range w.n {
				require.Equal(t, inputs[root], w.results(t, rank, w.recv[rank], bytes))
			}
		}
	}
}

func (w *world) allGather(t *testing.T) {
	for _, bytes := range []int{0, 1, 333, 200000} {
		for _, inPlace := range []bool{false, true} {
			inputs := w.fill(t, func(rank int) []byte { return pattern(bytes, uint64(rank)) })
			var want []byte
			for rank := range w.n {
				want = append(want, inputs[rank]...)
				if inPlace {
					w.upload(t, rank, w.streams[rank], w.recv[rank]+cudadrv.DevicePtr(rank*bytes), inputs[rank])
				}
			}
			w.all(t, func(rank int) ncclapi.Result {
				from := w.send[rank]
				if inPlace {
					from = w.recv[rank] + cudadrv.DevicePtr(rank*bytes)
				}
				return w.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllGather, Send: from, Recv: w.recv[rank], Count: uintptr(bytes), Type: ncclapi.Int8, Comm: w.comms[rank], Stream: w.streams[rank]})
			})
			for rank := range w.n {
				require.Equal(t, want, append([]byte(nil), w.results(t, rank, w.recv[rank], len(want))...))
			}
		}
	}
}

func (w *world) allToAll(t *testing.T) {
	for _, count := range []int{0, 1, 129, 40001} {
		size := 4 * count
		inputs := w.fill(t, func(rank int) []byte { return pattern(size*w.n, uint64(rank)) })
		w.issue(t, ncclapi.Call{Func: ncclapi.FuncAlltoAll, Count: uintptr(count), Type: ncclapi.Float32}, nil)
		for rank := range w.n {
			got := w.results(t, rank, w.recv[rank], size*w.n)
			for peer := range w.n {
				require.Equal(t, inputs[peer][rank*size:(rank+1)*size], got[peer*size:(peer+1)*size])
			}
		}
	}
}

func (w *world) gatherScatter(t *testing.T) {
	for _, size := range []int{1, 1000, 150001} {
		root := size % w.n
		inputs := w.fill(t, func(rank int) []byte { return pattern(size, uint64(rank)) })
		w.issue(t, ncclapi.Call{Func: ncclapi.FuncGather, Count: uintptr(size), Type: ncclapi.Uint8, Root: int32(root)}, nil)
		got := w.results(t, root, w.recv[root], size*w.n)
		for rank := range w.n {
			require.Equal(t, inputs[rank], got[rank*size:(rank+1)*size])
		}
		inputs = w.fill(t, func(rank int) []byte { return pattern(size*w.n, uint64(rank+9)) })
		w.issue(t, ncclapi.Call{Func: ncclapi.FuncScatter, Count: uintptr(size), Type: ncclapi.Uint8, Root: int32(root)}, nil)
		for rank := range w.n {
			require.Equal(t, inputs[root][rank*size:(rank+1)*size], w.results(t, rank, w.recv[rank], size))
		}
	}
}

// pointToPoint sends around the ring. It deadlocks unless sends and receives
// progress together.
func (w *world) pointToPoint(t *testing.T) {
	for _, size := range []int{0, 1, 4096, 900001} {
		inputs := w.fill(t, func(rank int) []byte { return pattern(size, uint64(rank)) })
		w.group(t, func() {
			for rank := range w.n {
				next, prev := (rank+1)%w.n, (rank+w.n-1)%w.n
				good(t, w.api, w.api.Collective(ncclapi.Call{Func: ncclapi.FuncSend, Send: w.send[rank], Count: uintptr(size), Type: ncclapi.Uint8, Root: int32(next), Comm: w.comms[rank], Stream: w.streams[rank]}))
				good(t, w.api, w.api.Collective(ncclapi.Call{Func: ncclapi.FuncRecv, Recv: w.recv[rank], Count: uintptr(size), Type: ncclapi.Uint8, Root: int32(prev), Comm: w.comms[rank], Stream: w.streams[rank]}))
			}
		})
		for rank := range w.n {
			require.Equal(t, inputs[(rank+w.n-1)%w.n], w.results(t, rank, w.recv[rank], size))
		}
	}
}

// twoStreams issues alternately on two streams of each rank. The second stream
// must see the results of the first, because operations run in call
// order.
func (w *world) twoStreams(t *testing.T) {
	const count = 5000
	second := make([]cudadrv.Stream, w.n)
	for rank := range w.n {
		second[rank] = w.stream(t, rank)
	}
	inputs := w.fill(t, func(rank int) []byte { return input(ncclapi.Int32, ncclapi.Sum, count, uint64(rank)) })
	for range 3 {
		w.issue(t, ncclapi.Call{Func: ncclapi.FuncAllReduce, Count: count, Type: ncclapi.Int32, Op: ncclapi.Sum}, nil)
		w.issue(t, ncclapi.Call{Func: ncclapi.FuncAllReduce, Count: count, Type: ncclapi.Int32, Op: ncclapi.Max}, func(rank int, c *ncclapi.Call) { c.Send, c.Stream = w.recv[rank], second[rank] })
		for rank := range w.n {
			w.sync(t, rank, second[rank])
			checkReduced(t, ncclapi.Int32, ncclapi.Sum, w.results(t, rank, w.recv[rank], 4*count), inputs, 0)
		}
	}
}

func (w *world) memAlloc(t *testing.T) {
	const count = 2048
	memory := make([]cudadrv.DevicePtr, w.n)
	inputs := make([][]byte, w.n)
	for rank := range w.n {
		w.bound(t, rank, func() {
			p, r := w.api.MemAlloc(4 * count)
			good(t, w.api, r)
			memory[rank] = p
		})
		inputs[rank] = input(ncclapi.Float32, ncclapi.Sum, count, uint64(rank))
		w.upload(t, rank, w.streams[rank], memory[rank], inputs[rank])
	}
	w.issue(t, ncclapi.Call{Func: ncclapi.FuncAllReduce, Count: count, Type: ncclapi.Float32, Op: ncclapi.Sum}, func(rank int, c *ncclapi.Call) { c.Send, c.Recv = memory[rank], memory[rank] })
	for rank := range w.n {
		checkReduced(t, ncclapi.Float32, ncclapi.Sum, w.download(t, rank, w.streams[rank], memory[rank], 4*count), inputs, 0)
		w.bound(t, rank, func() { good(t, w.api, w.api.MemFree(memory[rank])) })
	}
}

// split splits the ranks into even and odd ranks, in reverse order.
func (w *world) split(t *testing.T) {
	parts := make([]ncclapi.Comm, w.n)
	w.all(t, func(rank int) ncclapi.Result {
		return w.api.CommSplit(w.comms[rank], int32(rank%2), int32(-rank), &parts[rank], nil)
	})
	const count = 300
	inputs := w.fill(t, func(rank int) []byte { return input(ncclapi.Int64, ncclapi.Sum, count, uint64(rank)) })
	w.issue(t, ncclapi.Call{Func: ncclapi.FuncAllReduce, Count: count, Type: ncclapi.Int64, Op: ncclapi.Sum}, func(rank int, c *ncclapi.Call) { c.Comm = parts[rank] })
	for rank := range w.n {
		var same [][]byte
		place := int32(0)
		for peer := rank % 2; peer < w.n; peer += 2 {
			same = append(same, inputs[peer])
			if peer > rank {
				place++
			}
		}
		me, r := w.api.CommUserRank(parts[rank])
		good(t, w.api, r)
		require.Equal(t, place, me)
		checkReduced(t, ncclapi.Int64, ncclapi.Sum, w.results(t, rank, w.recv[rank], 8*count), same, 0)
	}
	w.destroy(t, parts)
}

// shrink excludes the last rank. Only the other ranks call it.
func (w *world) shrink(t *testing.T) {
	left := w.n - 1
	parts := make([]ncclapi.Comm, left)
	w.group(t, func() {
		for rank := range left {
			good(t, w.api, w.api.CommShrink(w.comms[rank], []int32{int32(left)}, &parts[rank], nil, ncclapi.ShrinkDefault))
		}
	})
	const count = 300
	inputs := w.fill(t, func(rank int) []byte { return input(ncclapi.Int64, ncclapi.Sum, count, uint64(rank)) })
	w.group(t, func() {
		for rank := range left {
			good(t, w.api, w.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: w.send[rank], Recv: w.recv[rank], Count: count, Type: ncclapi.Int64, Op: ncclapi.Sum, Comm: parts[rank], Stream: w.streams[rank]}))
		}
	})
	for rank := range left {
		n, r := w.api.CommCount(parts[rank])
		good(t, w.api, r)
		require.EqualValues(t, left, n)
		checkReduced(t, ncclapi.Int64, ncclapi.Sum, w.results(t, rank, w.recv[rank], 8*count), inputs[:left], 0)
	}
	w.destroy(t, parts)
}

func (w *world) initRank(t *testing.T) {
	var id ncclapi.UniqueID
	w.bound(t, 0, func() {
		var r ncclapi.Result
		id, r = w.api.GetUniqueID()
		good(t, w.api, r)
	})
	comms := make([]ncclapi.Comm, w.n)
	w.group(t, func() {
		for rank := range w.n {
			ok(t, w.drv.CtxSetCurrent(w.ctxs[rank]))
			good(t, w.api, w.api.CommInitRankScalable(&comms[rank], int32(w.n), int32(rank), []ncclapi.UniqueID{id}, nil))
		}
	})
	const count = 64
	inputs := w.fill(t, func(rank int) []byte { return input(ncclapi.Uint8, ncclapi.Max, count, uint64(rank)) })
	w.issue(t, ncclapi.Call{Func: ncclapi.FuncAllReduce, Count: count, Type: ncclapi.Uint8, Op: ncclapi.Max}, func(rank int, c *ncclapi.Call) { c.Comm = comms[rank] })
	for rank := range w.n {
		checkReduced(t, ncclapi.Uint8, ncclapi.Max, w.results(t, rank, w.recv[rank], count), inputs, 0)
	}
	w.destroy(t, comms)
}

// errors tests errors that NCCL detects at the call.
func (w *world) errors(t *testing.T) {
	c, s, p := w.comms[0], w.streams[0], w.send[0]
	for name, call := range map[string]ncclapi.Call{
		"type":      {Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1, Type: 99, Op: ncclapi.Sum, Comm: c, Stream: s},
		"reduction": {Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1, Type: ncclapi.Int8, Op: 77, Comm: c, Stream: s},
		"root":      {Func: ncclapi.FuncBroadcast, Send: p, Recv: p, Count: 1, Type: ncclapi.Int8, Root: int32(w.n), Comm: c, Stream: s},
		"peer":      {Func: ncclapi.FuncSend, Send: p, Count: 1, Type: ncclapi.Int8, Root: -1, Comm: c, Stream: s},
		"null":      {Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 1, Type: ncclapi.Int8, Op: ncclapi.Sum, Comm: 0, Stream: s},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, ncclapi.InvalidArgument, w.api.Collective(call))
		})
	}
	t.Run("group", func(t *testing.T) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		good(t, w.api, w.api.GroupStart())
		require.Equal(t, ncclapi.InvalidArgument, w.api.Collective(ncclapi.Call{Func: ncclapi.FuncBroadcast, Send: p, Recv: p, Count: 1, Type: ncclapi.Int8, Root: -1, Comm: c, Stream: s}))
		require.Equal(t, ncclapi.InvalidArgument, w.api.GroupEnd(), "a group returns the error of a call in it")
	})
	t.Run("unmatched", func(t *testing.T) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		require.Equal(t, ncclapi.InvalidUsage, w.api.GroupEnd())
	})
	t.Run("missing", func(t *testing.T) {
		for f := range ncclapi.NumFuncs {
			v, _ := w.api.GetVersion()
			require.Equal(t, f.Since() <= v, w.api.Has(f), fmt.Sprint(f.Name()))
		}
	})
}
