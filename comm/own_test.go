package comm_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// localOwn is local with Chorus's own kernels.
func localOwn(t *testing.T, devs []*device.Device, n *nccl.Config) *comm.Group {
	t.Helper()
	return groupBy(t, devs, comm.Config{NCCL: n, Strategy: comm.OwnKernels})
}

// TestOwnKernelsConform checks all collectives, of sizes on both sides of where NCCL
// takes over, on groups of one process and joined ones.
func TestOwnKernelsConform(t *testing.T) {
	comm.SetOwnBytes(t, 8<<10, 2<<10)
	turns := testgpu.TurnsRaced(t, 5)
	for n := 1; n <= 8; n++ {
		if n > 3 && !turns(0, n-4) {
			continue
		}
		t.Run(fmt.Sprint("virtual/", n), func(t *testing.T) {
			g := localOwn(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n}), nil)
			require.Equal(t, n > 1, g.Strategy() == comm.OwnKernels)
			require.NoError(t, conform(testgpu.Context(t), g))
		})
	}
	t.Run("cuda", func(t *testing.T) {
		require.NoError(t, conform(testgpu.Context(t), localOwn(t, testgpu.CUDA(t, 2), nil)))
	})
	t.Run("joined", func(t *testing.T) {
		t.Setenv(env.CommStrategy.Name, "own")
		gs := joined(t, t.Context(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}))
		require.Equal(t, comm.OwnKernels, gs[2].Strategy())
		groups.Each(t, gs, func(_ int, g *comm.Group) error { return conform(testgpu.Context(t), g) })
	})
	t.Run("processes", func(t *testing.T) {
		eachBackend(t, 2, 2, testgpu.Ranks, func(t *testing.T, backend string, ranks int) {
			code, out, _ := job(t, backend, "conform", ranks, env.CommStrategy.Name+"=own")
			require.Zero(t, code, out)
		})
	})
}

// All that own kernels reduce fits in lines, with any number of ranks.
func TestOwnKernelsHaveRoomForLines(t *testing.T) {
	for _, n := range []int{2, 3, 5, 8} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n})
		g := groupBy(t, devs, comm.Config{Strategy: comm.TwoShotLines})
		x := collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllReduce, DType: memory.Uint8, N: 4 << 20}}, Together: true}
		require.Equal(t, comm.TwoShotLines, g.Choice(0, x), "%d ranks", n)
	}
}

// TestOwnKernelsTakeWhatIsSmall fails every collective of NCCL.
func TestOwnKernelsTakeWhatIsSmall(t *testing.T) {
	comm.SetOwnBytes(t, 4096, 1024)
	const faults = "ncclAllReduce#*=ncclInternalError,ncclAllGather#*=ncclInternalError,ncclReduceScatter#*=ncclInternalError,ncclBroadcast#*=ncclInternalError,ncclAlltoAll#*=ncclInternalError"
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: faults})
	g := localOwn(t, devs, nil)
	make := func(n int) comm.Shards[float32] {
		xs, _ := shards(t, g, n)
		return xs
	}
	small := map[string]func() error{
		"all-reduce":     func() error { return comm.AllReduce(g, comm.Sum, make(1024)...) },
		"all-gather":     func() error { return comm.AllGather(g, make(512), make(256)) },
		"reduce-scatter": func() error { return comm.ReduceScatter(g, comm.Max, make(256), make(512)) },
		"broadcast":      func() error { return comm.BroadcastFrom(g, 1, make(256)...) },
		"all-to-all":     func() error { return comm.AllToAll(g, make(512), make(512)) },
	}
	for name, call := range small {
		require.NoError(t, call(), name)
	}
	require.NoError(t, g.Wait(testgpu.Context(t)))
	// Two in a group are NCCL's, as is what is large.
	require.ErrorIs(t, routed(g, func(b *nccl.Batch) (err error) {
		for range 2 {
			for i, x := range make(8) {
				err = errors.Join(err, nccl.AllReduce(b.On(g.Communicator(i)), g.Stream(i), x, x, nccl.Sum))
			}
		}
		return err
	}), nccl.ErrorInternal)
	// As are operations that package nccl issues.
	require.ErrorIs(t, nccl.Group(func(b *nccl.Batch) (err error) {
		for i, x := range make(8) {
			s := streamtest.NewStream(t, g.Device(i))
			err = errors.Join(err, s.WaitStream(g.Stream(i)), nccl.AllReduce(b.On(g.Communicator(i)), s, x, x, nccl.Sum))
		}
		return err
	}), nccl.ErrorInternal)
	few, many := make(8), make(1025)
	require.ErrorIs(t, comm.AllReduce(g, comm.Sum, many...), comm.ErrBroken)
	require.ErrorIs(t, comm.AllReduce(g, comm.Sum, few...), comm.ErrBroken, "what follows a failure")
}

