package nccl_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// Transfers of a group that do not fit each other are refused before NCCL sees any.
func TestTransfersThatDoNotFit(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 8)
		floats := room[float64](t, ranks[1].s, 8)
		c0, s0, c1, s1 := ranks[0].c, ranks[0].s, ranks[1].c, ranks[1].s
		type issued []error
		for name, issue := range map[string]func(on onto) issued{
			"length": func(on onto) issued {
				return issued{nccl.Send(on(c0), s0, xs[0].Slice(0, 4), 1), nccl.Recv(on(c1), s1, xs[1].Slice(0, 2), 0)}
			},
			"receive first": func(on onto) issued {
				return issued{nccl.Recv(on(c1), s1, xs[1].Slice(0, 4), 0), nccl.Send(on(c0), s0, xs[0].Slice(0, 2), 1)}
			},
			"type": func(on onto) issued {
				return issued{nccl.Send(on(c0), s0, xs[0], 1), nccl.Recv(on(c1), s1, floats, 0)}
			},
			"order": func(on onto) issued {
				return issued{
					nccl.Send(on(c0), s0, xs[0].Slice(0, 1), 1), nccl.Send(on(c0), s0, xs[0].Slice(1, 3), 1),
					nccl.Recv(on(c1), s1, xs[1].Slice(0, 2), 0), nccl.Recv(on(c1), s1, xs[1].Slice(2, 3), 0),
				}
			},
			"uneven": func(on onto) issued {
				return issued{
					nccl.AllToAllV(on(c0), s0, xs[0].Slice(0, 2), []int{1, 1}, xs[0].Slice(2, 5), []int{1, 2}),
					nccl.AllToAllV(on(c1), s1, xs[1].Slice(0, 2), []int{1, 1}, xs[1].Slice(2, 4), []int{1, 1}),
				}
			},
			"of one rank": func(on onto) issued {
				return issued{
					nccl.Send(on(c0), s0, xs[0].Slice(0, 2), 0), nccl.AllToAllV(on(c0), s0, xs[0].Slice(2, 3), []int{1, 0}, xs[0].Slice(3, 4), []int{1, 0}),
					nccl.Recv(on(c0), s0, xs[0].Slice(4, 6), 0),
				}
			},
			"to itself":   func(on onto) issued { return issued{nccl.Send(on(c0), s0, xs[0], 0)} },
			"from itself": func(on onto) issued { return issued{nccl.Recv(on(c1), s1, xs[1], 1)} },
		} {
			err := nccl.Group(func(b *nccl.Batch) error {
				for _, err := range issue(b.On) {
					require.NoError(t, err, name)
				}
				return nil
			})
			require.ErrorIs(t, err, nccl.ErrorInvalidUsage, name)
			_, seen := err.(*nccl.Error)
			require.False(t, seen, "%s: NCCL has seen it", name)
		}
		require.ErrorContains(t, nccl.Send(c0, s0, xs[0], 0), "its own peer", "without a group")
		require.Empty(t, c0.Trace(), "nothing was scheduled")

		// Those that fit, of two ways at once, and to itself.
		require.NoError(t, nccl.Group(func(b *nccl.Batch) error {
			return errors.Join(
				nccl.Recv(b.On(c1), s1, xs[1].Slice(0, 2), 0), nccl.Recv(b.On(c1), s1, xs[1].Slice(2, 3), 0),
				nccl.Send(b.On(c1), s1, xs[1].Slice(4, 8), 0), nccl.Recv(b.On(c0), s0, xs[0].Slice(4, 8), 1),
				nccl.Send(b.On(c0), s0, xs[0].Slice(0, 2), 1), nccl.Send(b.On(c0), s0, xs[0].Slice(2, 3), 1),
				nccl.Send(b.On(c1), s1, xs[1].Slice(7, 8), 1), nccl.Recv(b.On(c1), s1, xs[1].Slice(3, 4), 1))
		}))
		require.Equal(t, slices.Concat(in[0][:3], in[1][7:], in[1][4:]), read(t, s1, xs[1]))
		require.Equal(t, slices.Concat(in[0][:4], in[1][4:]), read(t, s0, xs[0]))
	})
}

// offsets are where the parts begin, and their end.
func offsets(counts []int) []int {
	at := []int{0}
	for _, n := range counts {
		at = append(at, at[len(at)-1]+n)
	}
	return at
}

// Random lengths, none among them, against what the host makes of the same.
func TestUneven(t *testing.T) {
	for _, n := range []int{1, 2, 3, 8} {
		testgpu.Each(t, n, func(t *testing.T, devs []*device.Device) {
			ranks := connect(t, devs)
			seed := rand.Uint64()
			t.Logf("seed %d", seed)
			g := rand.New(rand.NewPCG(seed, 0))
			for range 6 {
				uneven(t, ranks, g)
			}
		})
	}
}

