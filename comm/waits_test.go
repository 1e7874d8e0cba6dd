package comm_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
)

// waits are the forms of waiting for operations of a group, which all return an error when the
// group is closed before these have begun.
func waits(t *testing.T, g *comm.Group, w *comm.Work) map[string]func() error {
	return map[string]func() error{
		"group": func() error { return g.Wait(testgpu.Context(t)) },
		"work":  func() error { return w.Wait(testgpu.Context(t)) },
		"done": func() error {
			_, err := w.Done()
			return err
		},
		"on a stream": func() error {
			return w.WaitOn(streamtest.NewStream(t, g.Device(0)))
		},
	}
}

// Operations that had not begun when the group was closed have not completed, although the
// group's streams pass them.
func TestWaitsOfAClosedGroup(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, strategy := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.Windows} {
			for _, during := range []bool{false, true} {
				g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{Strategy: strategy})
				require.NoError(t, err)
				xs, _ := shards(t, g, 1000)
				opens := []func(){streamtest.Hold(t, g.Stream(0)), streamtest.Hold(t, g.Stream(1))}
				w, err := comm.Start(g, func() error { return comm.AllReduce(g, comm.Sum, xs...) })
				require.NoError(t, err)
				errs := make(chan error, 4)
				forms := waits(t, g, w)
				if during {
					for _, name := range []string{"group", "work"} {
						go func() { errs <- forms[name]() }()
					}
				}
				closed := make(chan error, 1)
				go func() { closed <- g.Close() }()
				for _, open := range opens {
					defer open()
				}
				for i := range devs {
					begun := func() (bool, error) {
						return collective.Of(g.Communicator(i)).Ended() != nil || g.Communicator(i).Err() != nil, nil
					}
					require.NoError(t, poll.Until(testgpu.Context(t), begun))
				}
				for _, open := range opens {
					open()
				}
				require.NoError(t, <-closed)
				if during {
					for range 2 {
						require.ErrorIs(t, <-errs, device.ErrClosed, "%s", strategy)
					}
				}
				for name, wait := range forms {
					err := wait()
					require.ErrorIs(t, err, device.ErrClosed, "%s %s", strategy, name)
					require.ErrorContains(t, err, "this process closed the group ", "%s %s", strategy, name)
				}
			}
		}
	})
}