// TestOwnKernelsAndTypes reduces what own kernels have no reduction for, and averages.
func TestOwnKernelsAndTypes(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localOwn(t, devs, nil)
		bools, err := comm.Make[bool](g, 2)
		require.NoError(t, err)
		defer bools.Close()
		floats, err := comm.Make[float32](g, 2)
		require.NoError(t, err)
		defer floats.Close()
		for i := range bools {
			require.NoError(t, bools[i].CopyFrom(g.Stream(i), []bool{true, i == 1}))
			require.NoError(t, floats[i].CopyFrom(g.Stream(i), []float32{1, float32(4 * i)}))
		}
		require.NoError(t, comm.AllReduce(g, comm.Sum, bools...))
		require.NoError(t, comm.AllReduce(g, comm.Avg, floats...))
		require.NoError(t, comm.AllReduce(g, comm.Sum, floats[0].Slice(0, 0), floats[1].Slice(0, 0)))
		for i := range bools {
			raw := make([]uint8, 2)
			bytes := bools[i].AsBytes()
			require.NoError(t, bytes.CopyTo(g.Stream(i), raw))
			means := make([]float32, 2)
			require.NoError(t, floats[i].CopyTo(g.Stream(i), means))
			require.NoError(t, g.Stream(i).Sync(testgpu.Context(t)))
			require.Equal(t, []uint8{1, 1}, raw)
			require.Equal(t, []float32{1, 2}, means)
		}
		require.NoError(t, g.Wait(testgpu.Context(t)))
	})
}

// TestOwnKernelsInGraphs mixes graphs of small and large all-reduces with others.
func TestOwnKernelsInGraphs(t *testing.T) {
	comm.SetOwnBytes(t, 4096, 1024)
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localOwn(t, devs, nil)
		sizes := []int{3, 1024, 1025, 5000}
		var all []comm.Shards[float32]
		var want [][]float32
		for _, n := range sizes {
			xs, hs := shards(t, g, n)
			all, want = append(all, xs), append(want, total(hs))
		}
		x, err := graph.Capture(g.Streams(), func() error {
			for _, xs := range all {
				if err := comm.AllReduce(g, comm.Max, xs...); err != nil {
					return err
				}
			}
			return nil
		}, nil)
		require.NoError(t, err)
		defer x.Close()
		r := rand.New(rand.NewPCG(5, 5))
		for k, xs := range all { // a sum once; the greatest of equals is what they are
			require.NoError(t, comm.AllReduce(g, comm.Sum, xs...), k)
		}
		for range 20 {
			if r.IntN(2) == 0 {
				require.NoError(t, g.Stream(0).WaitStream(g.Stream(1)))
				require.NoError(t, x.Launch(g.Stream(0)))
				require.NoError(t, g.Stream(1).WaitStream(g.Stream(0)))
			} else {
				require.NoError(t, comm.AllReduce(g, comm.Min, all[r.IntN(len(all))]...))
			}
		}
		require.NoError(t, g.Wait(testgpu.Context(t)))
		for k, xs := range all {
			for i := range xs {
				require.Equal(t, want[k], read(t, g, i, xs[i]), "%d elements, rank %d", sizes[k], i)
			}
		}
		var used *nccl.InUseError
		require.ErrorAs(t, g.Close(), &used)
	})
}

