package nccl

import (
	"fmt"
	"net"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
	"github.com/stretchr/testify/require"
)

// A clan is a communicator over all devices of a rig.
type clan struct {
	*rig
	api     ncclapi.API
	comms   []ncclapi.Comm
	streams []cudadrv.Stream
}

func newClan(t *testing.T, cfg machine.Config) *clan {
	t.Helper()
	return newClanOf(t, cfg, 0)
}

// newClanOf is newClan with a version of NCCL.
func newClanOf(t *testing.T, cfg machine.Config, version int32) *clan {
	t.Helper()
	c := newUnconnectedClan(t, cfg, Config{Version: version})
	c.m.Lock()
	defer c.m.Unlock()
	for _, h := range c.comms {
		x := c.lib.find(h)
		for peer := range x.n {
			x.connected[connection{connectSend, peer}], x.connected[connection{connectRecv, peer}] = true, true
		}
		x.connected[connection{Kind: connectRing}], x.connected[connection{Kind: connectTree}] = true, true
	}
	return c
}

// newUnconnectedClan is newClanOf whose first operations block until the ranks have connected.
func newUnconnectedClan(t *testing.T, cfg machine.Config, of Config) *clan {
	t.Helper()
	c := &clan{rig: newRigWith(t, cfg, of), comms: make([]ncclapi.Comm, cfg.Devices)}
	c.api = c.lib
	id, res := c.api.GetUniqueID()
	c.good(res)
	c.group(func() {
		for rank := range c.comms {
			c.On(rank, func() cudadrv.Result {
				c.good(c.api.CommInitRankScalable(&c.comms[rank], int32(len(c.comms)), int32(rank), []ncclapi.UniqueID{id}, nil))
				return 0
			})
		}
	})
	for d := range cfg.Devices {
		c.streams = append(c.streams, c.Stream(d))
	}
	t.Cleanup(func() {
		for _, h := range c.comms {
			_ = c.api.CommAbort(h) // those that a test has ended are no more
		}
	})
	return c
}

func (c *clan) good(r ncclapi.Result) {
	c.T.Helper()
	require.Equal(c.T, ncclapi.Success, r, c.api.GetLastError(0))
}

func (c *clan) wait(rank int, want ncclapi.Result) string {
	c.T.Helper()
	for {
		async, r := c.api.CommGetAsyncError(c.comms[rank])
		c.good(r)
		if async != ncclapi.Success {
			require.Equal(c.T, want, async, c.api.GetLastError(c.comms[rank]))
			return c.api.GetLastError(c.comms[rank])
		}
		runtime.Gosched()
	}
}

// initRanks calls CommInitRankScalable for pairs of device, rank and number of ranks,
// each on a thread of its own.
func (c *rig) initRanks(id ncclapi.UniqueID, calls ...[3]int) ([]ncclapi.Result, []ncclapi.Comm) {
	results, comms := make([]ncclapi.Result, len(calls)), make([]ncclapi.Comm, len(calls))
	var wg sync.WaitGroup
	for i, call := range calls {
		wg.Go(func() {
			c.On(call[0], func() cudadrv.Result {
				results[i] = c.lib.CommInitRankScalable(&comms[i], int32(call[2]), int32(call[1]), []ncclapi.UniqueID{id}, nil)
				return 0
			})
		})
	}
	wg.Wait()
	return results, comms
}

func (c *rig) uniqueID() ncclapi.UniqueID {
	c.T.Helper()
	id, r := c.lib.GetUniqueID()
	require.Equal(c.T, ncclapi.Success, r)
	return id
}

func TestInitMistakes(t *testing.T) {
	for name, x := range map[string]struct {
		calls [][3]int
		want  []string
	}{
		"two numbers of ranks": {[][3]int{{0, 0, 2}, {1, 1, 3}}, []string{"rank 0 expects 2 ranks", "rank 1 expects 3"}},
		"the same rank":        {[][3]int{{0, 0, 2}, {1, 0, 2}}, []string{"joined as rank 0", "0000:10:00.0", "0000:11:00.0"}},
		"the same device":      {[][3]int{{1, 0, 2}, {1, 1, 2}}, []string{"Duplicate GPU", "rank 0", "rank 1", "0000:11:00.0"}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, machine.Config{Devices: 2})
			results, _ := r.initRanks(r.uniqueID(), x.calls...)
			require.Equal(t, []ncclapi.Result{ncclapi.InvalidUsage, ncclapi.InvalidUsage}, results)
			for _, part := range x.want {
				require.Contains(t, r.lib.GetLastError(0), part)
			}
		})
	}
}

func TestInitOverTCPAmongUnauthenticatedPeers(t *testing.T) {
	r := newNetworkRig(t, machine.Config{Devices: 2}, "127.0.0.1")
	id := r.uniqueID()
	_, address, err := parseID(&id)
	require.NoError(t, err)
	for _, noise := range []string{"", "GET / HTTP/1.0\r\n\r\n", "\x00\x00\x00\x02{}", "\xff\xff\xff\xff"} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(address, "tcp "))
		require.NoError(t, err)
		_, err = conn.Write([]byte(noise))
		require.NoError(t, err)
		t.Cleanup(func() { _ = conn.Close() })
	}
	results, comms := r.initRanks(id, [3]int{0, 0, 2}, [3]int{1, 1, 2})
	require.Equal(t, []ncclapi.Result{0, 0}, results)
	for _, c := range comms {
		require.Equal(t, ncclapi.Success, r.lib.CommDestroy(c))
	}
}

