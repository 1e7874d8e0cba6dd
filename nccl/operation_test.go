package nccl

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A reducing NCCL notes the reductions that it is asked for.
type reducing struct {
	idleNCCL
	asked []ncclapi.RedOp
}

func (l *reducing) Collective(c ncclapi.Call) ncclapi.Result {
	l.asked = append(l.asked, c.Op)
	return ncclapi.Success
}

// NCCL spoils the mean of a single rank, which is its sum.
func TestReductionsThatNCCLGets(t *testing.T) {
	for ranks, avg := range map[int]ncclapi.RedOp{1: ncclapi.Sum, 2: ncclapi.Avg} {
		r := newIdleRank(t)
		if ranks == 2 {
			r = newIdlePair(t)
		}
		api := &reducing{idleNCCL: idleNCCL{API: r.c.api}}
		r.c.api = api
		for _, op := range []Op{Sum, Prod, Max, Min, Avg} {
			require.NoError(t, AllReduce(r.c, r.s, r.y, r.x, op))
		}
		require.Equal(t, []ncclapi.RedOp{ncclapi.Sum, ncclapi.Prod, ncclapi.Max, ncclapi.Min, avg}, api.asked)
	}
}

// A pair is two ranks of this process, with a buffer each.
type pair struct {
	c [2]*Communicator
	s [2]*stream.Stream
	x [2]memory.Slice[float32]
}

func newPair(t *testing.T) *pair {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	cs, err := NewCommunicators(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	p := &pair{c: [2]*Communicator(cs)}
	for i := range p.c {
		p.s[i], err = stream.New(devs[i], nil)
		require.NoError(t, err)
		p.x[i], err = memory.MakeFrom(p.s[i], []float32{1, 2, 3, 4, 5, 6, 7, float32(8 + i)})
		require.NoError(t, err)
	}
	t.Cleanup(func() {
		for i := range p.c {
			require.NoError(t, p.x[i].Close())
			require.NoError(t, p.c[i].Close())
			require.NoError(t, p.s[i].Close())
		}
	})
	return p
}

// together issues an operation of each rank in one group.
func (p *pair) together(op func(on Issuer, rank int, s *stream.Stream, x memory.Slice[float32]) error) error {
	return Group(func(b *Batch) error {
		for i := range p.c {
			if err := op(b.On(p.c[i]), i, p.s[i], p.x[i]); err != nil {
				return err
			}
		}
		return nil
	})
}

// What only the root has may be anything elsewhere: here it overlaps what the others have.
func TestBuffersOfTheRootOnly(t *testing.T) {
	p := newPair(t)
	away := func(rank int, x memory.Slice[float32]) memory.Slice[float32] {
		if rank == 0 {
			return x.Slice(0, 4)
		}
		return x.Slice(2, 6)
	}
	require.NoError(t, p.together(func(on Issuer, rank int, s *stream.Stream, x memory.Slice[float32]) error {
		return Broadcast(on, s, x.Slice(0, 4), away(rank, x), 0)
	}))
	require.NoError(t, p.together(func(on Issuer, rank int, s *stream.Stream, x memory.Slice[float32]) error {
		return Reduce(on, s, away(rank, x), x.Slice(0, 4), Sum, 0)
	}))
	got := make([]float32, 8)
	require.NoError(t, p.x[0].CopyTo(p.s[0], got))
	require.Equal(t, []float32{2, 4, 6, 8, 5, 6, 7, 8}, got)
	require.NoError(t, p.x[1].CopyTo(p.s[1], got))
	require.Equal(t, []float32{1, 2, 3, 4, 5, 6, 7, 9}, got)
}

// NCCL has taken what a group has of every rank.
func TestGroupIsTakenOnAllRanks(t *testing.T) {
	p := newPair(t)
	for range 3 {
		require.NoError(t, p.together(func(on Issuer, rank int, s *stream.Stream, x memory.Slice[float32]) error {
			return AllReduce(on, s, x, x, Max)
		}))
	}
	for i, c := range p.c {
		issued, _ := c.rec.Final()
		require.EqualValues(t, 3, issued.ID, "rank %d", i)
		require.False(t, c.rec.InCall(), "rank %d", i)
		last, lost := c.rec.LastOn(p.s[i])
		require.EqualValues(t, 3, last, "rank %d", i)
		require.False(t, lost, "rank %d", i)
	}
}