// TestOwnKernelsOfGraphsOnOtherStreams launches a graph on a stream of one rank, the
// group's or another, beside operations of the group, without a word about order.
func TestOwnKernelsOfGraphsOnOtherStreams(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localOwn(t, devs, &nccl.Config{Timeout: time.Minute})
		other := streamtest.NewStream(t, devs[0])
		for _, s := range []*stream.Stream{g.Stream(0), other} {
			xs, hs := shards(t, g, 2000)
			ys, ks := shards(t, g, 2000)
			x, err := graph.Capture(g.Streams(), func() error { return comm.AllReduce(g, comm.Max, xs...) }, nil)
			require.NoError(t, err)
			defer x.Close()
			require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
			require.NoError(t, comm.AllReduce(g, comm.Sum, ys...))
			require.NoError(t, g.Wait(testgpu.Context(t)))
			for range 30 {
				require.NoError(t, x.Launch(s))
				require.NoError(t, comm.AllReduce(g, comm.Max, ys...))
				require.NoError(t, comm.AllReduce(g, comm.Min, ys...))
			}
			require.NoError(t, g.Wait(testgpu.Context(t)))
			require.NoError(t, s.Sync(testgpu.Context(t)))
			for i := range xs {
				require.Equal(t, total(hs), read(t, g, i, xs[i]))
				require.Equal(t, total(ks), read(t, g, i, ys[i]))
			}
		}
	})
}

// TestOwnKernelsGiveUp checks that a rank that does not come is named within the
// deadline, and that the one that waits for it ends.
func TestOwnKernelsGiveUp(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localOwn(t, devs, &nccl.Config{Timeout: time.Minute})
		xs, _ := shards(t, g, 100)
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		require.NoError(t, g.Wait(testgpu.Context(t)))
		require.NoError(t, g.SetTimeout(shortTimeout))
		require.NoError(t, reduceAlone(g, 0, xs[0], nccl.Sum))
		err := g.Wait(testgpu.Context(t))
		require.ErrorIs(t, err, comm.ErrBroken)
		require.ErrorContains(t, err, "rank 1")
		require.NoError(t, g.Stream(0).Sync(testgpu.Context(t)), "it waits for rank 1 no longer")
		require.NoError(t, g.Close())
	})
}

// TestOwnKernelsClosedUnderWait checks that what Close ends is not taken for done.
func TestOwnKernelsClosedUnderWait(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localOwn(t, devs, nil)
		xs, _ := shards(t, g, 100)
		require.NoError(t, g.Wait(testgpu.Context(t)))
		require.NoError(t, reduceAlone(g, 0, xs[0], nccl.Sum))
		waits, over := make(chan struct{}), make(chan error)
		go func() {
			close(waits)
			over <- g.Wait(testgpu.Context(t))
		}()
		<-waits
		require.NoError(t, g.Close())
		require.Error(t, <-over)
	})
}

// TestOwnKernelsOfProcessesThatDisagree lets one process reduce an element less than the
// others: none takes what the others sent for its own, and the difference is named long before the deadline.
func TestOwnKernelsOfProcessesThatDisagree(t *testing.T) {
	t.Parallel()
	eachBackend(t, 2, 2, testgpu.Ranks, func(t *testing.T, backend string, _ int) {
		code, out, _ := job(t, backend, "fewer", 2, env.CommStrategy.Name+"=own")
		require.NotZero(t, code, out)
		// The rank that is later may find that the other one has ended. Its error has that one's operation, too.
		const says = `(?m)^\[rank %d\] worker: .*rank %d differs: its last reported operation is ncclAllReduce\(10485.*the ranks do not issue the same operations as collective 11: rank %[1]d of 2 issued ncclAllReduce\(10485`
		const late = `(?m)^\[rank %d\] worker: .*rank %d was lost: its last reported operation is ncclAllReduce\(10485.*`
		require.Regexp(t, fmt.Sprintf(says, 0, 1)+"|"+fmt.Sprintf(says, 1, 0), out)
		for rank := range 2 {
			require.Regexp(t, fmt.Sprintf(says, rank, 1-rank)+"|"+fmt.Sprintf(late, rank, 1-rank), out)
		}
	})
}