func TestInitNeedsContext(t *testing.T) {
	r := newRig(t, machine.Config{Devices: 1})
	var c ncclapi.Comm
	require.Equal(t, ncclapi.UnhandledCUDAError, r.lib.CommInitRankScalable(&c, 1, 0, make([]ncclapi.UniqueID, 1), nil))
}

func TestArguments(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 2})
	p, foreign := c.Alloc(0, 64), c.Alloc(1, 64)
	reduce := func(send, recv cudadrv.DevicePtr, count uintptr) ncclapi.Call {
		return ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: send, Recv: recv, Count: count, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0]}
	}
	send := func(peer int32, comm ncclapi.Comm, s cudadrv.Stream) ncclapi.Call {
		return ncclapi.Call{Func: ncclapi.FuncSend, Send: p, Count: 1, Type: ncclapi.Int8, Root: peer, Comm: comm, Stream: s}
	}
	for want, call := range map[string]ncclapi.Call{
		"sendbuff is null":                   reduce(0, p, 1),
		"not aligned to the 4 bytes":         reduce(p, p+2, 1),
		"lies in the block of 64 bytes":      reduce(p, foreign, 1),
		"needs 68 bytes and has 64":          reduce(p, p, 17),
		"not a device address":               reduce(p, 0x1234, 1),
		"more than any memory":               reduce(p, p, 1<<62),
		"rank 2 is not one of 2":             send(2, c.comms[0], c.streams[0]),
		"the stream is of device 1":          send(1, c.comms[0], c.streams[1]),
		"is not a communicator, or it was d": send(1, 4711, c.streams[1]),
	} {
		require.Equal(t, ncclapi.InvalidArgument, c.api.Collective(call), want)
		require.Contains(t, c.api.GetLastError(0), want)
	}
	for _, h := range c.comms {
		c.good(c.api.CommDestroy(h))
		require.Equal(t, ncclapi.InvalidArgument, c.api.CommDestroy(h))
	}
}

func TestGroupLeftOpen(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 1})
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c.good(c.api.GroupStart())
	require.Len(t, c.m.Reports(), 1)
	require.Contains(t, c.m.Reports()[0], "has a group open")
	c.good(c.api.GroupEnd())
	require.Empty(t, c.m.Reports())
	require.Equal(t, ncclapi.InvalidUsage, c.api.GroupEnd())
}

func TestFailedGroupEnqueuesNothing(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 2})
	p := c.Alloc(0, 64)
	func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		c.good(c.api.GroupStart())
		c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0]}))
		require.Equal(t, ncclapi.InvalidArgument, c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: 0, Recv: p, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0]}))
		require.Equal(t, ncclapi.InvalidArgument, c.api.GroupEnd())
	}()
	c.Do(0, func() cudadrv.Result { return c.Drv.StreamQuery(c.streams[0]) })
}

func TestSendAndRecvDisagree(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 3})
	p, q := c.Alloc(0, 64), c.Alloc(1, 64)
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncSend, Send: p, Count: 4, Type: ncclapi.Float32, Root: 1, Comm: c.comms[0], Stream: c.streams[0]}))
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncRecv, Recv: q, Count: 8, Type: ncclapi.Float32, Root: 0, Comm: c.comms[1], Stream: c.streams[1]}))
	for rank := range 3 { // also at the one that has no part in it
		require.Contains(t, c.wait(rank, ncclapi.InvalidUsage),
			"rank 0 issued send(4 x float32, to rank 1) as operation 0, rank 1 issued recv(8 x float32, from rank 0) as operation 0")
	}
	require.Equal(t, cudadrv.ErrorLaunchFailed, c.On(1, func() cudadrv.Result { return c.Drv.StreamSynchronize(c.streams[1]) }))
}

func TestAbortEndsAtOnce(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 3})
	p := c.Alloc(0, 64)
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0]}))
	start := time.Now()
	c.good(c.api.CommAbort(c.comms[0]))
	c.Sync(0, c.streams[0])
	require.Less(t, time.Since(start), 20*time.Second)
	require.Equal(t, "rank 0 aborted", c.wait(1, ncclapi.RemoteError))
	require.Equal(t, "rank 0 aborted", c.wait(2, ncclapi.RemoteError))
	require.Equal(t, ncclapi.RemoteError, c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[1], Stream: c.streams[1]}))
	for _, x := range virtualtest.Download[float32](c.Rig, 0, c.streams[0], p, 4) {
		require.NotEqual(t, x, x, "the output is not poisoned")
	}
}

