package nccl

import (
	"fmt"
	"sync"
	"testing"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/stretchr/testify/require"
)

// TestInitEndsTogether aborts one rank as soon as its own CommInitRank is done:
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
					results[rank] = api.CommInitRank(&comms[rank], ranks, id, int32(rank))
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
