package nancheck_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/nancheck"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

var floats = []memory.DType{memory.Float16, memory.BFloat16, memory.Float32, memory.Float64, memory.Float8E4M3, memory.Float8E5M2}

// upload copies values to new memory on a device.
func upload(t *testing.T, s *stream.Stream, b []byte) memory.Slice[byte] {
	t.Helper()
	x, err := memory.MakeFrom(s, b)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// plain returns n numbers, among them the largest ones and infinities of both signs.
func plain(d memory.DType, n int) []byte {
	b := make([]byte, n*d.Size())
	for i := range n {
		v := []float64{0, 1, -2.5, math.Inf(1), math.Inf(-1)}[i%5]
		if d == memory.Float8E4M3 && math.IsInf(v, 0) {
			v = math.Copysign(448, v)
		}
		dtype.Of(d).Store(b, i, dtype.FloatValue(v))
	}
	return b
}

// The first NaN of each type is found at every place, and numbers and infinities are not NaN.
func TestFirstNaN(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		for _, d := range floats {
			require.True(t, nancheck.Checks(d))
			for _, n := range []int{1, 255, 256, 257, 100_003, 700_001} {
				for _, at := range []int{-1, 0, n / 2, n - 1} {
					c, err := nancheck.New(devs[0])
					require.NoError(t, err)
					b := plain(d, n)
					if at >= 0 {
						dtype.Of(d).Store(b, at, dtype.FloatValue(math.NaN()))
						dtype.Of(d).Store(b, n-1, dtype.FloatValue(math.NaN()))
					}
					x := upload(t, s, b)
					require.NoError(t, c.Check(s, x.Ptr(), n, d, 1<<40+7))
					require.NoError(t, s.Sync(testgpu.Context(t)))
					operation, index, found := c.Found()
					require.Equal(t, at >= 0, found, "%s %d at %d", d, n, at)
					if found {
						require.EqualValues(t, 1<<40+7, operation)
						require.Equal(t, at, index, "%s %d", d, n)
					}
					require.NoError(t, c.Close())
				}
			}
		}
		for _, d := range []memory.DType{memory.Bool, memory.Int8, memory.Uint16, memory.Int64, memory.Uint64} {
			require.False(t, nancheck.Checks(d))
		}
	})
}

// The first operation with a NaN is reported, and later ones do not change it.
func TestFirstOperation(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		c, err := nancheck.New(devs[0])
		require.NoError(t, err)
		bad := plain(memory.Float32, 1000)
		dtype.Of(memory.Float32).Store(bad, 998, dtype.FloatValue(math.NaN()))
		good, wrong := upload(t, s, plain(memory.Float32, 1000)), upload(t, s, bad)
		for operation := uint64(1); operation <= 200; operation++ {
			x := good
			if operation >= 77 {
				x = wrong
			}
			require.NoError(t, c.Check(s, x.Ptr(), 1000, memory.Float32, operation))
		}
		require.NoError(t, c.Check(s, 0, 0, memory.Float32, 300), "without elements")
		require.NoError(t, s.Sync(testgpu.Context(t)))
		operation, index, found := c.Found()
		require.True(t, found)
		require.EqualValues(t, 77, operation)
		require.Equal(t, 998, index)
		require.NoError(t, c.Close())
	})
}
