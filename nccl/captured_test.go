package nccl_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// The first operation between ranks, for which NCCL connects them, may be captured: by
// each rank in a graph of its own, and by one goroutine for all. A capture of the mode
// global has no room for it.
func TestFirstOperationIsCaptured(t *testing.T) {
	operations := map[string]func(r rank, dst, src memory.Slice[int64]) error{
		"all-reduce": func(r rank, dst, src memory.Slice[int64]) error {
			return nccl.AllReduce(r.on(), r.s, dst, src, nccl.Sum)
		},
		"all-to-all": func(r rank, dst, src memory.Slice[int64]) error { return nccl.AllToAll(r.on(), r.s, dst, src) },
		"exchange": func(r rank, dst, src memory.Slice[int64]) error {
			both := func(b *nccl.Batch) error {
				return errors.Join(nccl.Send(b.On(r.c), r.s, src, 1-r.c.Rank()), nccl.Recv(b.On(r.c), r.s, dst, 1-r.c.Rank()))
			}
			if r.batch != nil {
				return both(r.batch)
			}
			return nccl.Group(both)
		},
	}
	wants := map[string]func(in [][]int64) [][]int64{
		"all-reduce": func(in [][]int64) [][]int64 { return [][]int64{sum(in), sum(in)} },
		"all-to-all": func(in [][]int64) [][]int64 {
			return [][]int64{concat([][]int64{in[0][:4], in[1][:4]}), concat([][]int64{in[0][4:], in[1][4:]})}
		},
		"exchange": func(in [][]int64) [][]int64 { return [][]int64{in[1], in[0]} },
	}
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for name, issue := range operations {
			for _, mode := range []graph.Mode{graph.ThreadLocal, graph.Relaxed} {
				ranks := connect(t, devs)
				xs, in := buffers(t, ranks, 8)
				ys, _ := buffers(t, ranks, 8)
				each(t, devs, func(i int) error {
					r := ranks[i]
					return replay(&graph.Config{Mode: mode}, []*stream.Stream{r.s}, func() error { return issue(r, ys[i], xs[i]) })
				})
				require.Equal(t, wants[name](in), contents(t, ranks, ys), "%s captured %s by each", name, mode)
			}
			ranks := connect(t, devs)
			xs, in := buffers(t, ranks, 8)
			ys, _ := buffers(t, ranks, 8)
			require.NoError(t, ranks[0].s.WaitStream(ranks[1].s))
			require.NoError(t, replay(nil, []*stream.Stream{ranks[0].s, ranks[1].s}, func() error {
				return grouped(ranks, func(i int, r rank) error { return issue(r, ys[i], xs[i]) })
			}), name)
			require.NoError(t, ranks[1].s.WaitStream(ranks[0].s))
			require.Equal(t, wants[name](in), contents(t, ranks, ys), "%s captured by one for all", name)
		}
	})
}

// replay captures fn in a graph and launches it on the first stream.
func replay(cfg *graph.Config, streams []*stream.Stream, fn func() error) error {
	x, err := graph.Capture(streams, fn, cfg)
	if err != nil {
		return err
	}
	return errors.Join(x.Launch(streams[0]), x.Close())
}

// A graph that captures the operations of some of a group's ranks only, or two that capture
// those of one, refuse the group, and all go on.
func TestGroupThatIsCapturedInPart(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs[:2])
		xs, in := buffers(t, ranks, 8)
		all := func() error { return reduceAll(ranks, xs, nccl.Sum) }
		for i := range ranks {
			err := replay(nil, []*stream.Stream{ranks[i].s}, all)
			require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
			require.ErrorContains(t, err, "ncclAllReduce on rank 1 of 2: a graph captures a part of the group")
		}
		side := streamtest.NewStream(t, devs[0])
		err := replay(nil, []*stream.Stream{ranks[0].s}, func() error {
			return replay(&graph.Config{Mode: graph.Relaxed}, []*stream.Stream{side}, func() error {
				return nccl.Group(func(b *nccl.Batch) error {
					return errors.Join(nccl.Send(b.On(ranks[0].c), ranks[0].s, xs[0].Slice(0, 4), 1),
						nccl.Recv(b.On(ranks[0].c), side, xs[0].Slice(4, 8), 1))
				})
			})
		})
		require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
		require.ErrorContains(t, err, "ncclRecv on rank 0 of 2: two graphs capture operations of the rank")
		require.NoError(t, all())
		require.Equal(t, [][]int64{sum(in), sum(in)}, contents(t, ranks, xs))
	})
}

