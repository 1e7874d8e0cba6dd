package comm_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A collective between two points of other streams sees what they wrote before, and they see
// its result; virtual devices report every access that is not ordered.
func TestBetween(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		var ss []*stream.Stream
		var xs []memory.Slice[float32]
		for i, d := range devs {
			s, err := stream.New(d, nil)
			require.NoError(t, err)
			defer s.Close()
			x, err := memory.MakeFrom(s, []float32{float32(i + 1)})
			require.NoError(t, err)
			defer x.Close()
			ss, xs = append(ss, s), append(xs, x)
		}
		sum := func() error { return comm.AllReduce(g, comm.Sum, xs...) }
		require.NoError(t, g.Between(ss, sum))
		require.NoError(t, g.Between([]*stream.Stream{g.Stream(0), ss[1]}, func() error { return nil }))
		for i, s := range ss {
			out := make([]float32, 1)
			require.NoError(t, xs[i].CopyTo(s, out))
			require.Equal(t, float32(3), out[0])
		}
		failed := errors.New("failed")
		require.ErrorIs(t, g.Between(ss, func() error { return failed }), failed)
		require.ErrorContains(t, g.Between(ss[:1], sum), "1 streams")
		require.ErrorContains(t, g.Between(ss, nil), "a function is given: false")
		require.ErrorContains(t, g.Between([]*stream.Stream{ss[1], ss[0]}, sum), "stream 0 is nil or on another device")
		require.NoError(t, g.Shutdown(testgpu.Context(t)))
		require.ErrorIs(t, g.Between(ss, sum), device.ErrClosed)
	})
}
