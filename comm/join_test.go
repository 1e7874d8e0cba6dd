package comm_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
)

// Shutdown returns when all ranks have shut the group down, and not before.
func TestShutdownWaitsForTheOthers(t *testing.T) {
	for _, late := range []int{0, 1} {
		gs, ended := shutDownWithout(t, late)
		select {
		case err := <-ended:
			require.Fail(t, "did not wait", "%v", err)
		case <-time.After(100 * time.Millisecond): // a correct Shutdown passes however long this is
		}
		require.NoError(t, gs[late].Shutdown(testgpu.Context(t)))
		require.NoError(t, errors.Join(<-ended, <-ended))
	}
}

// A rank that closes the group, or has failed, fails the Shutdown of the others.
func TestShutdownOfAGroupThatAnotherRankCloses(t *testing.T) {
	for _, closes := range []int{0, 1} {
		gs, ended := shutDownWithout(t, closes)
		require.NoError(t, gs[closes].Close())
		for range 2 {
			require.ErrorIs(t, <-ended, comm.ErrBroken)
		}
	}
}

// A Shutdown after the end of the group is no success: operations of this rank or of others may not have completed. Only after a
// Shutdown that has succeeded another one does nothing.
func TestShutdownAfterTheEnd(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for name, end := range map[string]func(g *comm.Group){
		"close":             func(g *comm.Group) { require.NoError(t, g.Close()) },
		"a failed shutdown": func(g *comm.Group) { require.ErrorIs(t, g.Shutdown(gone), context.Canceled) },
	} {
		g := checked(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), comm.NCCLOnly)
		end(g)
		for range 2 {
			require.ErrorIs(t, g.Shutdown(testgpu.Context(t)), device.ErrClosed, name)
		}
	}
	g := checked(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), comm.NCCLOnly)
	for range 2 {
		require.NoError(t, g.Shutdown(testgpu.Context(t)))
	}
}

// shutDownWithout lets all of three ranks but one shut their group down.
func shutDownWithout(t *testing.T, rank int) ([]*comm.Group, chan error) {
	gs, ended := joined(t, testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})), make(chan error, 3)
	for i, g := range gs {
		if i != rank {
			go func() { ended <- g.Shutdown(testgpu.Context(t)) }()
		}
	}
	return gs, ended
}

// The error of a Shutdown says how another rank has left instead.
func TestShutdownSaysHowAnotherRankLeft(t *testing.T) {
	require.NoError(t, comm.LeftError("shut down"))
	left := comm.LeftError("rank 1 closed the group")
	require.ErrorIs(t, left, comm.ErrBroken)
	require.ErrorIs(t, left, comm.ErrLeft)
	require.EqualError(t, left, "rank 1 closed the group instead of shutting it down")
	failed := comm.LeftError("rank 1 failed: out: rank 2 closed the group")
	require.ErrorIs(t, failed, comm.ErrBroken)
	require.NotErrorIs(t, failed, comm.ErrLeft)
	require.EqualError(t, failed, "rank 1 failed instead of shutting it down: out: rank 2 closed the group")
}

// A rank that never comes ends the Shutdown of the others with their context.
func TestShutdownEndsWithContext(t *testing.T) {
	gs := joined(t, testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	enough := errors.New("enough")
	for _, g := range []*comm.Group{gs[1], gs[0]} {
		ctx, cancel := context.WithTimeoutCause(t.Context(), 20*time.Millisecond, enough)
		require.Error(t, g.Shutdown(ctx))
		cancel()
	}
}

// Ranks that make groups by different functions learn that at once.
func TestSplitAndSubTogether(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gs, errs := join(t, context.Background(), devs)
		require.NoError(t, errors.Join(errs...))
		var wg sync.WaitGroup
		wg.Go(func() { _, errs[0] = gs[0].Split(testgpu.Context(t), []int{0}, nil) })
		wg.Go(func() { _, errs[1] = gs[1].Sub(testgpu.Context(t), 1, 0) })
		wg.Wait()
		for i, op := range []string{"split", "sub-group"} {
			require.ErrorIs(t, errs[i], comm.ErrMismatch)
			require.ErrorContains(t, errs[i], "comm: "+op+": rank 0 has a call of Split and rank 1 a call of Sub with the ranks [1 0]: call the same function")
		}
		groups.Each(t, gs, func(_ int, g *comm.Group) error {
			sub, err := g.Sub(testgpu.Context(t), 1, 0)
			if err != nil {
				return err
			}
			return sub.Shutdown(testgpu.Context(t))
		})
	})
}