// A launch of a graph that waits for a launch of another rank fails the communicator after its timeout, and names the graph.
func TestTimeoutOfALaunch(t *testing.T) {
	streamtest.EachInVirtualTime(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks, graphs := captureEach(t, devs)
		for range 100 {
			for i, r := range ranks {
				require.NoError(t, graphs[i].Launch(r.s))
			}
		}
		for _, r := range ranks {
			require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
		}
		time.Sleep(2 * limit(devs)) // the watchdog sees the ends, and rests
		require.NoError(t, ranks[0].c.Err())

		standing := func() []any {
			g := nccl.GroupOf(ranks[0].c)
			return []any{g.Launched, g.WaitNanos > 0, g.Issued == g.Completed}
		}
		require.Equal(t, []any{uint64(100), false, true}, standing())
		require.NoError(t, graphs[0].Launch(ranks[0].s))
		time.Sleep(limit(devs) / 2)
		require.Equal(t, []any{uint64(101), true, true}, standing())
		require.LessOrEqual(t, time.Duration(nccl.GroupOf(ranks[0].c).WaitNanos), limit(devs))
		var live, ended strings.Builder
		require.NoError(t, nccl.DumpTrace(&live))
		require.Contains(t, live.String(), `"launched":101,"launches":true`, "of a live communicator")
		err := ranks[0].c.Wait(testgpu.Context(t), ranks[0].s)
		require.NoError(t, nccl.DumpTrace(&ended))
		require.Contains(t, ended.String(), `"launched":101,"launches":true`, "of one that has failed")
		var late *nccl.TimeoutError
		require.ErrorAs(t, err, &late)
		require.Equal(t, graphs[0].String(), late.Graph)
		require.Equal(t, ranks[0].s.String(), late.Stream)
		require.Equal(t, limit(devs), late.Limit)
		require.Greater(t, late.Age, late.Limit)
		require.Less(t, late.Age, 2*late.Limit)
		require.Zero(t, late.Operation.Record)
		require.Equal(t, []int{1}, late.Behind)
		require.ErrorContains(t, err, fmt.Sprintf("rank 1 (%s) has launched 100 collectives in graphs, and this rank 101; check that", devs[1]))
		require.ErrorIs(t, err, nccl.ErrorTimeout)
		require.ErrorContains(t, err, fmt.Sprintf("%s, launched on %s, with operations of rank 0 of 2 (%s), has not ended after", graphs[0], ranks[0].s, devs[0]))
		require.Equal(t, err, ranks[1].c.Err(), "the other rank of the process fails with it")
	})
}

// Without a timeout no launch is watched.
func TestLaunchWithoutTimeout(t *testing.T) {
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
		ranks, graphs := captureEach(t, devs)
		setTimeout(t, ranks, -1)
		require.NoError(t, graphs[0].Launch(ranks[0].s))
		time.Sleep(30 * time.Second) // less than virtual devices take for a deadlock
		require.NoError(t, ranks[0].c.Err())
		require.NoError(t, graphs[1].Launch(ranks[1].s))
		require.NoError(t, ranks[0].c.Wait(testgpu.Context(t), ranks[0].s))
	})
}

// A launch that waits may keep the driver from answering, and fails the communicator, too.
func TestTimeoutOfALaunchWithoutAnswers(t *testing.T) {
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
		ranks, graphs := captureEach(t, devs)
		time.Sleep(2 * limit(devs)) // the watchdog rests
		require.NoError(t, graphs[0].Launch(ranks[0].s))
		gpu.SystemOf(devs[0].System()).Machine.HangNext("cuEventQuery")
		time.Sleep(3 * limit(devs))
		require.ErrorContains(t, ranks[0].c.Err(), fmt.Sprintf("%s, launched on", graphs[0]))
	})
}

