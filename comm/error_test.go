package comm_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// Errors of arguments say what is wrong with them, and nothing about the group where it has
// nothing to do with that.
func TestArgumentErrorsSayNoMoreThanIsWrong(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	xs, _ := shards(t, g, 8)
	closed, err := memory.Make[float32](g.Stream(0), 8)
	require.NoError(t, err)
	require.NoError(t, closed.Close())
	_, unknown := comm.Local(testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}), &comm.Config{Strategy: "fastest"})
	_, noOne := comm.Local(testgpu.Context(t), []*device.Device{nil, nil}, nil)
	_, noWork := comm.Start(g, nil)
	for text, err := range map[string]error{
		`comm: there is no strategy "fastest": want one of`: unknown,
		"comm: local: device 0 of 2 is nil":                 noOne,
		"comm: start: no function given":                    noWork,
		"use after Close":                                   comm.AllReduce(g, comm.Sum, closed, xs[1]),
	} {
		require.ErrorIs(t, err, comm.ErrMismatch, text)
		require.ErrorContains(t, err, text)
		require.NotContains(t, err.Error(), "do not fit the group")
	}
	require.ErrorIs(t, comm.AllReduce(g, comm.Sum, closed, xs[1]), device.ErrClosed)
}

// A group that this process has ended says so, and why.
func TestErrorsOfAnEndedGroup(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	for how, end := range map[string]func(g *comm.Group) error{
		"closed the group":    (*comm.Group).Close,
		"shut the group down": func(g *comm.Group) error { return g.Shutdown(testgpu.Context(t)) },
		"closed the group (fail)": func(g *comm.Group) error {
			_ = g.Communicator(1).Abort()
			_ = g.Wait(testgpu.Context(t))
			return g.Close()
		},
	} {
		g, err := comm.Local(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		xs, _ := shards(t, g, 8)
		require.NoError(t, end(g), how)
		err = comm.AllReduce(g, comm.Sum, xs...)
		require.ErrorIs(t, err, device.ErrClosed)
		require.NotContains(t, err.Error(), "use after Close")
		if how == "closed the group (fail)" {
			require.ErrorIs(t, err, comm.ErrBroken)
			require.ErrorContains(t, err, "; it was broken before: nccl: rank 1 of 2 (virtual:1): this process aborted the communicator ")
			continue
		}
		require.ErrorContains(t, err, "comm: all-reduce: this process "+how+" ")
		require.ErrorContains(t, g.Err(), "comm: error: this process "+how+" ")
		require.ErrorContains(t, nccl.AllReduce(g.Communicator(0), g.Stream(0), xs[0], xs[0], nccl.Sum), "ncclAllReduce on rank 0 of 2 (virtual:0): this process ")
	}
}
