package tensor_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/tensor"
)

// counting returns a host tensor whose elements are 0, 1, 2, ...
func counting(t testing.TB, shape ...int) tensor.Tensor {
	t.Helper()
	n := 1
	for _, d := range shape {
		n *= d
	}
	h := make([]int32, n)
	for i := range h {
		h[i] = int32(i)
	}
	x, err := tensor.OfHost(h, shape...)
	require.NoError(t, err)
	return x
}

// values returns the elements of a host tensor in row-major order.
func values(t testing.TB, x tensor.Tensor) []int32 {
	t.Helper()
	c, err := tensor.MakeHost(x.DType(), x.Shape()...)
	require.NoError(t, err)
	require.NoError(t, tensor.Copy(nil, c, x))
	v, err := tensor.Data[int32](c)
	require.NoError(t, err)
	return slices.Clone(v)
}

func ok(t testing.TB) func(x tensor.Tensor, err error) tensor.Tensor {
	return func(x tensor.Tensor, err error) tensor.Tensor {
		t.Helper()
		require.NoError(t, err)
		return x
	}
}

func TestViews(t *testing.T) {
	x := counting(t, 2, 3, 4)
	must := ok(t)
	for _, c := range []struct {
		name  string
		x     tensor.Tensor
		shape []int
		first []int32
	}{
		{"T", x.T(), []int{2, 4, 3}, []int32{0, 4, 8, 1}},
		{"transpose", must(x.Transpose(0, -1)), []int{4, 3, 2}, []int32{0, 12, 4, 16}},
		{"permute", must(x.Permute(1, -1, 0)), []int{3, 4, 2}, []int32{0, 12, 1, 13}},
		{"narrow", must(x.Narrow(-2, 1, 2)), []int{2, 2, 4}, []int32{4, 5, 6, 7}},
		{"narrow from the end", must(x.Narrow(2, -1, 1)), []int{2, 3, 1}, []int32{3, 7, 11, 15}},
		{"step", must(x.Step(2, 1, 4, 2)), []int{2, 3, 2}, []int32{1, 3, 5, 7}},
		{"step cut off", must(x.Step(1, -2, 99, 1)), []int{2, 2, 4}, []int32{4, 5, 6, 7}},
		{"step of none", must(x.Step(1, 3, 1, 2)), []int{2, 0, 4}, nil},
		{"select", must(x.Select(1, -1)), []int{2, 4}, []int32{8, 9, 10, 11}},
		{"unsqueeze", must(x.Unsqueeze(-1)), []int{2, 3, 4, 1}, []int32{0, 1, 2, 3}},
		{"expand", must(must(x.Narrow(1, 1, 1)).Expand(2, 2, 3, 4)), []int{2, 2, 3, 4}, []int32{4, 5, 6, 7, 4, 5, 6, 7}},
		{"expand and keep", must(must(x.Narrow(1, 1, 1)).Expand(2, -1, 3, -1)), []int{2, 2, 3, 4}, []int32{4, 5, 6, 7, 4, 5, 6, 7}},
		{"view", must(x.View(6, -1)), []int{6, 4}, []int32{0, 1, 2, 3}},
		{"view of a view", must(must(x.Narrow(0, 1, 1)).View(3, 2, 2)), []int{3, 2, 2}, []int32{12, 13, 14, 15}},
		{"scalar", must(must(x.Narrow(0, 0, 2)).View(24)), []int{24}, []int32{0, 1}},
	} {
		require.Equal(t, c.shape, c.x.Shape(), c.name)
		got := values(t, c.x)
		require.Equal(t, c.first, got[:min(len(got), len(c.first))], c.name)
	}
	zero := counting(t)
	require.Equal(t, 1, zero.Len())
	require.Equal(t, []int{1, 1}, must(zero.View(1, 1)).Shape())
	for _, c := range []struct {
		text string
		f    func() (tensor.Tensor, error)
	}{
		{"dimension out of range (expected to be in range of [-3, 2], but got 3)", func() (tensor.Tensor, error) { return x.Narrow(3, 0, 1) }},
		{"dimension out of range", func() (tensor.Tensor, error) { return x.Transpose(0, -4) }},
		{"has no dimensions", func() (tensor.Tensor, error) { return zero.Narrow(0, 0, 1) }},
		{"out of range", func() (tensor.Tensor, error) { return x.Narrow(0, 1, 2) }},
		{"out of range", func() (tensor.Tensor, error) { return x.Select(0, 2) }},
		{"each dimension once", func() (tensor.Tensor, error) { return x.Permute(0, 1, 1) }},
		{"each dimension once", func() (tensor.Tensor, error) { return x.Permute(0, 1) }},
		{"want 1 or more", func() (tensor.Tensor, error) { return x.Step(0, 0, 1, 0) }},
		{"only a dimension of 1 repeats", func() (tensor.Tensor, error) { return x.Expand(2, 3, 8) }},
		{"too few dimensions", func() (tensor.Tensor, error) { return x.Expand(4) }},
		{"want -1 only for a dimension that stays", func() (tensor.Tensor, error) { return x.Expand(-1, 2, 3, 4) }},
		{"want -1 only for a dimension that stays", func() (tensor.Tensor, error) { return x.Expand(2, -2, 4) }},
		{"it has 24 elements", func() (tensor.Tensor, error) { return x.View(5, -1) }},
		{"it has 24 elements", func() (tensor.Tensor, error) { return x.View(23) }},
		{"its elements lie apart", func() (tensor.Tensor, error) { return x.T().View(24) }},
		{"negative", func() (tensor.Tensor, error) { return x.View(-1, -1) }},
		{"negative", func() (tensor.Tensor, error) { return tensor.MakeHost(x.DType(), 2, -1) }},
		{"larger than any memory", func() (tensor.Tensor, error) { return tensor.MakeHost(x.DType(), 1<<40, 1<<40) }},
		{"is not an element type", func() (tensor.Tensor, error) { return tensor.MakeHost(0, 1) }},
	} {
		_, err := c.f()
		require.ErrorContains(t, err, c.text)
	}
}