// Launches that take longer together than the timeout do not fail, if the watchdog observes that they end.
func TestLaunchesThatProgress(t *testing.T) {
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
		ranks, graphs := captureEach(t, devs)
		for _, burst := range []int{1, 64} { // a launch with a mark each, and many with one
			const bursts = 6
			next := make(chan bool)
			for range bursts {
				require.NoError(t, ranks[1].s.Callback(func() { <-next }))
				for range burst {
					require.NoError(t, graphs[0].Launch(ranks[0].s))
					require.NoError(t, graphs[1].Launch(ranks[1].s))
				}
				if burst == 1 {
					time.Sleep(5 * time.Millisecond)
				}
			}
			for range bursts {
				time.Sleep(limit(devs) / 2)
				next <- true
			}
			for _, r := range ranks {
				require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
			}
		}
	})
}

// captureEach connects the ranks of devices, and captures an all-reduce of each rank in a graph of its own.
func captureEach(t *testing.T, devs []*device.Device) ([]rank, []*graph.Exec) {
	t.Helper()
	ranks, xs := afterOnce(t, devs, 8, limit(devs))
	graphs := make([]*graph.Exec, len(ranks))
	for i, r := range ranks {
		var err error
		graphs[i], err = graph.Capture([]*stream.Stream{r.s}, func() error { return nccl.AllReduce(r.c, r.s, xs[i], xs[i], nccl.Max) },
			&graph.Config{Name: fmt.Sprintf("step %d", i)})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, graphs[i].Close()) })
	}
	return ranks, graphs
}

// A launch counts each collective that its graph has captured, also those of a group on one stream, and no transfers. A launch
// that CUDA has refused has enqueued none. A graph that Update has given the operations of another one counts these.
func TestCountOfLaunchedCollectives(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "cuGraphLaunch#3=CUDA_ERROR_OUT_OF_MEMORY"})
	ranks := connect(t, devs)
	xs, _ := buffers(t, ranks, 8)
	require.NoError(t, ranks[0].s.WaitStream(ranks[1].s))
	capture := func(at int) *graph.Exec { // of a transfer each way and of two collectives, for both ranks
		x, err := graph.Capture([]*stream.Stream{ranks[0].s, ranks[1].s}, func() error {
			err := grouped(ranks, func(i int, r rank) error {
				return errors.Join(nccl.Send(r.on(), r.s, xs[i].Slice(at, at+1), 1-i), nccl.Recv(r.on(), r.s, xs[i].Slice(at+1, at+2), 1-i))
			})
			return errors.Join(err, grouped(ranks, func(i int, r rank) error {
				return errors.Join(nccl.AllReduce(r.on(), r.s, xs[i].Slice(at, at+1), xs[i].Slice(at, at+1), nccl.Max),
					nccl.AllReduce(r.on(), r.s, xs[i].Slice(at+1, at+2), xs[i].Slice(at+1, at+2), nccl.Max))
			}))
		}, nil)
		require.NoError(t, err)
		return x
	}
	launched := func() (list []uint64) {
		for _, r := range ranks {
			list = append(list, nccl.GroupOf(r.c).Launched)
		}
		return list
	}
	x := capture(0)
	for range 2 {
		require.NoError(t, x.Launch(ranks[0].s))
	}
	require.Equal(t, []uint64{4, 4}, launched())
	require.ErrorIs(t, x.Launch(ranks[0].s), device.ErrorOutOfMemory)
	require.Equal(t, []uint64{4, 4}, launched())
	for at := range 3 {
		y := capture(at)
		require.NoError(t, x.Update(y))
		require.NoError(t, y.Close())
		require.NoError(t, x.Launch(ranks[0].s))
	}
	require.Equal(t, []uint64{10, 10}, launched())
	for _, r := range ranks {
		require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
	}
	require.NoError(t, x.Close())
}
