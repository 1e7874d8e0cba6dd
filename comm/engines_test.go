package comm_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// TestCopyEngines lets NCCL fail: what is of all ranks at once does not need it.
func TestCopyEngines(t *testing.T) {
	const faults = "ncclAllGather#*=ncclInvalidUsage,ncclAlltoAll#*=ncclInvalidUsage"
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: faults})
	g := groupBy(t, devs, comm.Config{Strategy: comm.CopyEngines})
	xs, hs := shards(t, g, 30)
	ys, _ := shards(t, g, 90)
	whole := slices.Concat(hs...)
	all := func() error { return comm.AllGather(g, ys, xs) }
	x, err := graph.Capture(g.Streams(), all, nil)
	require.NoError(t, err)
	defer x.Close()
	for name, call := range map[string]func() error{
		"by itself":  all,
		"in a graph": func() error { return x.Launch(g.Stream(1)) },
		"in a batch": func() error {
			return g.Batch(func(b *comm.Batch) error { return comm.AllGather(b, ys, xs) })
		},
		"in another order": func() error {
			return routed(g, func(b *nccl.Batch) error {
				into := func(i int) error { return nccl.AllGather(b.On(g.Communicator(i)), g.Stream(i), ys[i], xs[i]) }
				return errors.Join(into(2), into(0), into(1))
			})
		},
		"in place": func() error {
			var parts comm.Shards[float32]
			for i := range ys {
				part := ys[i].Slice(30*i, 30*i+30)
				require.NoError(t, part.CopyFrom(g.Stream(i), hs[i]))
				parts = append(parts, part)
			}
			return comm.AllGather(g, ys, parts)
		},
	} {
		for i := range ys {
			require.NoError(t, ys[i].CopyFrom(g.Stream(i), make([]float32, 90)))
			require.NoError(t, g.Stream(1).WaitStream(g.Stream(i)), "for the graph")
		}
		require.NoError(t, call(), name)
		for i := range ys {
			require.NoError(t, g.Stream(i).WaitStream(g.Stream(1)))
			require.Equal(t, whole, read(t, g, i, ys[i]), name)
		}
	}
	zs, _ := shards(t, g, 90)
	require.NoError(t, comm.AllToAll(g, zs, ys))
	for i := range zs {
		require.Equal(t, slices.Repeat(hs[i], 3), read(t, g, i, zs[i]))
	}
	// What is overwritten at once is read before, on the other ranks too.
	for round := range 20 {
		for i := range xs {
			require.NoError(t, xs[i].CopyFrom(g.Stream(i), slices.Repeat([]float32{float32(round)}, 30)))
		}
		require.NoError(t, all())
		for i := range xs {
			require.NoError(t, xs[i].Zero(g.Stream(i)))
		}
		for i := range ys {
			require.Equal(t, slices.Repeat([]float32{float32(round)}, 90), read(t, g, i, ys[i]))
		}
	}
	// One rank by itself, and two of three, are NCCL's.
	require.ErrorIs(t, routed(g, func(b *nccl.Batch) error {
		return errors.Join(nccl.AllGather(b.On(g.Communicator(0)), g.Stream(0), ys[0], xs[0]), nccl.AllGather(b.On(g.Communicator(1)), g.Stream(1), ys[1], xs[1]))
	}), nccl.ErrorInvalidUsage)
}

// TestCopyEnginesOrTheNext gives a group a tuning by which copy engines are the fastest,
// and own kernels next: these have what is not of all ranks at once, and NCCL nothing.
func TestCopyEnginesOrTheNext(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	tuning := &comm.Tuning{For: siteOf(t, devs), Choices: []comm.Choice{{Operation: "all-gather", Bytes: 64, Times: []comm.Timing{
		{Strategy: comm.CopyEngines}, {Strategy: comm.OwnKernels, Micros: 1}, {Strategy: comm.NCCLOnly, Micros: 2}}}}}
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: tuning})
	x := collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllGather, DType: memory.Float32, N: 30}}}
	require.Equal(t, comm.OwnKernels, g.Chosen(x))
	x.Together = true
	require.Equal(t, comm.CopyEngines, g.Chosen(x))
	xs, hs := shards(t, g, 30)
	ys, _ := shards(t, g, 60)
	other, _ := shards(t, g, 8)
	into := func(on nccl.Issuer, i int) error { return nccl.AllGather(on, g.Stream(i), ys[i], xs[i]) }
	one := func(i int) error { return alone(g, i, func(on nccl.Issuer) error { return into(on, i) }) }
	captured := func(i int) error {
		x, err := graph.Capture([]*stream.Stream{g.Stream(i)}, func() error { return one(i) }, nil)
		if err != nil {
			return err
		}
		return errors.Join(x.Launch(g.Stream(i)), x.Close())
	}
	for name, call := range map[string]func() error{
		"together":              func() error { return comm.AllGather(g, ys, xs) },
		"one after the other":   func() error { return errors.Join(one(0), one(1)) },
		"in graphs of one rank": func() error { return errors.Join(captured(0), captured(1)) },
		"in groups of one": func() error {
			return errors.Join(routed(g, func(b *nccl.Batch) error { return into(b.On(g.Communicator(0)), 0) }), one(1))
		},
		"in a group with transfers": func() error {
			return routed(g, func(b *nccl.Batch) error {
				first, second := b.On(g.Communicator(0)), b.On(g.Communicator(1))
				return errors.Join(into(first, 0), transfer(first, g.Stream(0), other[0]), into(second, 1))
			})
		},
	} {
		for i := range ys {
			require.NoError(t, ys[i].Zero(g.Stream(i)))
		}
		stop := gpu.DeviceOf(devs[0]).System().Machine.CountCalls()
		require.NoError(t, call(), name)
		calls := stop()
		require.Zero(t, calls["ncclAllGather"], "%s: %v", name, calls)
		require.Equal(t, name == "together", calls["cuMemcpyDtoDAsync"] == 4, "%s: %v", name, calls)
		for i := range ys {
			require.Equal(t, slices.Concat(hs...), read(t, g, i, ys[i]), name)
		}
	}
}