// A view of another shape has the elements in their order, or there is none because
// no strides give it.
func TestViewKeepsTheOrder(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 2))
	refused := 0
	for range 3000 {
		shape := make([]int, r.IntN(5))
		for i := range shape {
			shape[i] = []int{1, 2, 3, 4, 6}[r.IntN(5)]
		}
		x := counting(t, shape...)
		x, err := x.Permute(r.Perm(len(shape))...)
		require.NoError(t, err)
		if len(shape) > 0 && r.IntN(2) == 0 {
			d := r.IntN(len(shape))
			x, err = x.Step(d, r.IntN(x.Size(d)), x.Size(d), 1+r.IntN(2))
			require.NoError(t, err)
		}
		var as []int
		for left := x.Len(); left > 1 || r.IntN(3) == 0; {
			f := left
			if p := 2 + r.IntN(2); left%p == 0 {
				f = p
			}
			left /= f
			as = append(as, f)
		}
		r.Shuffle(len(as), func(i, j int) { as[i], as[j] = as[j], as[i] })
		v, err := x.View(as...)
		if err != nil {
			require.False(t, x.Contiguous())
			require.ErrorContains(t, err, "its elements lie apart")
			refused++
			continue
		}
		require.Equal(t, values(t, x), values(t, v), "%v %v as %v", x.Shape(), x.Strides(), as)
	}
	require.NotZero(t, refused)
}