// TestOwnKernelsWhereTheyCannot checks that NCCL does it all where devices do not reach
// each other's memory.
func TestOwnKernelsWhereTheyCannot(t *testing.T) {
	t.Setenv(env.P2P.Name, "off")
	g := localOwn(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), nil)
	require.Equal(t, comm.NCCLOnly, g.Strategy())
	require.NoError(t, conform(testgpu.Context(t), g))
}

// TestLinesWhereTheyCannot checks that nobody reduces by lines where PCIe joins two GPUs:
// who asks for them is told why, or has NCCL where a group cannot have what it was made
// with. Own kernels go on without.
func TestLinesWhereTheyCannot(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, VirtualPCIe: [][2]int{{1, 2}}})
	g := localOwn(t, devs, nil)
	require.Equal(t, []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.Pipelined}, g.Strategies())
	err := g.Use(testgpu.Context(t), comm.TwoShotLines)
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "the group has no strategy two-shot-lines: it has [nccl own one-shot two-shot-packets two-shot pipelined]: "+
		"two-shot-lines needs GPUs that NVLink joins, which keeps lines of 128 bytes whole; this machine has another link between ranks 1 and 2")
	require.NoError(t, conform(testgpu.Context(t), g))
	g = groupBy(t, devs, comm.Config{Strategy: comm.TwoShotLines})
	require.Equal(t, comm.NCCLOnly, g.Strategy())
	require.NoError(t, conform(testgpu.Context(t), g))
}

func TestStrategies(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	_, err := comm.Local(t.Context(), devs, &comm.Config{Strategy: "fast"})
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, `there is no strategy "fast"`)
	t.Setenv(env.CommStrategy.Name, "fast")
	_, err = comm.Local(t.Context(), devs, nil)
	require.ErrorContains(t, err, env.CommStrategy.Name)
	t.Setenv(env.CommStrategy.Name, "own")
	g, err := comm.Local(t.Context(), devs, &comm.Config{Strategy: comm.NCCLOnly})
	require.NoError(t, err)
	require.Equal(t, comm.NCCLOnly, g.Strategy())
	require.NoError(t, g.Close())
}

// TestStrategiesThatDisagree checks that nobody waits for own kernels that others do not have.
func TestStrategiesThatDisagree(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	_, errs := joinBy(t, devs, func(i int, b *exchange) (comm.Rendezvous, *comm.Config) {
		return b, &comm.Config{Strategy: []comm.Strategy{comm.OwnKernels, comm.NCCLOnly}[i]}
	})
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, "the strategy of rank 0 is own and that of rank 1 is nccl")
	}
}

