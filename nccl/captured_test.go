package nccl_test

import (
	"errors"
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
