package conformance

import (
	"runtime"

	"github.com/gochorus/chorus/internal/ncclapi"
)

// An operation is an NCCL function under test by Rank.
type operation struct {
	f              ncclapi.Func
	reduces        bool
	huge           bool // also tested with Huge sizes
	rooted         bool
	receivesAtRoot bool // only the root receives
	sendsAll       bool // sends one part to each rank
	receivesAll    bool // receives one part from each rank
	issue          func(c *issued)
	// check describes the first mistake in the output bytes from lo on, or "". The
	// bytes belong to a single part.
	check func(c *issued, lo int, got []byte) string
}

func (o *operation) sends(n int) int    { return parts(o.sendsAll, n) }
func (o *operation) receives(n int) int { return parts(o.receivesAll, n) }
func (o *operation) longest(n int) int  { return max(o.sends(n), o.receives(n)) }

func parts(all bool, n int) int {
	if all {
		return n
	}
	return 1
}

var operations = []operation{{
	f: ncclapi.FuncAllReduce, reduces: true, huge: true,
	issue: func(c *issued) {
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: c.send, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Op: c.op, Comm: c.Comm, Stream: c.Stream}))
	},
	check: (*issued).reduced,
}, {
	f: ncclapi.FuncReduce, reduces: true, rooted: true, receivesAtRoot: true,
	issue: func(c *issued) {
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncReduce, Send: c.send, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Op: c.op, Root: int32(c.root), Comm: c.Comm, Stream: c.Stream}))
	},
	check: (*issued).reduced,
}, {
	f: ncclapi.FuncReduceScatter, reduces: true, huge: true, sendsAll: true,
	issue: func(c *issued) {
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncReduceScatter, Send: c.send, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Op: c.op, Comm: c.Comm, Stream: c.Stream}))
	},
	check: func(c *issued, lo int, got []byte) string { return c.reduced(c.Me*c.bytes+lo, got) },
}, {
	f: ncclapi.FuncBroadcast, huge: true, rooted: true,
	issue: func(c *issued) {
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncBroadcast, Send: c.send, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Root: int32(c.root), Comm: c.Comm, Stream: c.Stream}))
	},
	check: func(c *issued, lo int, got []byte) string { return c.moved(c.root, lo, got) },
}, {
	f: ncclapi.FuncAllGather, huge: true, receivesAll: true,
	issue: func(c *issued) {
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncAllGather, Send: c.send, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Comm: c.Comm, Stream: c.Stream}))
	},
	check: func(c *issued, lo int, got []byte) string { return c.moved(lo/c.bytes, lo%c.bytes, got) },
}, {
	f: ncclapi.FuncAlltoAll, sendsAll: true, receivesAll: true,
	issue: func(c *issued) {
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncAlltoAll, Send: c.send, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Comm: c.Comm, Stream: c.Stream}))
	},
	check: func(c *issued, lo int, got []byte) string {
		return c.moved(lo/c.bytes, c.Me*c.bytes+lo%c.bytes, got)
	},
}, {
	f: ncclapi.FuncGather, rooted: true, receivesAtRoot: true, receivesAll: true,
	issue: func(c *issued) {
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncGather, Send: c.send, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Root: int32(c.root), Comm: c.Comm, Stream: c.Stream}))
	},
	check: func(c *issued, lo int, got []byte) string { return c.moved(lo/c.bytes, lo%c.bytes, got) },
}, {
	f: ncclapi.FuncScatter, rooted: true, sendsAll: true,
	issue: func(c *issued) {
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncScatter, Send: c.send, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Root: int32(c.root), Comm: c.Comm, Stream: c.Stream}))
	},
	check: func(c *issued, lo int, got []byte) string { return c.moved(c.root, c.Me*c.bytes+lo, got) },
}, {
	f: ncclapi.FuncSend, // and Recv, around the ring
	issue: func(c *issued) {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		c.nccl(c.API.GroupStart())
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncSend, Send: c.send, Count: uintptr(c.count), Type: c.t, Root: int32((c.Me + 1) % c.N), Comm: c.Comm, Stream: c.Stream}))
		c.nccl(c.API.Collective(ncclapi.Call{Func: ncclapi.FuncRecv, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Root: int32((c.Me + c.N - 1) % c.N), Comm: c.Comm, Stream: c.Stream}))
		c.nccl(c.API.GroupEnd())
	},
	check: func(c *issued, lo int, got []byte) string { return c.moved((c.Me+c.N-1)%c.N, lo, got) },
}}
