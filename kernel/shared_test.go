package kernel_test

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// watch waits until the second of two words is not 0, and says whether two pointers are
// the same.
var watch = kernel.Source{
	Name: "watch.cu",
	CUDA: `extern "C" __global__ void watch(const unsigned* words, unsigned* out, const unsigned* other) {
	while (((const volatile unsigned*)words)[1] == 0) {}
	*out = ((const volatile unsigned*)words)[1] + (out == other);
}`,
	Kernels: []kernel.Def{{
		Name:   "watch",
		Params: []kernel.Param{kernel.Pointer, kernel.Pointer, kernel.Pointer},
		Go: func(c *kernel.Call) {
			word := &inside.Shared[uint32](c, 0, 4, 1)[0]
			if !inside.Await(c, func() bool { return atomic.LoadUint32(word) != 0 }) {
				return
			}
			out := atomic.LoadUint32(word)
			if c.Address(1) == c.Address(2) {
				out++
			}
			kernel.Update[uint32](c, 1, 1)[0] = out
		},
	}},
}

// A kernel waits for what the host writes into pinned memory.
func TestPinnedWord(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, k := compiled(t, devs[0], &watch)
		words, err := memory.MakePinned[uint32](devs[0], 2)
		require.NoError(t, err)
		x := zeros(t, s, 2)
		for i, want := range []uint32{5, 6} {
			clear(words.Data())
			require.NoError(t, k.Launch(s, kernel.Cover(1), kernel.PinnedPtr(words), kernel.Ptr(x), kernel.Ptr(x.Slice(1-i, 2))))
			done, err := s.Query()
			require.NoError(t, err)
			require.False(t, done)
			atomic.StoreUint32(&words.Data()[1], 5)
			got := make([]uint32, 2)
			require.NoError(t, x.CopyTo(s, got))
			require.Equal(t, []uint32{want, 0}, got)
		}
		require.NoError(t, words.Close())
		require.ErrorContains(t, k.Launch(s, kernel.Cover(1), kernel.PinnedPtr(words), kernel.Ptr(x), kernel.Ptr(x)), "argument 0: pinned memory without elements, or closed")
	})
}
