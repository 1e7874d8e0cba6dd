package nccl_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// with makes the Issuers of all ranks for a configuration.
func with(t *testing.T, ranks []rank, cfg func(i int) *nccl.CallConfig) []nccl.Issuer {
	t.Helper()
	list := make([]nccl.Issuer, len(ranks))
	for i, r := range ranks {
		var err error
		list[i], err = nccl.With(r.c, cfg(i))
		require.NoError(t, err)
	}
	return list
}

// Every collective with a configuration has the result of the plain one, at once and in a batch.
func TestCollectivesWithConfiguration(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	ranks := connect(t, devs)
	cfg := &nccl.CallConfig{MinCTAs: new(1), MaxCTAs: new(8), NVLSCTAs: new(4), CGAClusterSize: new(2), CTAPolicy: new(1), ProfilerTag: 7}
	on := with(t, ranks, func(int) *nccl.CallConfig { return cfg })
	const n = 4
	collectives := map[string]func(on nccl.Issuer, r rank, dst, src memory.Slice[int64]) error{
		"all-reduce": func(on nccl.Issuer, r rank, dst, src memory.Slice[int64]) error {
			return nccl.AllReduce(on, r.s, dst, src, nccl.Sum)
		},
		"reduce": func(on nccl.Issuer, r rank, dst, src memory.Slice[int64]) error {
			return nccl.Reduce(on, r.s, dst, src, nccl.Max, 1)
		},
		"broadcast": func(on nccl.Issuer, r rank, dst, src memory.Slice[int64]) error {
			return nccl.Broadcast(on, r.s, dst, src, 1)
		},
		"all-gather": func(on nccl.Issuer, r rank, dst, src memory.Slice[int64]) error {
			return nccl.AllGather(on, r.s, dst, src.Slice(0, n/2))
		},
		"reduce-scatter": func(on nccl.Issuer, r rank, dst, src memory.Slice[int64]) error {
			return nccl.ReduceScatter(on, r.s, dst.Slice(0, n/2), src, nccl.Sum)
		},
		"all-to-all": func(on nccl.Issuer, r rank, dst, src memory.Slice[int64]) error {
			return nccl.AllToAll(on, r.s, dst, src)
		},
		"gather": func(on nccl.Issuer, r rank, dst, src memory.Slice[int64]) error {
			return nccl.Gather(on, r.s, dst, src.Slice(0, n/2), 1)
		},
		"scatter": func(on nccl.Issuer, r rank, dst, src memory.Slice[int64]) error {
			return nccl.Scatter(on, r.s, dst.Slice(0, n/2), src, 1)
		},
	}
	for name, issue := range collectives {
		src, _ := buffers(t, ranks, n)
		result := func(on func(b *nccl.Batch, i int) nccl.Issuer) [][]int64 {
			dst, _ := buffers(t, ranks, n)
			return run(t, ranks, dst, func(i int, r rank) error { return issue(on(r.batch, i), r, dst[i], src[i]) })
		}
		want := result(func(b *nccl.Batch, i int) nccl.Issuer { return b.On(ranks[i].c) })
		require.Equal(t, want, result(func(b *nccl.Batch, i int) nccl.Issuer {
			x, err := nccl.With(b.On(ranks[i].c), cfg)
			require.NoError(t, err)
			return x
		}), name)
		dst, _ := buffers(t, ranks, n)
		each(t, devs, func(i int) error { return issue(on[i], ranks[i], dst[i], src[i]) })
		require.Equal(t, want, contents(t, ranks, dst), name)
	}
}

