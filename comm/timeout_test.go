package comm_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// shortTimeout is a timeout of operations that hang.
const shortTimeout = 2 * time.Second

// pair makes a group of two processes whose operations have the timeout d. An operation that
// only one of them issues hangs.
func pair(t *testing.T, devs []*device.Device, d time.Duration) (gs [2]*comm.Group, xs [2]comm.Shards[float32]) {
	t.Helper()
	list, errs := join(t, context.Background(), devs)
	for i, g := range list {
		require.NoError(t, errs[i])
		gs[i] = g
		xs[i], _ = shards(t, g, 64)
		require.NoError(t, g.SetTimeout(d))
	}
	return gs, xs
}

// reduceOnBoth reduces on both ranks, so that the connections exist before an operation hangs.
func reduceOnBoth(t *testing.T, gs [2]*comm.Group, xs [2]comm.Shards[float32]) {
	t.Helper()
	done := make(chan error, len(gs))
	for i, g := range gs {
		go func() {
			err := comm.AllReduce(g, comm.Sum, xs[i]...)
			if err == nil {
				err = g.Wait(testgpu.Context(t))
			}
			done <- err
		}()
	}
	for range gs {
		require.NoError(t, <-done)
	}
}

// requireTimeout requires that the operations of a group end by a timeout.
func requireTimeout(t *testing.T, g *comm.Group, limit time.Duration) {
	t.Helper()
	var late *nccl.TimeoutError
	require.ErrorAs(t, g.Wait(testgpu.Context(t)), &late)
	require.Equal(t, limit, late.Limit)
	require.Greater(t, late.Age, limit)
}

// requireNilOrBroken checks the error of a call during which shortTimeout may end on a busy machine.
func requireNilOrBroken(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		require.ErrorIs(t, err, comm.ErrBroken)
	}
}

// A shorter timeout holds for later operations, and operations that are already issued keep
// theirs.
func TestSetTimeout(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gs, xs := pair(t, devs, time.Hour)
		reduceOnBoth(t, gs, xs)
		require.NoError(t, gs[0].SetTimeout(shortTimeout))
		require.NoError(t, comm.AllReduce(gs[0], comm.Sum, xs[0]...))
		requireNilOrBroken(t, gs[0].SetTimeout(time.Hour))
		requireTimeout(t, gs[0], shortTimeout)
		require.ErrorIs(t, gs[0].SetTimeout(time.Hour), comm.ErrBroken)
	})
}

// The timeout of a batch holds for its operations only: operations behind them that have more
// time do not change it.
func TestTimeoutOfABatch(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gs, xs := pair(t, devs, time.Hour)
		reduceOnBoth(t, gs, xs)
		sent := make(chan error, 1) // NCCL connects the ranks at their first transfer
		go func() { sent <- errors.Join(comm.Send(gs[1], 0, xs[1][0]), gs[1].Wait(testgpu.Context(t))) }()
		require.NoError(t, errors.Join(comm.Recv(gs[0], 1, xs[0][0]), gs[0].Wait(testgpu.Context(t)), <-sent))
		b := gs[0].NewBatch()
		b.SetTimeout(shortTimeout)
		require.NoError(t, comm.Recv(b, 1, xs[0][0]), "which hangs")
		later := gs[0].NewBatch()
		require.NoError(t, comm.Recv(later, 1, xs[0][0]))
		require.NoError(t, b.Enqueue())
		requireNilOrBroken(t, later.Enqueue())
		requireTimeout(t, gs[0], shortTimeout)
	})
}

// A batch can be without a timeout, and Enqueue forgets the timeout of a batch.
func TestTimeoutOfABatchEnds(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		require.NoError(t, g.SetTimeout(time.Minute))
		xs, _ := shards(t, g, 8)
		b := g.NewBatch()
		for _, d := range []time.Duration{-1, 3 * time.Minute, 0} {
			b.SetTimeout(d)
			require.NoError(t, comm.AllReduce(b, comm.Sum, xs...))
			require.NoError(t, b.Enqueue())
			require.NoError(t, comm.AllReduce(b, comm.Sum, xs...))
			require.NoError(t, b.Enqueue())
		}
		require.NoError(t, g.Wait(testgpu.Context(t)))
		for i := range devs {
			var limits []time.Duration
			for _, o := range g.Communicator(i).Trace() {
				limits = append(limits, o.Timeout)
			}
			require.Equal(t, []time.Duration{0, time.Minute, 3 * time.Minute, time.Minute, time.Minute, time.Minute}, limits)
		}
	})
}

func TestHighPriority(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, high := range []bool{false, true} {
			g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{HighPriority: high})
			require.NoError(t, err)
			sub, err := g.Sub(testgpu.Context(t), 1, 0)
			require.NoError(t, err)
			for i, dev := range devs {
				least, greatest, err := stream.PriorityRange(dev)
				require.NoError(t, err)
				want := least
				if high {
					want = greatest
				}
				for _, s := range []*stream.Stream{g.Stream(i), sub.Stream(i)} {
					p, err := s.Priority()
					require.NoError(t, err)
					require.Equal(t, want, p)
				}
			}
			require.NoError(t, sub.Close())
			require.NoError(t, g.Close())
		}
	})
}
