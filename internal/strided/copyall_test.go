package strided_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// Many copies are made, whether one of many or by themselves.
func TestCopyAll(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		seed := rand.Uint64()
		t.Log("seed", seed)
		r := rand.New(rand.NewPCG(seed, 6))
		for range 20 {
			var dst, src []tensor.Tensor
			var to, from []*field
			for range r.IntN(35) {
				d := []memory.DType{memory.Int8, memory.Float32, memory.Float32, memory.Float32, memory.Float64}[r.IntN(5)]
				of := d
				if r.IntN(8) == 0 {
					of = memory.Int32
				}
				shape := []int{r.IntN(5), 1 + r.IntN(9)}
				place := s
				if r.IntN(8) == 0 {
					place = nil
				}
				a, b := fieldOf(t, r, s, d, shape), fieldOf(t, r, place, of, shape)
				to, from = append(to, a), append(from, b)
				dst, src = append(dst, a.view), append(src, b.view)
			}
			require.NoError(t, tensor.CopyAll(s, dst, src))
			for i := range to {
				require.Equal(t, want(to[i], from[i]), to[i].get(t, s), "%v to %v", src[i], dst[i])
			}
		}
		// Of one memory and to one, at places that are aligned for a single element.
		m, err := memory.MakeFrom(s, []float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11})
		require.NoError(t, err)
		defer m.Close()
		flat, err := tensor.Of(m, 12)
		require.NoError(t, err)
		back := allocate(t, s, memory.Float32, []int{12})
		var parts, own, again []tensor.Tensor
		for _, at := range []int{1, 6} {
			p, err := flat.Narrow(0, at, 4)
			require.NoError(t, err)
			q, err := back.Narrow(0, at, 4)
			require.NoError(t, err)
			parts, own, again = append(parts, p), append(own, allocate(t, s, memory.Float32, []int{4})), append(again, q)
		}
		require.NoError(t, tensor.CopyAll(s, own, parts))
		require.NoError(t, tensor.CopyAll(s, again, own))
		out := make([]float32, 12)
		to, err := tensor.OfHost(out, 12)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, to, back))
		require.Equal(t, []float32{1, 2, 3, 4}, out[1:5])
		require.Equal(t, []float32{6, 7, 8, 9}, out[6:10])
		x, y := allocate(t, s, memory.Int8, []int{2}), allocate(t, s, memory.Int8, []int{3})
		require.ErrorContains(t, tensor.CopyAll(s, []tensor.Tensor{x, y}, []tensor.Tensor{x}), "1 tensors to 2")
		require.ErrorContains(t, tensor.CopyAll(s, []tensor.Tensor{x, y}, []tensor.Tensor{x, x}), "(tensor 1 of 2)")

		// One element for many is not a copy of pieces.
		one, err := flat.Narrow(0, 5, 1)
		require.NoError(t, err)
		wide := allocate(t, s, memory.Float32, []int{8})
		require.NoError(t, tensor.CopyAll(s, []tensor.Tensor{wide, again[0]}, []tensor.Tensor{one, own[0]}))
		eight, err := to.Narrow(0, 0, 8)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, eight, wide))
		require.Equal(t, []float32{5, 5, 5, 5, 5, 5, 5, 5}, out[:8])
	})
}