func TestCallConfigMistakes(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	ranks := connect(t, devs)
	event := func(i int, cfg *stream.EventConfig) *stream.Event {
		e, err := stream.NewEvent(devs[i], cfg)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, e.Close()) })
		return e
	}
	for want, cfg := range map[string]nccl.CallConfig{
		"MinCTAs is 0: want 1 to 64":                 {MinCTAs: new(0)},
		"MaxCTAs is 65: want 1 to 64":                {MaxCTAs: new(65)},
		"NVLSCTAs is -1: want 1 to 64":               {NVLSCTAs: new(-1)},
		"CGAClusterSize is 9: want 0 to 8":           {CGAClusterSize: new(9)},
		"CTAPolicy is 4: want 0 to 3":                {CTAPolicy: new(4)},
		"MinCTAs is 4 and MaxCTAs 2":                 {MinCTAs: new(4), MaxCTAs: new(2)},
		"NCCL reserves the highest bit":              {ProfilerTag: 1 << 63},
		"contains a NUL byte":                        {Algorithm: "ring\x00"},
		"LaunchEvent is of virtual:1":                {LaunchEvent: event(1, nil)},
		"LaunchEvent has Timing or Interprocess":     {LaunchEvent: event(0, &stream.EventConfig{Timing: true})},
		"on rank 0 of 2: LaunchEvent has Timing or ": {LaunchEvent: event(0, &stream.EventConfig{Interprocess: true})},
	} {
		_, err := nccl.With(ranks[0].c, &cfg)
		require.ErrorContains(t, err, want)
		require.ErrorIs(t, err, nccl.ErrorInvalidArgument)
	}
	_, err := nccl.With(nil, &nccl.CallConfig{})
	require.ErrorContains(t, err, "no communicator given")
	same, err := nccl.With(ranks[0].c, nil)
	require.NoError(t, err)
	require.Equal(t, nccl.Issuer(ranks[0].c), same)

	xs, _ := buffers(t, ranks, 4)
	on := with(t, ranks, func(int) *nccl.CallConfig { return &nccl.CallConfig{} })
	for want, err := range map[string]error{
		"ncclSend on rank 0 of 2: it has no CallConfig": nccl.Send(on[0], ranks[0].s, xs[0], 1),
		"ncclRecv on rank 0 of 2: it has no CallConfig": nccl.Recv(on[0], ranks[0].s, xs[0], 1),
		"all_gather_v on rank 0":                        nccl.AllGatherV(on[0], ranks[0].s, xs[0], xs[0].Slice(0, 2), []int{2, 2}),
	} {
		require.ErrorIs(t, err, nccl.ErrorInvalidUsage, want)
		require.ErrorContains(t, err, "it has no CallConfig")
	}
	// NCCL refuses an algorithm that it cannot use, and the communicator goes on.
	nvls := with(t, ranks, func(int) *nccl.CallConfig { return &nccl.CallConfig{Algorithm: "nvls"} })
	err = nccl.AllReduce(nvls[0], ranks[0].s, xs[0], xs[0], nccl.Sum)
	require.ErrorIs(t, err, nccl.ErrorInvalidArgument)
	require.ErrorContains(t, err, `algSelection "nvls"`)
	total(t, ranks)
	fallback := with(t, ranks, func(int) *nccl.CallConfig { return &nccl.CallConfig{Algorithm: "nvls", Fallback: true} })
	each(t, devs, func(i int) error { return nccl.AllReduce(fallback[i], ranks[i].s, xs[i], xs[i], nccl.Sum) })
}

// A stream that waits for the event of a launch does not wait for the collective.
func TestLaunchEvent(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	ranks := connect(t, devs)
	xs, in := buffers(t, ranks, 4)
	total(t, ranks) // connects the ranks
	events := make([]*stream.Event, 2)
	on := with(t, ranks, func(i int) *nccl.CallConfig {
		var err error
		events[i], err = stream.NewEvent(devs[i], nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, events[i].Close()) })
		return &nccl.CallConfig{LaunchEvent: events[i]}
	})
	require.NoError(t, nccl.AllReduce(on[0], ranks[0].s, xs[0], xs[0], nccl.Sum))
	side := streamtest.NewStream(t, devs[0])
	require.NoError(t, side.Wait(events[0]))
	require.NoError(t, side.Sync(testgpu.Context(t)))
	done, err := ranks[0].s.Query()
	require.NoError(t, err)
	require.False(t, done, "the collective waits for rank 1")
	require.NoError(t, nccl.AllReduce(on[1], ranks[1].s, xs[1], xs[1], nccl.Sum))
	for i, got := range contents(t, ranks, xs) {
		require.Equal(t, []int64{in[0][0] + in[1][0], in[0][1] + in[1][1]}, got[:2], "rank %d", i)
	}

	two := func(cfgs ...*nccl.CallConfig) error {
		return grouped([]rank{ranks[0], ranks[0]}, func(i int, r rank) error {
			x, err := nccl.With(r.on(), cfgs[i])
			require.NoError(t, err)
			y := xs[0].Slice(2*i, 2*i+2)
			return nccl.AllReduce(x, r.s, y, y, nccl.Sum)
		})
	}
	require.ErrorContains(t, two(&nccl.CallConfig{LaunchEvent: events[0]}, &nccl.CallConfig{LaunchEvent: events[0]}), "two operations have a CallConfig.LaunchEvent")
	require.ErrorContains(t, two(&nccl.CallConfig{CGAClusterSize: new(1)}, &nccl.CallConfig{CGAClusterSize: new(2)}), "different values of CallConfig.CGAClusterSize")
	_, err = graph.Capture([]*stream.Stream{ranks[0].s}, func() error {
		return nccl.AllReduce(on[0], ranks[0].s, xs[0], xs[0], nccl.Sum)
	}, nil)
	require.ErrorContains(t, err, "a graph cannot capture a collective with a CallConfig.LaunchEvent")
	total(t, ranks)
}