func uneven(t *testing.T, ranks []rank, g *rand.Rand) {
	size := len(ranks)
	counts := make([]int, size)
	for i := range counts {
		counts[i] = max(0, g.IntN(50)-10)
	}
	at := offsets(counts)
	total := at[size]
	src, in := buffers(t, ranks, total)
	dst, old := buffers(t, ranks, total)

	for _, inPlace := range []bool{false, true} {
		if inPlace {
			for i, r := range ranks {
				require.NoError(t, dst[i].CopyFrom(r.s, in[i]))
			}
		}
		for i, got := range run(t, ranks, dst, func(i int, r rank) error {
			from := src[i].Slice(at[i], at[i+1])
			if inPlace {
				from = dst[i].Slice(at[i], at[i+1])
			}
			return nccl.AllGatherV(r.on(), r.s, dst[i], from, counts)
		}) {
			for j := range size {
				require.Equal(t, in[j][at[j]:at[j+1]], got[at[j]:at[j+1]], "all-gather, rank %d, part of rank %d, in place %v", i, j, inPlace)
			}
		}
	}
	for i, r := range ranks {
		require.NoError(t, dst[i].CopyFrom(r.s, old[i]))
	}
	to := make([]memory.Slice[int64], size)
	for i := range to {
		to[i] = dst[i].Slice(0, counts[i])
	}
	for i, got := range run(t, ranks, to, func(i int, r rank) error {
		return nccl.ReduceScatterV(r.on(), r.s, to[i], src[i], counts, nccl.Sum)
	}) {
		require.Equal(t, sum(in)[at[i]:at[i+1]], got, "reduce-scatter, rank %d", i)
	}
	for i := range to {
		to[i] = src[i].Slice(at[i], at[i+1])
	}
	for i, got := range run(t, ranks, to, func(i int, r rank) error {
		return nccl.ReduceScatterV(r.on(), r.s, to[i], src[i], counts, nccl.Max)
	}) {
		for k, v := range got {
			want := in[0][at[i]+k]
			for _, h := range in {
				want = max(want, h[at[i]+k])
			}
			require.Equal(t, want, v, "reduce-scatter in place, rank %d", i)
		}
	}
	unevenExchange(t, ranks, g)
}

func unevenExchange(t *testing.T, ranks []rank, g *rand.Rand) {
	size := len(ranks)
	sends, recvs := make([][]int, size), make([][]int, size)
	for i := range ranks {
		sends[i], recvs[i] = make([]int, size), make([]int, size)
	}
	for i := range ranks {
		for j := range ranks {
			sends[i][j] = max(0, g.IntN(40)-10)
			recvs[j][i] = sends[i][j]
		}
	}
	var src, dst []memory.Slice[int64]
	var in [][]int64
	for i := range ranks {
		x, h := buffers(t, ranks[i:i+1], offsets(sends[i])[size])
		y, _ := buffers(t, ranks[i:i+1], offsets(recvs[i])[size])
		for k := range h[0] {
			h[0][k] += int64(i) << 50
		}
		require.NoError(t, x[0].CopyFrom(ranks[i].s, h[0]))
		src, dst, in = append(src, x...), append(dst, y...), append(in, h...)
	}
	for i, got := range run(t, ranks, dst, func(i int, r rank) error {
		to, from := append([]int(nil), recvs[i]...), append([]int(nil), sends[i]...)
		err := nccl.AllToAllV(r.on(), r.s, dst[i], to, src[i], from)
		clear(to) // they are the caller's again
		clear(from)
		return err
	}) {
		at := offsets(recvs[i])
		for j := range ranks {
			from := offsets(sends[j])
			require.Equal(t, in[j][from[i]:from[i+1]], got[at[j]:at[j+1]], "rank %d from %d", i, j)
		}
	}
}

func TestUnevenArguments(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, _ := buffers(t, ranks, 8)
		ys, _ := buffers(t, ranks, 8)
		r, x, y := ranks[1], xs[1], ys[1]
		for name, c := range map[string]struct {
			err  error
			text string
		}{
			"too few counts":   {nccl.AllGatherV(r.on(), r.s, x, y, []int{8}), "1 numbers of elements: want one for each rank"},
			"negative":         {nccl.AllGatherV(r.on(), r.s, x, y, []int{9, -1}), "-1 elements at rank 1"},
			"destination":      {nccl.AllGatherV(r.on(), r.s, x, y.Slice(0, 3), []int{4, 3}), "AllGatherV on rank 1 of 2: the destination has 8 elements: want 7"},
			"source":           {nccl.AllGatherV(r.on(), r.s, x, y, []int{4, 4}), "the source has 8 elements: want 4"},
			"reduce-scatter":   {nccl.ReduceScatterV(r.on(), r.s, x, y, []int{4, 4}, nccl.Sum), "the destination has 8 elements: want 4"},
			"operation":        {nccl.ReduceScatterV(r.on(), r.s, x.Slice(0, 4), y, []int{4, 4}, nccl.Op(9)), "op 9 is not a reduction"},
			"own part":         {nccl.AllToAllV(r.on(), r.s, x, []int{4, 4}, y, []int{5, 3}), "sends itself 3 elements and receives 4"},
			"overlap":          {nccl.AllToAllV(r.on(), r.s, x, []int{4, 4}, x, []int{4, 4}), "overlap: want none in common"},
			"another's part":   {nccl.AllGatherV(r.on(), r.s, x, x.Slice(0, 5), []int{3, 5}), "want the source to be the rank's part"},
			"no communicator":  {nccl.AllToAllV(nil, r.s, x, nil, y, nil), "no communicator given"},
			"stream of others": {nccl.AllGatherV(r.on(), ranks[0].s, x, y, []int{0, 8}), "use a stream of that device"},
		} {
			require.ErrorContains(t, c.err, c.text, name)
		}
	})
}

// Lengths whose sum does not fit an int are no lengths, though what overflows would fit
// the buffers.
func TestUnevenOverflow(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, _ := buffers(t, ranks, 2)
		r, x := ranks[2], xs[2]
		counts := []int{math.MaxInt, math.MaxInt, 2}
		require.ErrorContains(t, nccl.AllGatherV(r.on(), r.s, x.Slice(0, 0), x, counts), "want 0 or more, and a sum without overflow")
		require.ErrorContains(t, nccl.ReduceScatterV(r.on(), r.s, x, x.Slice(0, 0), counts, nccl.Sum), "want 0 or more, and a sum without overflow")
	})
}
