package nccl_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// The tests of PyTorch's test/distributed/test_nccl.py, in float32 and bfloat16, whose
// small whole numbers both types add without rounding.

func TestTorch_test_unique_id(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		id, err := nccl.NewUniqueID(devs[0])
		require.NoError(t, err)
		require.Len(t, id[:], 128)
		require.NotEqual(t, nccl.UniqueID{}, id)
		other, err := nccl.NewUniqueID(devs[0])
		require.NoError(t, err)
		require.NotEqual(t, id, other)
	})
}

// torch runs fn with both types.
func torch(t *testing.T, fn func(t *testing.T, b *torchBench[float32]), bf func(t *testing.T, b *torchBench[memory.BFloat16Bits])) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		fn(t, &torchBench[float32]{t, ranks, func(v int) float32 { return float32(v) }})
		bf(t, &torchBench[memory.BFloat16Bits]{t, ranks, func(v int) memory.BFloat16Bits { return memory.BFloat16Of(float32(v)) }})
	})
}

type torchBench[T memory.Element] struct {
	t     *testing.T
	ranks []rank
	of    func(int) T
}

// tensors makes n small numbers on each rank.
func (b *torchBench[T]) tensors(n int) (xs []memory.Slice[T], in [][]int) {
	for _, r := range b.ranks {
		h, v := make([]T, n), make([]int, n)
		for i := range h {
			v[i] = rand.IntN(60)
			h[i] = b.of(v[i])
		}
		x, err := memory.MakeFrom(r.s, h)
		require.NoError(b.t, err)
		b.t.Cleanup(func() { require.NoError(b.t, x.Close()) })
		xs, in = append(xs, x), append(in, v)
	}
	return xs, in
}

// run issues an operation on all ranks and compares what is in out.
func (b *torchBench[T]) run(out []memory.Slice[T], want func(rank, i int) int, issue func(i int, r rank) error) {
	b.t.Helper()
	require.NoError(b.t, nccl.Group(func(batch *nccl.Batch) error {
		for i, r := range b.ranks {
			if err := issue(i, r.in(batch)); err != nil {
				return err
			}
		}
		return nil
	}))
	for i, r := range b.ranks {
		got := make([]T, out[i].Len())
		require.NoError(b.t, out[i].CopyTo(r.s, got))
		for k, v := range got {
			require.Equal(b.t, b.of(want(i, k)), v, "rank %d, element %d", i, k)
		}
	}
}

func added(in [][]int, i int) (sum int) {
	for _, h := range in {
		sum += h[i]
	}
	return sum
}

func TestTorch_test_broadcast(t *testing.T) { torch(t, torchBroadcast, torchBroadcast) }

func torchBroadcast[T memory.Element](t *testing.T, b *torchBench[T]) {
	xs, in := b.tensors(128)
	b.run(xs, func(_, i int) int { return in[0][i] }, func(i int, r rank) error {
		return nccl.Broadcast(r.on(), r.s, xs[i], xs[i], 0)
	})
}

func TestTorch_test_reduce(t *testing.T) { torch(t, torchReduce, torchReduce) }

func torchReduce[T memory.Element](t *testing.T, b *torchBench[T]) {
	xs, in := b.tensors(128)
	b.run(xs, func(rank, i int) int {
		if rank > 0 {
			return in[rank][i]
		}
		return added(in, i)
	}, func(i int, r rank) error { return nccl.Reduce(r.on(), r.s, xs[i], xs[i], nccl.Sum, 0) })
}

func TestTorch_test_all_reduce(t *testing.T) { torch(t, torchAllReduce, torchAllReduce) }

func torchAllReduce[T memory.Element](t *testing.T, b *torchBench[T]) {
	xs, in := b.tensors(128)
	b.run(xs, func(_, i int) int { return added(in, i) }, func(i int, r rank) error {
		return nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Sum)
	})
}

func TestTorch_test_all_gather(t *testing.T) { torch(t, torchAllGather, torchAllGather) }

func torchAllGather[T memory.Element](t *testing.T, b *torchBench[T]) {
	xs, in := b.tensors(128)
	out, _ := b.tensors(128 * len(b.ranks))
	b.run(out, func(_, i int) int { return in[i/128][i%128] }, func(i int, r rank) error {
		return nccl.AllGather(r.on(), r.s, out[i], xs[i])
	})
}

func TestTorch_test_reduce_scatter(t *testing.T) { torch(t, torchReduceScatter, torchReduceScatter) }

func torchReduceScatter[T memory.Element](t *testing.T, b *torchBench[T]) {
	xs, in := b.tensors(32 * len(b.ranks))
	out, _ := b.tensors(32)
	b.run(out, func(rank, i int) int { return added(in, 32*rank+i) }, func(i int, r rank) error {
		return nccl.ReduceScatter(r.on(), r.s, out[i], xs[i], nccl.Sum)
	})
}
