package nccl

import (
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// A couple is two communicators of the same two devices, each with a stream on each device.
type couple struct {
	*clan
	a, b []ncclapi.Comm
	s    [2][2]cudadrv.Stream // by communicator and device
	x    []cudadrv.DevicePtr
}

func newCouple(t *testing.T) *couple {
	c := &couple{clan: newClan(t, machine.Config{Devices: 2}), b: make([]ncclapi.Comm, 2)}
	c.a = c.comms
	var wg sync.WaitGroup
	for rank := range 2 {
		wg.Go(func() { c.good(c.api.CommSplit(c.a[rank], 0, int32(rank), &c.b[rank], nil)) })
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, h := range c.b {
			_ = c.api.CommAbort(h)
		}
	})
	for d := range 2 {
		c.s[0][d], c.s[1][d] = c.Stream(d), c.Stream(d)
		c.x = append(c.x, c.Alloc(d, 1024))
	}
	for _, comms := range [][]ncclapi.Comm{c.a, c.b} { // connects
		for rank := range 2 {
			wg.Go(func() { c.issue(comms, rank, c.streams[rank]) })
		}
		wg.Wait()
	}
	for rank := range 2 {
		c.Sync(rank, c.streams[rank])
	}
	return c
}

// issue reduces four elements of the couple's memory that belong to the communicator.
func (c *couple) issue(comms []ncclapi.Comm, rank int, s cudadrv.Stream) {
	p := c.x[rank]
	if &comms[0] == &c.b[0] {
		p += 512
	}
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: comms[rank], Stream: s}))
}

func (c *couple) healthy() {
	c.T.Helper()
	c.ends()
	require.Empty(c.T, c.m.Reports())
}

// ends waits for all collectives.
func (c *couple) ends() {
	c.T.Helper()
	for rank := range 2 {
		for _, s := range []cudadrv.Stream{c.s[0][rank], c.s[1][rank]} {
			c.Sync(rank, s)
		}
		for _, h := range []ncclapi.Comm{c.a[rank], c.b[rank]} {
			async, r := c.api.CommGetAsyncError(h)
			c.good(r)
			require.Equal(c.T, ncclapi.Success, async, c.api.GetLastError(h))
		}
	}
}

// On one stream the collectives never end. On two streams GPUs have room for both, usually.
func TestTwoCommunicatorsInDifferentOrders(t *testing.T) {
	const want = "the GPU with bus id .* got " +
		`all_reduce\(4 x float32, sum\) as operation 1 of communicator .* before all_reduce\(4 x float32, sum\) as operation 1 of communicator .*, ` +
		"and the GPU with bus id .* got them in the reverse order"
	issue := func(c *couple, second int) {
		c.issue(c.a, 0, c.s[0][0])
		c.issue(c.b, 1, c.s[0][1])
		require.Eventually(t, func() bool { // both have begun
			o := &c.lib.orders
			o.mu.Lock()
			defer o.mu.Unlock()
			n := 0
			for _, d := range o.devices {
				if last := d.recent[len(d.recent)-1]; last.Started && last.ID.Number == 1 {
					n++
				}
			}
			return n == 2
		}, time.Minute, time.Millisecond)
		c.issue(c.b, 0, c.s[second][0])
		c.issue(c.a, 1, c.s[second][1])
	}
	t.Run("one stream", func(t *testing.T) {
		c := newCouple(t)
		issue(c, 0)
		for rank := range 2 {
			for _, comms := range [][]ncclapi.Comm{c.a, c.b} {
				text := (&clan{rig: c.rig, api: c.api, comms: comms}).wait(rank, ncclapi.InvalidUsage)
				require.Regexp(t, "^two communicators are used in different orders on the same devices, so NCCL deadlocks: "+want, text)
			}
		}
	})
	t.Run("two streams", func(t *testing.T) {
		c := newCouple(t)
		issue(c, 1)
		c.ends()
		require.Len(t, c.m.Reports(), 1)
		require.Regexp(t, "^two communicators are used in different orders on the same devices, so NCCL may deadlock: "+want, c.m.Reports()[0])
	})
}