func TestChunksAndSplits(t *testing.T) {
	lengths := func(xs []tensor.Tensor, err error) []int {
		require.NoError(t, err)
		var n []int
		for _, x := range xs {
			n = append(n, x.Size(-1))
		}
		return n
	}
	x, empty := counting(t, 2, 5), counting(t, 2, 0)
	require.Equal(t, []int{2, 2, 1}, lengths(x.Chunk(4, -1)))
	require.Equal(t, []int{3, 2}, lengths(x.Chunk(2, 1)))
	require.Equal(t, []int{0, 0, 0}, lengths(empty.Chunk(3, 1)))
	require.Equal(t, []int{4, 1}, lengths(x.Split(4, 1)))
	require.Equal(t, []int{0}, lengths(empty.Split(0, 1)))
	require.Equal(t, []int{0, 4, 1}, lengths(x.SplitSizes([]int{0, 4, 1}, 1)))
	parts, err := x.SplitSizes([]int{1, 4}, 1)
	require.NoError(t, err)
	require.Equal(t, []int32{1, 2, 3, 4, 6, 7, 8, 9}, values(t, parts[1]))
	_, err = x.SplitSizes([]int{1, 5}, 1)
	require.ErrorContains(t, err, "want sizes that sum exactly to 5")
	_, err = x.SplitSizes([]int{6, -1}, 1)
	require.ErrorContains(t, err, "no negative sizes")
	_, err = x.SplitSizes([]int{math.MaxInt, math.MaxInt, 7}, 1)
	require.ErrorContains(t, err, "sum exactly to 5", "which they do when they overflow")
	_, err = x.Split(0, 1)
	require.ErrorContains(t, err, "want 1 or more")
	_, err = x.Chunk(0, 1)
	require.ErrorContains(t, err, "want 1 or more")
}

func TestUnflatten(t *testing.T) {
	flat := counting(t, 20)
	parts, err := flat.Unflatten([]tensor.Tensor{counting(t, 2, 3), counting(t, 0, 4), counting(t), counting(t, 4, 3).T()})
	require.NoError(t, err)
	require.Equal(t, []int32{0, 1, 2, 3, 4, 5}, values(t, parts[0]))
	require.Equal(t, []int{0, 4}, parts[1].Shape())
	require.Equal(t, []int32{6}, values(t, parts[2]))
	require.Equal(t, []int32{7, 8, 9, 10}, values(t, parts[3])[:4])
	require.True(t, parts[3].Contiguous(), "whatever the strides of the other")
	_, err = flat.Unflatten([]tensor.Tensor{counting(t, 20), counting(t)})
	require.ErrorContains(t, err, "the first 2 have 21 elements")
	_, err = counting(t, 4, 5).Unflatten(nil)
	require.ErrorContains(t, err, "want one dimension without gaps")
}

// What torch says of these shapes and strides: contiguous, channels last, and the
// strides of empty_like.
func TestLayouts(t *testing.T) {
	x := counting(t, 2, 3, 4, 5)
	must := ok(t)
	last := must(must(counting(t, 2, 4, 5, 3).Permute(0, 3, 1, 2)).Narrow(0, 0, 2))
	for _, c := range []struct {
		name             string
		x                tensor.Tensor
		contiguous, last bool
		like             []int
	}{
		{"contiguous", x, true, false, []int{60, 20, 5, 1}},
		{"channels last", last, false, true, []int{60, 1, 15, 3}},
		{"transposed", x.T(), false, false, []int{60, 20, 1, 5}},
		{"narrow", must(x.Narrow(1, 0, 2)), false, false, []int{40, 20, 5, 1}},
		{"narrow of channels last", must(last.Narrow(1, 1, 2)), false, true, []int{40, 1, 10, 2}},
		{"first of each", must(x.Select(3, 0)), false, false, []int{12, 4, 1}},
		{"expanded", must(must(x.Narrow(0, 0, 1)).Expand(7, 3, 4, 5)), false, false, []int{60, 20, 5, 1}},
		{"a channel", must(must(x.Narrow(1, 0, 1)).Narrow(0, 0, 1)), true, false, []int{60, 20, 5, 1}},
		{"no elements", must(x.Narrow(2, 0, 0)), true, false, []int{60, 20, 5, 1}},
		{"equal strides", must(must(counting(t, 6).Step(0, 0, 6, 2)).View(3, 1)).T(), false, false, []int{1, 1}},
		{"a scalar", counting(t), true, false, []int{}},
	} {
		require.Equal(t, c.contiguous, c.x.Contiguous(), c.name)
		require.Equal(t, c.last, c.x.ChannelsLast(), c.name)
		require.Equal(t, c.like, append([]int{}, strided.LikeStrides(c.x.Shape(), c.x.Strides())...), c.name)
	}
	require.Equal(t, "int32 [2 3 4 5] on the host", x.String())
	require.Equal(t, " [] on nowhere", fmt.Sprint(tensor.Tensor{})[len("invalid"):])
}
