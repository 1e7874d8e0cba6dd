package tensor_test

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

func newStream(t testing.TB, d *device.Device) *stream.Stream {
	t.Helper()
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// All four combinations of transposed operands against a float64 reference.
func TestMatMul(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		r := rand.New(rand.NewPCG(7, 7))
		for _, dim := range [][3]int{{1, 1, 1}, {1, 5, 3}, {7, 1, 4}, {33, 17, 65}, {86, 10, 128}} {
			for mode := range 4 {
				testMatMul(t, s, r, dim[0], dim[1], dim[2], mode&1 != 0, mode&2 != 0)
			}
		}
	})
}

func testMatMul(t *testing.T, s *stream.Stream, r *rand.Rand, m, n, k int, ta, tb bool) {
	t.Helper()
	a, da := matrix(t, s, r, m, k, ta)
	b, db := matrix(t, s, r, k, n, tb)
	c, dc := matrix(t, s, r, m, n, false)
	old := make([]float32, m*n)
	require.NoError(t, dc.CopyTo(s, old))
	require.NoError(t, tensor.MatMul(s, c, a, b, &tensor.MatMulConfig{Alpha: new(0.5), Beta: new(2.0)}))
	got := make([]float32, m*n)
	require.NoError(t, dc.CopyTo(s, got))
	ha, hb := make([]float32, m*k), make([]float32, k*n)
	require.NoError(t, da.CopyTo(s, ha))
	require.NoError(t, db.CopyTo(s, hb))
	at := func(h []float32, i, j, rows, cols int, t bool) float64 {
		if t {
			return float64(h[j*rows+i])
		}
		return float64(h[i*cols+j])
	}
	for i := range m {
		for j := range n {
			sum, abs := 0.0, 0.0
			for l := range k {
				p := at(ha, i, l, m, k, ta) * at(hb, l, j, k, n, tb)
				sum += p
				abs += math.Abs(p)
			}
			want := 0.5*sum + 2*float64(old[i*n+j])
			bound := float64(k+2) * 0x1p-23 * (abs + 2*math.Abs(float64(old[i*n+j])))
			require.InDelta(t, want, got[i*n+j], bound, "[%d %d %d] %v %v at %d %d", m, n, k, ta, tb, i, j)
		}
	}
	for _, d := range []memory.Slice[float32]{da, db, dc} {
		require.NoError(t, d.Close())
	}
}

// matrix returns a random rows by cols tensor, stored transposed if asked.
func matrix(t *testing.T, s *stream.Stream, r *rand.Rand, rows, cols int, transposed bool) (tensor.Tensor, memory.Slice[float32]) {
	t.Helper()
	h := make([]float32, rows*cols)
	for i := range h {
		h[i] = r.Float32()*2 - 1
	}
	d, err := memory.MakeFrom(s, h)
	require.NoError(t, err)
	if transposed {
		x, err := tensor.Of(d, cols, rows)
		require.NoError(t, err)
		return x.T(), d
	}
	x, err := tensor.Of(d, rows, cols)
	require.NoError(t, err)
	return x, d
}

func TestNarrowAndErrors(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		x, err := memory.MakeFrom(s, []float32{1, 2, 3, 4, 5, 6})
		require.NoError(t, err)
		_, err = tensor.Of(x, 2, 2)
		require.ErrorContains(t, err, "has 4 elements: the memory has 6")
		a, err := tensor.Of(x, 3, 2)
		require.NoError(t, err)
		last, err := a.Narrow(0, 2, 1) // [5 6]
		require.NoError(t, err)
		require.Equal(t, []int{1, 2}, last.Shape())
		_, err = a.Narrow(0, 2, 2)
		require.ErrorContains(t, err, "out of range")
		y, err := memory.Make[float32](s, 3)
		require.NoError(t, err)
		c, err := tensor.Of(y, 3, 1)
		require.NoError(t, err)
		require.NoError(t, tensor.MatMul(s, c, a, last.T(), nil))
		got := make([]float32, 3)
		require.NoError(t, y.CopyTo(s, got))
		require.Equal(t, []float32{17, 39, 61}, got)
		require.ErrorContains(t, tensor.MatMul(s, c, a, a, nil), "do not fit")
		require.NoError(t, x.Close())
		require.ErrorIs(t, tensor.MatMul(s, c, a, last.T(), nil), device.ErrClosed)
		require.NoError(t, y.Close())
	})
}