// In a group aborting ends what runs at once, and frees at the group's end.
func TestAbortInAGroup(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 2})
	p := c.Alloc(0, 64)
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0]}))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c.good(c.api.GroupStart())
	c.good(c.api.CommAbort(c.comms[0]))
	c.Sync(0, c.streams[0])
	_, r := c.api.CommCount(c.comms[0])
	c.good(r)
	c.good(c.api.GroupEnd())
	_, r = c.api.CommCount(c.comms[0])
	require.Equal(t, ncclapi.InvalidArgument, r)
}

// A call that waits for room in its stream launches into a communicator that was freed
// meanwhile, which costs the device, unless it was aborted in a group that ends later.
func TestAbortUnderACall(t *testing.T) {
	for grouped, want := range map[bool]cudadrv.Result{false: cudadrv.ErrorIllegalAddress, true: cudadrv.Success} {
		t.Run(fmt.Sprintf("grouped=%v", grouped), func(t *testing.T) {
			c := newClan(t, machine.Config{Devices: 2})
			p := c.Alloc(0, 64)
			calls := make(chan ncclapi.Result, machine.LaunchDepth+2)
			go func() {
				for range cap(calls) {
					calls <- c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0]})
				}
				close(calls)
			}()
			require.Eventually(t, func() bool { // a call waits
				c.m.Lock()
				defer c.m.Unlock()
				return c.m.Devices()[0].LaunchWaits()
			}, time.Minute, time.Millisecond)
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			if grouped {
				c.good(c.api.GroupStart())
			}
			c.good(c.api.CommAbort(c.comms[0]))
			for range calls {
			}
			require.Equal(t, want, c.On(0, func() cudadrv.Result { return c.Drv.StreamSynchronize(c.streams[0]) }))
			if grouped {
				c.good(c.api.GroupEnd())
			}
		})
	}
}

func TestShrinkAfterLoss(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 3})
	buf := []cudadrv.DevicePtr{c.Alloc(0, 64), c.Alloc(1, 64), c.Alloc(2, 64)}
	for _, rank := range []int{0, 2} {
		c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: buf[rank], Recv: buf[rank], Count: 4, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[rank], Stream: c.streams[rank]}))
	}
	c.good(c.api.CommAbort(c.comms[1]))
	smaller := make([]ncclapi.Comm, 3)
	var wg sync.WaitGroup
	for _, rank := range []int{0, 2} {
		c.wait(rank, ncclapi.RemoteError)
		wg.Go(func() {
			c.good(c.api.CommShrink(c.comms[rank], []int32{1}, &smaller[rank], nil, ncclapi.ShrinkAbort))
		})
	}
	wg.Wait()
	for _, rank := range []int{0, 2} {
		virtualtest.Upload(c.Rig, rank, c.streams[rank], buf[rank], []int32{int32(rank), 5})
		wg.Go(func() {
			c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: buf[rank], Recv: buf[rank], Count: 2, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: smaller[rank], Stream: c.streams[rank]}))
		})
	}
	wg.Wait()
	for _, rank := range []int{0, 2} {
		require.Equal(t, []int32{2, 10}, virtualtest.Download[int32](c.Rig, rank, c.streams[rank], buf[rank], 2))
	}
	for _, rank := range []int{0, 2} {
		c.good(c.api.CommDestroy(smaller[rank]))
	}
}

func TestCollectiveRaces(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 2})
	p, q := c.Alloc(0, 64), c.Alloc(1, 64)
	other := c.Stream(0)
	c.Do(0, func() cudadrv.Result { return c.Drv.MemsetD8Async(p, 0, 64, other) })
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0]}))
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: q, Recv: q, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[1], Stream: c.streams[1]}))
	require.Equal(t, cudadrv.ErrorLaunchFailed, c.On(0, c.Drv.CtxSynchronize))
	require.NotEmpty(t, c.m.Reports())
	require.Contains(t, c.m.Explain(0), "ncclAllReduce")
}

func TestFaultedCollective(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 1, Faults: "ncclAllReduce#2=ncclSystemError"})
	p := c.Alloc(0, 64)
	for _, want := range []ncclapi.Result{ncclapi.Success, ncclapi.SystemError, ncclapi.Success} {
		require.Equal(t, want, c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 4, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0]}))
	}
	c.Sync(0, c.streams[0])
}

// Faults deliver a wrong byte, and delay a collective.
func TestWrongAndSlowCollectives(t *testing.T) {
	c := newClan(t, machine.Config{Devices: 1, Faults: "wrong@ncclAllReduce#2, slow@ncclAllReduce#3=50ms"})
	p, q := c.Alloc(0, 16), c.Alloc(0, 16)
	want := []int32{1, 2, 3, 4}
	virtualtest.Upload(c.Rig, 0, c.streams[0], p, want)
	for n := 1; n <= 3; n++ {
		begun := time.Now()
		c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: q, Count: 4, Type: ncclapi.Int32, Op: ncclapi.Sum, Comm: c.comms[0], Stream: c.streams[0]}))
		got := virtualtest.Download[int32](c.Rig, 0, c.streams[0], q, 4)
		require.Equal(t, n != 2, slices.Equal(want, got), "all-reduce %d", n)
		require.True(t, n < 3 || time.Since(begun) >= 50*time.Millisecond, "it was not delayed")
	}
}
