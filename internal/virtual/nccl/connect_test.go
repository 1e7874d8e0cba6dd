package nccl

import (
	"fmt"
	"io"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/stretchr/testify/require"
)

// TestInitEndsTogether aborts one rank as soon as its own CommInitRankScalable is done:
// that of no other rank may fail for it.
func TestInitEndsTogether(t *testing.T) {
	const ranks = 5
	r := newRig(t, machine.Config{Devices: ranks})
	api := r.lib
	for round := range 40 {
		id, comms := r.uniqueID(), make([]ncclapi.Comm, ranks)
		results, aborted := make([]ncclapi.Result, ranks), ncclapi.Success
		var wg sync.WaitGroup
		for rank := range ranks {
			wg.Go(func() {
				r.On(rank, func() cudadrv.Result {
					results[rank] = api.CommInitRankScalable(&comms[rank], ranks, int32(rank), []ncclapi.UniqueID{id}, nil)
					return 0
				})
				if rank == round%ranks && results[rank] == ncclapi.Success {
					aborted = api.CommAbort(comms[rank])
				}
			})
		}
		wg.Wait()
		require.Equal(t, make([]ncclapi.Result, ranks), results, "round %d: %s", round, api.GetLastError(0))
		require.Equal(t, ncclapi.Success, aborted)
		for rank, h := range comms {
			if rank != round%ranks {
				require.Equal(t, ncclapi.Success, api.CommAbort(h))
			}
		}
	}
}

// TestInitFailsTogether has a rank that comes to the meeting and is lost before
// it has connected.
func TestInitFailsTogether(t *testing.T) {
	for lost := range 4 {
		t.Run(fmt.Sprintf("rank=%d", lost), func(t *testing.T) {
			r := newRig(t, machine.Config{Devices: 4})
			id := r.uniqueID()
			var calls [][3]int
			for rank := range 4 {
				if rank != lost {
					calls = append(calls, [3]int{rank, rank, 4})
				}
			}
			var wg sync.WaitGroup
			wg.Go(func() {
				token, address, err := parseID(&id)
				if err != nil {
					panic(err)
				}
				c, me, err := r.lib.newComm(r.m.Devices()[lost], token)
				if err != nil {
					panic(err)
				}
				if _, err = join(address, token, &joiner{Ranks: 4, Rank: lost, Key: lost, Member: me}); err != nil {
					panic(err)
				}
				c.close(true)
			})
			results, _ := r.initRanks(id, calls...)
			wg.Wait()
			require.Equal(t, []ncclapi.Result{ncclapi.RemoteError, ncclapi.RemoteError, ncclapi.RemoteError}, results)
		})
	}
}

