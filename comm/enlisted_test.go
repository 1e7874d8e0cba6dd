package comm_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
)

// Each world of a registry is a group, whose end is that of its session. The enlistments go on, until they are closed.
func TestJoinEnlisted(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		addr := fmt.Sprintf("127.0.0.1:%d", testhost.Reserve(t))
		timing := cluster.Timing{Join: time.Minute}
		r, err := cluster.Serve(ctx, &cluster.RegistryConfig{Job: "enlisted", Addr: addr, Timing: timing})
		require.NoError(t, err)
		defer r.Close()
		names, members := []string{"a", "b"}, make([]*cluster.Enlistment, 2)
		for i, name := range names {
			members[i], err = cluster.Enlist(ctx, &cluster.EnlistConfig{Job: "enlisted", Addr: addr, Name: name, Timing: timing})
			require.NoError(t, err)
			defer members[i].Close()
		}
		for range 2 {
			require.NoError(t, r.Begin(names...))
			require.NoError(t, errors.Join(atOnce(2, func(i int) error { return sumEnlisted(ctx, members[i], devs[i], i) })...))
		}
		require.NoError(t, members[1].Close())
		_, err = comm.JoinEnlisted(ctx, members[1], devs[1], nil)
		require.ErrorIs(t, err, cluster.ErrDelisted)
		require.ErrorContains(t, err, "comm: join: ")
		_, err = comm.JoinEnlisted(ctx, nil, devs[1], nil)
		require.ErrorContains(t, err, "no enlistment given")
	})
}

// sumEnlisted joins a world of two members and leaves it.
func sumEnlisted(ctx context.Context, m *cluster.Enlistment, dev *device.Device, rank int) error {
	g, err := comm.JoinEnlisted(ctx, m, dev, nil)
	if err != nil {
		return err
	}
	defer g.Close()
	x, err := memory.MakeFrom(g.Stream(0), []float32{float32(1 + rank)})
	if err != nil {
		return err
	}
	defer x.Close()
	got := make([]float32, 1)
	sess := g.Session()
	if err := errors.Join(comm.AllReduce(g, comm.Sum, x), x.CopyTo(g.Stream(0), got)); err != nil {
		return err
	}
	if g.Rank() != rank || got[0] != 3 || sess.Context().Err() != nil {
		return fmt.Errorf("rank %d of %d has the sum %v", g.Rank(), g.Size(), got)
	}
	if err := g.Shutdown(ctx); err != nil {
		return err
	}
	if sess.Context().Err() == nil {
		return errors.New("the session has not ended with the group")
	}
	return nil
}