// Orders that no GPU can deadlock in are not refused.
func TestTwoCommunicatorsInOneOrder(t *testing.T) {
	t.Run("issued in one order", func(t *testing.T) {
		c := newCouple(t)
		for range 100 {
			for rank := range 2 {
				c.issue(c.a, rank, c.s[0][rank])
				c.issue(c.b, rank, c.s[1][rank])
			}
		}
		c.healthy()
	})
	t.Run("in one batch", func(t *testing.T) { // NCCL puts the ranks of a communicator next to each other
		c := newCouple(t)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for range 20 {
			c.good(c.api.GroupStart())
			c.issue(c.a, 0, c.s[0][0])
			c.issue(c.b, 1, c.s[1][1])
			c.issue(c.a, 1, c.s[0][1])
			c.issue(c.b, 0, c.s[1][0])
			c.good(c.api.GroupEnd())
		}
		c.healthy()
	})
	t.Run("the host waits", func(t *testing.T) {
		c := newCouple(t)
		for i := range 20 {
			comms := [][]ncclapi.Comm{c.a, c.b}[i%2]
			for k := range 2 {
				rank := (k + i/2) % 2 // any rank may be the first one
				c.issue(comms, rank, c.s[i%2][rank])
			}
			for rank := range 2 {
				c.Sync(rank, c.s[i%2][rank])
			}
		}
		c.healthy()
	})
	t.Run("a stream waits for the host", func(t *testing.T) { // so that its collective begins after the other one is done
		c := newCouple(t)
		gate := make(chan struct{})
		c.Do(0, func() cudadrv.Result { return c.Drv.LaunchHostFunc(c.s[0][0], dl.OnceClosure(func() { <-gate })) })
		c.issue(c.a, 0, c.s[0][0])
		c.issue(c.b, 0, c.s[1][0])
		c.issue(c.b, 1, c.s[1][1])
		c.Sync(0, c.s[1][0])
		c.issue(c.a, 1, c.s[0][1])
		close(gate)
		c.healthy()
	})
	t.Run("empty collectives", func(t *testing.T) { // NCCL discards them
		c := newCouple(t)
		empty := func(rank int) {
			c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: c.x[rank], Recv: c.x[rank], Count: 0, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.b[rank], Stream: c.s[1][rank]}))
		}
		c.issue(c.a, 0, c.s[0][0])
		empty(1)
		empty(0)
		c.issue(c.a, 1, c.s[0][1])
		c.healthy()
	})
}

// childOrders issues collectives of two communicators; the last rank has its own order.
func childOrders(differ bool) func(*child) {
	return func(c *child) {
		var other ncclapi.Comm
		c.CU(c.Do(func() cudadrv.Result { c.nccl(c.api.CommSplit(c.comm, 0, int32(c.rank), &other, nil)); return 0 }))
		p := c.Alloc(4096)
		issue := func(h ncclapi.Comm, at cudadrv.DevicePtr) {
			if r := c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p + at, Recv: p + at, Count: 100, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: h, Stream: c.Stream}); !differ {
				c.nccl(r)
			}
		}
		first, second := c.comm, other
		issue(first, 0)
		issue(second, 512)
		if differ && c.rank == c.size-1 {
			first, second = second, first
		}
		for range 10 {
			issue(first, 0)
			issue(second, 512)
		}
		if differ {
			for async := ncclapi.Success; async == ncclapi.Success; runtime.Gosched() { // the end of the other one may come first
				var r ncclapi.Result
				async, r = c.api.CommGetAsyncError(c.comm)
				c.nccl(r)
			}
			fmt.Print(c.api.GetLastError(c.comm))
		} else {
			c.CU(c.Do(func() cudadrv.Result { return c.Drv.StreamSynchronize(c.Stream) }))
		}
		c.nccl(c.api.CommAbort(other))
		c.nccl(c.api.CommAbort(c.comm))
	}
}

func TestProcessesInDifferentOrders(t *testing.T) {
	out, errs := processes(t, "orders-differ", 3, nil)
	succeeded(t, errs)
	for _, text := range out {
		require.Contains(t, text, "two communicators are used in different orders on the same devices")
	}
	_, errs = processes(t, "orders-equal", 3, nil)
	succeeded(t, errs)
}
