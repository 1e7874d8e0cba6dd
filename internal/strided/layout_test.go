package strided_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// Pieces of one launch are copied together where they are large on the average: each in
// as many parts as the others, of which a launch has room for 120.
func TestTurns(t *testing.T) {
	const m = 1 << 20
	for _, c := range []struct {
		runs, order []int
	}{
		{[]int{16}, []int{0}},
		{[]int{16, 32, 48}, []int{0, 1, 2}},
		{[]int{m, 3*m - 16}, []int{0, 1}},
		{[]int{2 * m, 2 * m}, []int{0, 1, 0, 1}},
		{[]int{4 * m, 16, 2 * m, 3*m - 16}, []int{0, 2, 3, 0, 1, 2, 3}},
	} {
		require.Equal(t, c.order, strided.Turns(c.runs...), c.runs)
	}
	require.Len(t, strided.Turns(600*m, 600*m, 600*m, 600*m, 600*m, 600*m, 600*m), 119)
}

// All parts arrive, and nothing beside them changes.
func TestCopiesTakeTurns(t *testing.T) {
	eachPair(t, func(t *testing.T, s, o *stream.Stream) {
		r := random(t)
		for _, least := range []int{1, 16, 200} {
			strided.SetTurnBytes(t, least)
			for range 4 {
				var dst, src []tensor.Tensor
				var to, from []*field
				on := []*stream.Stream{s, o}
				d := []memory.DType{memory.Int8, memory.Float16, memory.Float64}[r.IntN(3)]
				for range 1 + r.IntN(9) {
					shape := [][]int{{r.IntN(1000)}, {1 + r.IntN(70), 8}, {2, 1 + r.IntN(30), 4}}[r.IntN(3)]
					a, b := fieldOf(t, r, s, d, shape), fieldOf(t, r, on[r.IntN(2)], d, shape)
					to, from = append(to, a), append(from, b)
					dst, src = append(dst, a.view), append(src, b.view)
				}
				require.NoError(t, s.WaitStream(o))
				require.NoError(t, strided.CopyByKernel(s, dst, src))
				require.NoError(t, o.WaitStream(s))
				for i := range to {
					require.Equal(t, want(to[i], from[i]), to[i].get(t, s), "%v to %v in parts of %d", src[i], dst[i], least)
				}
			}
		}
	})
}

// Fewer rows than parts are in some of them.
func TestFewRowsTakeTurns(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		strided.SetTurnBytes(t, 4096)
		s := newStream(t, devs[0])
		in := make([]uint8, 1<<20)
		for i := range in {
			in[i] = uint8(i * 7 >> 3)
		}
		x, err := memory.MakeFrom(s, in)
		require.NoError(t, err)
		defer x.Close()
		whole, err := tensor.Of(x, 2, 1<<19)
		require.NoError(t, err)
		sizes := []int{1 << 18, 1<<17 + 16, 1<<17 - 16}
		parts, err := whole.SplitSizes(sizes, 1)
		require.NoError(t, err)
		var to []tensor.Tensor
		for _, n := range sizes {
			to = append(to, allocate(t, s, memory.Uint8, []int{2, n}))
		}
		require.NoError(t, strided.CopyByKernel(s, to, parts))
		at := 0
		for i, n := range sizes {
			out := make([]uint8, 2*n)
			require.NoError(t, raw(t, to[i]).CopyTo(s, out))
			require.Equal(t, in[at:at+n], out[:n])
			require.Equal(t, in[1<<19+at:][:n], out[n:])
			at += n
		}
	})
}