// transfer sends what rank 0 has in x to itself, in place.
func transfer(on nccl.Issuer, s *stream.Stream, x memory.Slice[float32]) error {
	return errors.Join(nccl.Send(on, s, x.Slice(0, 8), 0), nccl.Recv(on, s, x.Slice(0, 8), 0))
}

// TestCopyEnginesInGraphs gives a group a tuning by which copy engines are the fastest in
// graphs only.
func TestCopyEnginesInGraphs(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	tuning := &comm.Tuning{For: siteOf(t, devs), Choices: []comm.Choice{{Operation: "all-gather", Bytes: 64, Times: []comm.Timing{
		{Strategy: comm.CopyEngines, Micros: 1, Eager: 3}, {Strategy: comm.OwnKernels, Micros: 2}}}}}
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: tuning})
	x := collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllGather, DType: memory.Float32, N: 30}}, Together: true}
	require.Equal(t, comm.OwnKernels, g.Chosen(x))
	x.Captured = true
	require.Equal(t, comm.CopyEngines, g.Chosen(x))
	x.Together = false
	require.Equal(t, comm.OwnKernels, g.Chosen(x))

	xs, hs := shards(t, g, 30)
	ys, _ := shards(t, g, 60)
	all := func() error { return comm.AllGather(g, ys, xs) }
	copies := func(call func() error) uint64 {
		stop := gpu.DeviceOf(devs[0]).System().Machine.CountCalls()
		require.NoError(t, call())
		n := stop()["cuMemcpyDtoDAsync"]
		for i := range ys {
			require.Equal(t, slices.Concat(hs...), read(t, g, i, ys[i]))
			require.NoError(t, ys[i].Zero(g.Stream(i)))
		}
		return uint64(n)
	}
	require.Zero(t, copies(all))
	require.EqualValues(t, 4, copies(func() error {
		exec, err := graph.Capture(g.Streams(), all, nil)
		if err != nil {
			return err
		}
		s := g.Stream(0)
		return errors.Join(s.WaitStream(g.Stream(1)), exec.Launch(s), g.Stream(1).WaitStream(s), exec.Close())
	}))
}

// TestCopyEnginesFail has a copy between two ranks fail in the middle. Each rank has tested a copy to each other one before.
func TestCopyEnginesFail(t *testing.T) {
	t.Setenv(env.P2P.Name, "force") // whose test copies too
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: "cuMemcpyDtoDAsync#11=CUDA_ERROR_INVALID_VALUE"})
	g := groupBy(t, devs, comm.Config{Strategy: comm.CopyEngines})
	xs, _ := shards(t, g, 30)
	ys, _ := shards(t, g, 90)
	stop := gpu.DeviceOf(devs[0]).System().Machine.CountCalls()
	err := comm.AllGather(g, ys, xs)
	calls := stop()
	require.ErrorIs(t, err, comm.ErrBroken)
	require.ErrorContains(t, err, "cuMemcpyDtoDAsync")
	// The streams meet before the copies, and behind those that were enqueued: two wait
	// for one there, and that for them.
	require.Equal(t, 2*4, calls["cuStreamWaitEvent"], "%v", calls)
	require.NoError(t, g.Close())
}

// TestCopyEnginesWhereTheyCannot leaves all-gathers to NCCL where ranks are in several groups, as those of several processes, and everything where
// devices do not reach each other.
func TestCopyEnginesWhereTheyCannot(t *testing.T) {
	t.Setenv(env.CommStrategy.Name, "copy-engines")
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	gs := joined(t, t.Context(), devs)
	require.Equal(t, comm.CopyEngines, gs[1].Strategy())
	stop := gpu.DeviceOf(devs[0]).System().Machine.CountCalls()
	groups.Each(t, gs, func(i int, g *comm.Group) error { return conformParts(testgpu.Context(t), g, 500) })
	require.Zero(t, stop()["cuMemcpyDtoDAsync"])
	t.Setenv(env.P2P.Name, "off")
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	require.Equal(t, comm.NCCLOnly, g.Strategy())
}