// TestWaysThatDisagree issues an operation so that one rank has it by NCCL and the other
// one not: by other streams, and by other groups.
func TestWaysThatDisagree(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, s := range []comm.Strategy{comm.OwnKernels, comm.Windows} {
			for name, other := range map[string]func(g *comm.Group, x memory.Slice[float32]) error{
				"stream": func(g *comm.Group, x memory.Slice[float32]) error {
					s := streamtest.NewStream(t, g.Device(1))
					require.NoError(t, s.WaitStream(g.Stream(1)))
					return nccl.AllReduce(g.Communicator(1), s, x, x, nccl.Sum)
				},
				"package nccl": func(g *comm.Group, x memory.Slice[float32]) error {
					return nccl.AllReduce(g.Communicator(1), g.Stream(1), x, x, nccl.Sum)
				},
				"group": func(g *comm.Group, x memory.Slice[float32]) error {
					y, err := memory.Make[float32](g.Stream(1), x.Len())
					require.NoError(t, err)
					t.Cleanup(func() { require.NoError(t, y.Close()) })
					return routed(g, func(b *nccl.Batch) error {
						one := func(x memory.Slice[float32]) error {
							return nccl.AllReduce(b.On(g.Communicator(1)), g.Stream(1), x, x, nccl.Sum)
						}
						return errors.Join(one(x), one(y))
					})
				},
			} {
				g := groupBy(t, devs, comm.Config{Strategy: s})
				xs, _ := shards(t, g, 8)
				// NCCL connects the ranks, for which it waits for all.
				require.NoError(t, comm.AllReduce(g, nccl.Sum, xs...))
				require.NoError(t, reduceAlone(g, 0, xs[0], nccl.Sum))
				err := other(g, xs[1])
				require.ErrorIs(t, err, nccl.ErrorInvalidUsage, "%s %s", s, name)
				require.ErrorContains(t, err, "but different backends execute them")
				// NCCL cannot abort an operation on windows that waits for the other rank.
				require.NoError(t, reduceAlone(g, 1, xs[1], nccl.Sum))
				require.NoError(t, g.Wait(testgpu.Context(t)))
				require.NoError(t, g.Close())
			}
		}
	})
}

// An operation on windows that waits for another rank outlives the abort of its
// communicator in NCCL 2.28.3: the group ends all the same, and says so.
func TestWindowsThatCannotBeAborted(t *testing.T) {
	t.Parallel()
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "hang@ncclCommAbort#*"})
	g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{Strategy: comm.Windows})
	require.NoError(t, err)
	xs, _ := shards(t, g, 8)
	require.NoError(t, comm.AllReduce(g, nccl.Sum, xs...))
	require.NoError(t, reduceAlone(g, 0, xs[0], nccl.Sum))
	err = g.Close()
	require.ErrorContains(t, err, "ncclCommAbort on rank 0 of 2 (virtual:0): it has not returned after 10s and is left alone: end the process")
}

// TestVersionsThatDisagree checks that ranks with another NCCL are told, and do not wait.
func TestVersionsThatDisagree(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: "2.28.3"})
	devs[1] = testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: "2.26.2"})[1]
	_, errs := joinBy(t, devs, func(_ int, b *exchange) (comm.Rendezvous, *comm.Config) { return b, nil })
	for _, err := range errs {
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, "rank 0 has NCCL 2.28.3 and rank 1 NCCL 2.26.2: let all load the same")
	}
}

// TestOwnKernelsBesideTransfers has two of three ranks send and receive in the group that
// has their all-reduce: what carries that out must not depend on it. The third rank has a goroutine of its own, because
// NCCL waits for the GPUs' kernels when it connects two ranks, and these wait for the third rank.
func TestOwnKernelsBesideTransfers(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		g := localOwn(t, devs, nil)
		xs, hs := shards(t, g, 24)
		ys, sent := shards(t, g, 24)
		reduce := func(on nccl.Issuer, i int) error { return nccl.AllReduce(on, g.Stream(i), xs[i], xs[i], nccl.Sum) }
		third := make(chan error, 1)
		go func() { third <- alone(g, 2, func(on nccl.Issuer) error { return reduce(on, 2) }) }()
		require.NoError(t, routed(g, func(b *nccl.Batch) error {
			return errors.Join(reduce(b.On(g.Communicator(0)), 0), nccl.Send(b.On(g.Communicator(0)), g.Stream(0), ys[0], 1),
				nccl.Recv(b.On(g.Communicator(1)), g.Stream(1), ys[1], 0), reduce(b.On(g.Communicator(1)), 1))
		}))
		require.NoError(t, <-third)
		require.NoError(t, g.Wait(testgpu.Context(t)))
		for i := range xs {
			require.Equal(t, total(hs), read(t, g, i, xs[i]))
		}
		require.Equal(t, sent[0], read(t, g, 1, ys[1]))
	})
}
