package memory

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

// The way between devices that do not reach each other works between any two.
func TestCopyPeer(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		var s [2]*stream.Stream
		for i, d := range devs {
			var err error
			s[i], err = stream.New(d, nil)
			require.NoError(t, err)
			defer s[i].Close()
		}
		in, out := make([]int32, 70_001), make([]int32, 70_001)
		for i := range in {
			in[i] = int32(i * 7)
		}
		x, err := MakeFrom(s[0], in)
		require.NoError(t, err)
		defer x.Close()
		y, err := Make[int32](s[1], len(in))
		require.NoError(t, err)
		defer y.Close()
		require.NoError(t, s[1].WaitStream(s[0]))
		require.NoError(t, x.RecordStream(s[1]))
		require.NoError(t, copyPeer(s[1], y, x))
		require.NoError(t, y.CopyTo(s[1], out))
		require.Equal(t, in, out)
	})
}
