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
	check: (*issued).reduced,
}, {
	f: ncclapi.FuncReduce, reduces: true, rooted: true, receivesAtRoot: true,
	check: (*issued).reduced,
}, {
	f: ncclapi.FuncReduceScatter, reduces: true, huge: true, sendsAll: true,
	check: func(c *issued, lo int, got []byte) string { return c.reduced(c.Me*c.bytes+lo, got) },
}, {
	f: ncclapi.FuncBroadcast, huge: true, rooted: true,
	check: func(c *issued, lo int, got []byte) string { return c.moved(c.root, lo, got) },
}, {
	f: ncclapi.FuncAllGather, huge: true, receivesAll: true,
	check: func(c *issued, lo int, got []byte) string { return c.moved(lo/c.bytes, lo%c.bytes, got) },
}, {
	f: ncclapi.FuncAlltoAll, sendsAll: true, receivesAll: true,
	check: func(c *issued, lo int, got []byte) string {
		return c.moved(lo/c.bytes, c.Me*c.bytes+lo%c.bytes, got)
	},
}, {
	f: ncclapi.FuncGather, rooted: true, receivesAtRoot: true, receivesAll: true,
	check: func(c *issued, lo int, got []byte) string { return c.moved(lo/c.bytes, lo%c.bytes, got) },
}, {
	f: ncclapi.FuncScatter, rooted: true, sendsAll: true,
	check: func(c *issued, lo int, got []byte) string { return c.moved(c.root, c.Me*c.bytes+lo, got) },
}, {
	f:     ncclapi.FuncSend, // and Recv, around the ring
	check: func(c *issued, lo int, got []byte) string { return c.moved((c.Me+c.N-1)%c.N, lo, got) },
}}

// issue issues the operation of a case: a Send together with its Recv, around the ring.
func (o *operation) issue(c *issued) {
	call := ncclapi.Call{Func: o.f, Send: c.send, Recv: c.recv, Count: uintptr(c.count), Type: c.t, Op: c.op, Root: int32(c.root), Comm: c.Comm, Stream: c.Stream}
	if o.f != ncclapi.FuncSend {
		c.nccl(c.API.Collective(call))
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c.nccl(c.API.GroupStart())
	call.Root = int32((c.Me + 1) % c.N)
	c.nccl(c.API.Collective(call))
	call.Func, call.Root = ncclapi.FuncRecv, int32((c.Me+c.N-1)%c.N)
	c.nccl(c.API.Collective(call))
	c.nccl(c.API.GroupEnd())
}
