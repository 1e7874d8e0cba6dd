package strided

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Rows go from one device to another, and what is between them stays.
func TestCopyPitched(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		if reach, err := inside.Reach(devs[0], devs[1]); err != nil || !reach {
			t.Skip("the devices do not reach each other", err)
		}
		var s [2]*stream.Stream
		for i, d := range devs {
			var err error
			s[i], err = stream.New(d, nil)
			require.NoError(t, err)
			defer s[i].Close()
		}
		const rows, width, from, to = 9, 33, 70, 40
		in, was := make([]uint8, (rows-1)*from+width), make([]uint8, (rows-1)*to+width)
		for i := range in {
			in[i] = uint8(i * 7)
		}
		for i := range was {
			was[i] = uint8(200 - i)
		}
		x, err := memory.MakeFrom(s[0], in)
		require.NoError(t, err)
		defer x.Close()
		y, err := memory.MakeFrom(s[1], was)
		require.NoError(t, err)
		defer y.Close()
		require.NoError(t, s[1].WaitStream(s[0]))
		require.NoError(t, x.RecordStream(s[1]))
		require.NoError(t, copyPitched(s[1], pitched{y, to}, pitched{x, from}, width, rows))
		// A graph repeats the copy.
		g, err := graph.Capture(s[1:], func() error { return copyPitched(s[1], pitched{y, to}, pitched{x, from}, width, rows) }, nil)
		require.NoError(t, err)
		defer g.Close()
		require.NoError(t, y.CopyFrom(s[1], was))
		require.NoError(t, g.Launch(s[1]))
		out := make([]uint8, len(was))
		require.NoError(t, y.CopyTo(s[1], out))
		for i := range rows {
			copy(was[i*to:][:width], in[i*from:])
		}
		require.Equal(t, was, out)

		require.NoError(t, copyPitched(s[1], pitched{y, 1}, pitched{x, 1}, width, 0), "no rows")
		require.ErrorContains(t, copyPitched(s[1], pitched{y, width - 1}, pitched{x, from}, width, rows), "9 of 33 bytes, 32 apart")
		require.ErrorContains(t, copyPitched(s[1], pitched{y, to}, pitched{x, maxPitch + 1}, width, 1), "at most 2147483647")
		require.ErrorContains(t, copyPitched(s[1], pitched{y, to}, pitched{x, from}, width, rows+1), "there are 353 bytes")
		require.ErrorContains(t, copyPitched(s[1], pitched{y, to}, pitched{}, width, rows), "tensor: copy rows")
		require.Error(t, copyPitched(nil, pitched{y, to}, pitched{x, from}, width, rows))
		require.NoError(t, s[0].WaitStream(s[1]))
	})
}