// On virtual devices the ranks of a process share the addresses of windows.
func TestPeerPtr(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	ranks := connect(t, devs)
	xs, windows := windowsOf(t, ranks)
	for _, w := range windows {
		for peer := range 2 {
			p, err := w.PeerPtr(peer)
			require.NoError(t, err)
			require.Equal(t, xs[peer].Ptr(), p)
		}
		_, err := w.PeerPtr(2)
		require.ErrorContains(t, err, "rank 2 does not exist")
	}
	for _, w := range windows {
		require.NoError(t, w.Close())
	}
	_, err := windows[0].PeerPtr(1)
	require.ErrorIs(t, err, device.ErrClosed)
}

// Each rank scales by a factor of its own, from the host and from the device, which
// is read when the operation runs.
func TestPreMulSum(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs := make([]memory.Slice[float32], 2)
		factors := make([]memory.Slice[float32], 2)
		sums := make([][2]*nccl.PreMulSum, 2)
		for i, r := range ranks {
			var err error
			xs[i], factors[i] = made(t, r.s, 1, 2, float32(4+i)), made[float32](t, r.s, 100)
			sums[i][0], err = nccl.NewPreMulSum(r.c, float32(0.5)*float32(i+1))
			require.NoError(t, err)
			sums[i][1], err = nccl.NewPreMulSumFrom(r.c, factors[i])
			require.NoError(t, err)
			require.NoError(t, factors[i].CopyFrom(r.s, []float32{2}))
		}
		for k, want := range [][]float32{{1.5, 3, 2 + 5}, {6, 12, 28}} {
			require.NoError(t, grouped(ranks, func(i int, r rank) error { return nccl.AllReduce(r.on(), r.s, xs[i], xs[i], sums[i][k].Op()) }))
			requireAll(t, ranks, xs, want, "sum %d", k)
		}
		r, op := ranks[0], sums[0][0].Op()
		ints, _ := buffers(t, ranks, 2)
		require.ErrorContains(t, nccl.AllReduce(r.on(), r.s, ints[0], ints[0], op), "is a reduction of float32 and not of int64")
		for i := range ranks {
			require.NoError(t, sums[i][0].Close())
			require.NoError(t, sums[i][0].Close())
		}
		require.ErrorContains(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], op), "is not a reduction of this communicator")
		_, err := nccl.NewPreMulSum(r.c, true)
		require.ErrorContains(t, err, "cannot multiply bool")
		_, err = nccl.NewPreMulSumFrom(r.c, xs[0])
		require.ErrorContains(t, err, "has 3 elements: want 1")
		_, err = nccl.NewPreMulSumFrom(r.c, factors[1])
		require.ErrorContains(t, err, "the buffer is of")
		_, err = nccl.NewPreMulSum[float32](nil, 2)
		require.ErrorContains(t, err, "no communicator given")
		// The second one is closed by its communicator.
		each(t, devs, func(i int) error { return ranks[i].c.Close() })
		for i := range ranks {
			require.NoError(t, sums[i][1].Close())
		}
		_, err = nccl.NewPreMulSum(r.c, float32(1))
		require.ErrorIs(t, err, device.ErrClosed)
	})
}

func TestReductionsOfSomeTypes(t *testing.T) {
	ranks := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: "2.23.4"}))
	r := ranks[0]
	f8, b := room[memory.Float8E4M3Bits](t, r.s, 4), room[bool](t, r.s, 4)
	var missing *device.UnsupportedError
	err := nccl.AllReduce(r.on(), r.s, f8, f8, nccl.Sum)
	require.ErrorAs(t, err, &missing)
	require.ErrorContains(t, err, "ncclAllReduce on rank 0 of 1 of float8_e4m3fn needs NCCL 2.24.3; this machine has NCCL 2.23.4")
	_, err = nccl.NewPreMulSum(r.c, memory.Float8E4M3Bits(0))
	require.ErrorAs(t, err, &missing)
	require.ErrorContains(t, nccl.AllReduce(r.on(), r.s, b, b, nccl.Avg), "bools have no average")
	require.NoError(t, nccl.Broadcast(r.on(), r.s, f8, f8, 0))
	_, err = nccl.NewCommunicator(testgpu.Context(t), r.c.Device(), nccl.UniqueID{}, 0, 1, &nccl.Config{TrafficClass: new(1)})
	require.ErrorContains(t, err, "needs NCCL 2.26.2; this machine has NCCL 2.23.4")
}