// The first operation of each kind blocks its caller until the ranks at the other ends have issued
// theirs, and the next ones do not.
func TestFirstOperationsBlock(t *testing.T) {
	c := newUnconnectedClan(t, machine.Config{Devices: 3}, Config{Network: "127.0.0.1"})
	const small, large = 4, treeLimit/4 + 1
	var src, dst []cudadrv.DevicePtr
	for rank := range 3 {
		src, dst = append(src, c.Alloc(rank, 12*large)), append(dst, c.Alloc(rank, 12*large))
	}
	type call func(rank int) ncclapi.Result
	reduce := func(n uintptr) call {
		return func(r int) ncclapi.Result {
			return c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: src[r], Recv: dst[r], Count: n, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comms[r], Stream: c.streams[r]})
		}
	}
	send := func(from, to int) call {
		return func(r int) ncclapi.Result {
			if r == from {
				return c.api.Collective(ncclapi.Call{Func: ncclapi.FuncSend, Send: src[r], Count: small, Type: ncclapi.Float32, Root: int32(to), Comm: c.comms[r], Stream: c.streams[r]})
			}
			return c.api.Collective(ncclapi.Call{Func: ncclapi.FuncRecv, Recv: dst[r], Count: small, Type: ncclapi.Float32, Root: int32(from), Comm: c.comms[r], Stream: c.streams[r]})
		}
	}
	known := func(at, rank int) (n int) { // connections that one rank knows another to have issued
		x := c.lib.find(c.comms[at])
		x.mu.Lock()
		defer x.mu.Unlock()
		for e := range x.ends {
			if e.rank == rank {
				n++
			}
		}
		return n
	}
	for _, x := range []struct {
		name        string
		early, late []int
		call        call
	}{
		{"small all-reduce", []int{0, 1}, []int{2}, reduce(small)},
		{"large all-reduce", []int{2, 1}, []int{0}, reduce(large)},
		{"send", []int{0}, []int{1}, send(0, 1)},
		{"receive", []int{0}, []int{1}, send(1, 0)},
		{"gather", []int{2}, []int{0, 1}, func(r int) ncclapi.Result {
			return c.api.Collective(ncclapi.Call{Func: ncclapi.FuncGather, Send: src[r], Recv: dst[r], Count: small, Type: ncclapi.Float32, Root: 2, Comm: c.comms[r], Stream: c.streams[r]})
		}},
		{"all-to-all", []int{0, 1}, []int{2}, func(r int) ncclapi.Result {
			return c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAlltoAll, Send: src[r], Recv: dst[r], Count: small, Type: ncclapi.Float32, Comm: c.comms[r], Stream: c.streams[r]})
		}},
	} {
		ended, before := make(chan int, 3), make([]int, 3)
		for _, rank := range x.early {
			before[rank] = known(x.late[0], rank)
			go func() { c.good(x.call(rank)); ended <- rank }()
		}
		require.Eventually(t, func() bool { // they are inside
			return !slices.ContainsFunc(x.early, func(rank int) bool { return known(x.late[0], rank) == before[rank] })
		}, time.Minute, time.Millisecond, x.name)
		for _, late := range x.late {
			select {
			case rank := <-ended:
				require.Fail(t, "did not block", "%s of rank %d before rank %d came", x.name, rank, late)
			default:
			}
			c.good(x.call(late))
		}
		for range x.early {
			<-ended
		}
		for _, rank := range append(x.early, x.late...) { // connected: no call blocks any more
			c.good(x.call(rank))
		}
	}
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncBroadcast, Send: src[0], Recv: dst[0], Count: small, Type: ncclapi.Float32, Root: 0, Comm: c.comms[0], Stream: c.streams[0]})) // the ring exists
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncBroadcast, Send: src[1], Recv: dst[1], Count: small, Type: ncclapi.Float32, Root: 0, Comm: c.comms[1], Stream: c.streams[1]}))
	c.good(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncBroadcast, Send: src[2], Recv: dst[2], Count: small, Type: ncclapi.Float32, Root: 0, Comm: c.comms[2], Stream: c.streams[2]}))
	for rank := range 3 {
		c.Sync(rank, c.streams[rank])
	}
}

// A rank that comes to a meeting while its host leaves is sent away, and does not wait for ever.
func TestMeetingOfALeavingRank(t *testing.T) {
	r := newRig(t, machine.Config{Devices: 2})
	results, comms := r.initRanks(r.uniqueID(), [3]int{0, 0, 2}, [3]int{1, 1, 2})
	require.Equal(t, make([]ncclapi.Result, 2), results)
	c, res := r.lib.comm(ncclapi.FuncCommCount, comms[0])
	require.Equal(t, ncclapi.Success, res)
	require.Equal(t, ncclapi.Success, r.lib.CommAbort(comms[0]))
	here, there := net.Pipe()
	go c.welcome(there, &hello{Token: c.token, Use: "join", Rank: 1, Join: &joiner{Meeting: "split 1", Ranks: 2, Rank: 1}})
	require.NoError(t, here.SetReadDeadline(time.Now().Add(10*time.Second)))
	_, err := here.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, ncclapi.Success, r.lib.CommAbort(comms[1]))
}
