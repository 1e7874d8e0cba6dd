package tensor_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// used returns the elements of the storage that a view has, and whether it has one twice.
func (l *lab) used(view func(tensor.Tensor) tensor.Tensor, shape []int) (used map[int32]bool, twice bool) {
	n := 1
	for _, d := range shape {
		n *= d
	}
	index := make([]int32, n)
	for i := range index {
		index[i] = int32(i)
	}
	host, err := tensor.OfHost(index, shape...)
	require.NoError(l.t, err)
	v := view(host)
	out := make([]int32, v.Len())
	to, err := tensor.OfHost(out, v.Shape()...)
	require.NoError(l.t, err)
	require.NoError(l.t, tensor.Copy(l.s, to, v))
	used = map[int32]bool{}
	for _, i := range out {
		twice = twice || used[i]
		used[i] = true
	}
	return used, twice
}

// randomView draws slices, steps, permutations and repetitions.
func (l *lab) randomView() func(tensor.Tensor) tensor.Tensor {
	seed := l.r.Uint64()
	return func(x tensor.Tensor) tensor.Tensor {
		r := rand.New(rand.NewPCG(seed, 1))
		for i, d := range x.Shape() {
			n := 1 + r.IntN(d)
			x = narrow(l, x, i, r.IntN(d-n+1), n)
			if n > 1 && r.IntN(5) == 0 {
				v, err := x.Step(i, 0, n, 2)
				x = one(l, v, err)
			}
		}
		if p := r.Perm(3); r.IntN(2) == 0 {
			v, err := x.Permute(p...)
			x = one(l, v, err)
		}
		if r.IntN(4) == 0 {
			x = narrow(l, x, 0, 0, 1)
			x = expanded(l, x, 3, x.Size(1), x.Size(2))
		}
		return x
	}
}

// Views that share memory are always found, and slices of rows and columns of one matrix are
// told apart. Views that share nothing are never said to share memory for certain.
func TestShares(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	defer s.Close()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	l := newLab(t, s, seed)
	defer l.close()
	wrong := 0
	const rounds = 3000
	for range rounds {
		shape := []int{1 + l.r.IntN(3), 1 + l.r.IntN(6), 1 + l.r.IntN(8)}
		x := l.vector(f32, shape)
		v, w := l.randomView(), l.randomView()
		a, twice := l.used(v, shape)
		b, _ := l.used(w, shape)
		common := false
		for i := range a {
			common = common || b[i]
		}
		got := tensor.Shares(v(x), w(x))
		require.Equal(t, got, tensor.Shares(w(x), v(x)))
		require.False(t, tensor.MustShare(v(x), w(x)) && !common, "%v %v and %v %v of %v share nothing",
			v(x).Shape(), v(x).Strides(), w(x).Shape(), w(x).Strides(), shape)
		if got != common {
			require.True(t, got, "%v %v and %v %v of %v share memory", v(x).Shape(), v(x).Strides(), w(x).Shape(), w(x).Strides(), shape)
			wrong++
		}
		require.Equal(t, twice, tensor.SharesWithin(v(x)), "%v %v", v(x).Shape(), v(x).Strides())
		l.close()
	}
	t.Logf("%d of %d pairs were reported without need", wrong, rounds)
	require.Less(t, wrong, rounds/20)
	x := l.vector(f32, []int{4, 6, 10})
	left, right := narrow(l, x, 2, 0, 5), narrow(l, x, 2, 5, 5)
	require.False(t, tensor.Shares(left, right))
	require.False(t, tensor.Shares(left.T(), right))
	require.False(t, tensor.Shares(narrow(l, x, 1, 0, 3), narrow(l, x, 1, 3, 3)))
	require.True(t, tensor.Shares(left, narrow(l, x, 2, 4, 2)))
}
