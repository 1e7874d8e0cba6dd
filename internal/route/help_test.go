package route

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A rig is the ranks of one communicator with their routers and memory.
type rig struct {
	routers Routers
	comms   []*nccl.Communicator
	streams []*stream.Stream
	src     []memory.Slice[int64] // with element i*100+k on rank i
	dst     []memory.Slice[int64]
	aside   []memory.Slice[int64] // other destinations
	in      memory.Slice[int64]   // of rank 1, for transfers
}

const rigCount = 24

// newRig connects the devices. The destinations have room for the parts of all ranks.
func newRig(t *testing.T, devs []*device.Device, s Strategy) *rig {
	t.Helper()
	return newRigInOrder(t, devs, s, nil)
}

func newRigInOrder(t *testing.T, devs []*device.Device, s Strategy, order *Order) *rig {
	t.Helper()
	g := &rig{}
	var err error
	g.comms, err = nccl.NewCommunicators(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	for i, dev := range devs {
		q, err := stream.New(dev, nil)
		require.NoError(t, err)
		g.streams = append(g.streams, q)
		h := make([]int64, rigCount)
		for k := range h {
			h[k] = int64(i*100 + k)
		}
		x, err := memory.MakeFrom(q, h)
		require.NoError(t, err)
		y, err := memory.Make[int64](q, rigCount*len(devs))
		require.NoError(t, err)
		require.NoError(t, y.Zero(q))
		z, err := memory.Make[int64](q, rigCount*len(devs))
		require.NoError(t, err)
		g.src, g.dst, g.aside = append(g.src, x), append(g.dst, y), append(g.aside, z)
	}
	g.in, err = memory.Make[int64](g.streams[1], rigCount)
	require.NoError(t, err)
	t.Cleanup(func() { g.close(t) })
	g.routers, err = Open(testgpu.Context(t), s, order, 0, g.comms, g.streams, fabric.NewTable(len(devs)).Seat)
	require.NoError(t, err)
	return g
}

func (g *rig) close(t *testing.T) {
	for _, c := range g.comms {
		require.NoError(t, c.Close())
	}
	require.NoError(t, g.routers.Close())
	require.NoError(t, g.in.Close())
	for i, s := range g.streams {
		require.NoError(t, g.src[i].Close())
		require.NoError(t, g.dst[i].Close())
		require.NoError(t, g.aside[i].Close())
		require.NoError(t, s.Close())
	}
}

// An add adds an operation to a batch.
type add func(b *nccl.Batch) error

func (g *rig) gather(i int) add {
	return func(b *nccl.Batch) error { return nccl.AllGather(b.On(g.comms[i]), g.streams[i], g.dst[i], g.src[i]) }
}

// gatherAside gathers to other memory, for a batch that has gather too.
func (g *rig) gatherAside(i int) add {
	return func(b *nccl.Batch) error { return nccl.AllGather(b.On(g.comms[i]), g.streams[i], g.aside[i], g.src[i]) }
}

func (g *rig) reduce(i int) add {
	return func(b *nccl.Batch) error {
		return nccl.AllReduce(b.On(g.comms[i]), g.streams[i], g.dst[i], g.dst[i], nccl.Max)
	}
}

func (g *rig) send(b *nccl.Batch) error {
	return nccl.Send(b.On(g.comms[0]), g.streams[0], g.src[0], 1)
}

func (g *rig) recv(b *nccl.Batch) error { return nccl.Recv(b.On(g.comms[1]), g.streams[1], g.in, 0) }

// enqueue enqueues a batch of operations.
func (g *rig) enqueue(calls ...add) error {
	b := g.routers.NewBatch()
	for _, call := range calls {
		if err := call(b.Batch); err != nil {
			return err
		}
	}
	return b.Enqueue()
}

// last returns the services of the last n collectives of each rank.
func (g *rig) last(n int) (list [][]collective.Service) {
	for _, c := range g.comms {
		_, s := collective.Of(c).Services(n)
		list = append(list, s)
	}
	return list
}

// wait waits for all ranks.
func (g *rig) wait(t *testing.T) {
	t.Helper()
	for i, c := range g.comms {
		require.NoError(t, c.Wait(testgpu.Context(t), g.streams[i]))
	}
}

// requireGathered checks that each destination has the sources of all ranks.
func (g *rig) requireGathered(t *testing.T, what string) {
	t.Helper()
	g.wait(t)
	for i, y := range g.dst {
		got := make([]int64, y.Len())
		require.NoError(t, y.CopyTo(g.streams[i], got))
		for k := range got {
			require.EqualValues(t, k/rigCount*100+k%rigCount, got[k], "%s: element %d of rank %d", what, k, i)
		}
	}
}

// clear clears the destinations.
func (g *rig) clear(t *testing.T) {
	t.Helper()
	for i, y := range g.dst {
		require.NoError(t, y.Zero(g.streams[i]))
	}
}
