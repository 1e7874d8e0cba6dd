package comm_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// bothWays runs a test where one kernel does what it can and where it does nothing.
func bothWays(t *testing.T, f func(t *testing.T, direct bool)) {
	t.Run("one kernel", func(t *testing.T) { f(t, true) })
	t.Run("each copy by itself", func(t *testing.T) {
		comm.SetDirectBytes(t, -1)
		f(t, false)
	})
}

// A sample is a tensor and what it should hold: its elements in row-major order.
type sample struct {
	x     tensor.Tensor
	dtype memory.DType
	shape []int
	want  []byte
}

// bytesOf are small whole numbers of a type.
func bytesOf(r *rand.Rand, d memory.DType, n int) []byte {
	b := make([]byte, n*d.Size())
	for i := range n {
		dtype.Of(d).Store(b, i, dtype.IntValue(int64(r.IntN(6))))
	}
	return b
}

// sampleOf makes a sample on a rank's device, or on the host where rank is -1. Work
// on the group's stream writes it. A strided one lies in a larger tensor.
func sampleOf(t testing.TB, g *comm.Group, r *rand.Rand, rank int, d memory.DType, shape []int, strided bool) *sample {
	t.Helper()
	m := &sample{dtype: d, shape: shape}
	n := 1
	for _, k := range shape {
		n *= k
	}
	m.want = bytesOf(r, d, n)
	on := max(rank, 0)
	packed := onDevice(t, g.Stream(on), d, shape, m.want)
	order := make([]int, len(shape))
	for i := range order {
		order[i] = i
	}
	if strided {
		r.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
	}
	outer, back := make([]int, len(shape)), make([]int, len(shape))
	for i, dim := range order {
		outer[i], back[dim] = shape[dim], i
		if strided {
			outer[i] += 2
		}
	}
	root, err := tensor.MakeHost(d, outer...)
	if rank >= 0 {
		root, err = tensor.Make(g.Stream(on), d, outer...)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, root.Close()) })
	m.x = root
	for i, dim := range order {
		m.x, err = m.x.Step(i, outer[i]-shape[dim], outer[i], 1)
		require.NoError(t, err)
	}
	m.x, err = m.x.Permute(back...)
	require.NoError(t, err)
	require.NoError(t, tensor.Copy(g.Stream(on), m.x, packed))
	if !strided {
		m.x = root // which owns
	}
	return m
}

// onDevice makes a contiguous tensor of bytes.
func onDevice(t testing.TB, s *stream.Stream, d memory.DType, shape []int, b []byte) tensor.Tensor {
	t.Helper()
	x, err := tensor.Make(s, d, shape...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	raw, err := memory.View[uint8](x.Buffer(), 0, len(b))
	require.NoError(t, err)
	require.NoError(t, raw.CopyFrom(s, b))
	return x
}

// bytesIn returns the elements of a tensor in row-major order, read on s,
// or on rank 0's stream for one of the host.
func bytesIn(t testing.TB, g *comm.Group, s *stream.Stream, x tensor.Tensor) []byte {
	t.Helper()
	if s == nil {
		s = g.Stream(0)
		if !x.IsHost() {
			s = g.Stream(rankOf(g, x.Device()))
		}
	}
	packed, err := tensor.Make(s, x.DType(), x.Shape()...)
	require.NoError(t, err)
	require.NoError(t, tensor.Copy(s, packed, x))
	raw, err := memory.View[uint8](packed.Buffer(), 0, packed.Bytes())
	require.NoError(t, err)
	out := make([]byte, packed.Bytes())
	require.NoError(t, raw.CopyTo(s, out))
	require.NoError(t, packed.Close())
	return out
}

func rankOf(g *comm.Group, d *device.Device) int {
	for i := range g.Locals() {
		if g.Device(i) == d {
			return i
		}
	}
	return -1
}

// holds checks type, shape and elements.
func (m *sample) holds(t testing.TB, g *comm.Group, s *stream.Stream, x tensor.Tensor) {
	t.Helper()
	require.Equal(t, m.dtype, x.DType())
	require.Equal(t, m.shape, x.Shape())
	require.Equal(t, m.want, bytesIn(t, g, s, x))
}

// as returns the sample converted to another type.
func (m *sample) as(d memory.DType) *sample {
	if d == m.dtype {
		return m
	}
	c := &sample{dtype: d, shape: m.shape, want: make([]byte, len(m.want)/m.dtype.Size()*d.Size())}
	for i := range len(m.want) / m.dtype.Size() {
		dtype.Of(d).Store(c.want, i, dtype.Of(m.dtype).Load(m.want, i))
	}
	return c
}

// along returns the part of a sample from a place along a dimension.
func (m *sample) along(dim, from, n int) *sample {
	inner := m.dtype.Size()
	for _, k := range m.shape[dim+1:] {
		inner *= k
	}
	p := &sample{dtype: m.dtype, shape: slices.Clone(m.shape)}
	p.shape[dim] = n
	row := m.shape[dim] * inner
	for at := 0; row > 0 && at < len(m.want); at += row {
		p.want = append(p.want, m.want[at+from*inner:at+(from+n)*inner]...)
	}
	if p.want == nil {
		p.want = []byte{}
	}
	return p
}

// plus adds, in the type of m, rounding the sum.
func (m *sample) plus(d memory.DType, o *sample) *sample {
	s := &sample{dtype: d, shape: m.shape, want: make([]byte, len(m.want)/m.dtype.Size()*d.Size())}
	for i := range len(m.want) / m.dtype.Size() {
		x, y := dtype.Of(m.dtype).Load(m.want, i), dtype.Of(o.dtype).Load(o.want, i)
		if dtype.Of(d).IsFloat() {
			dtype.Of(d).Store(s.want, i, dtype.FloatValue(x.Float64()+y.Float64()))
		} else {
			dtype.Of(d).Store(s.want, i, dtype.IntValue(x.Int64()+y.Int64()))
		}
	}
	return s
}

// closing closes results.
func closing(t testing.TB, xs ...tensor.Tensor) {
	t.Helper()
	for _, x := range xs {
		require.NoError(t, x.Close())
	}
}

// balanced fails the test if memory of a device is left when it ends. It is to be
// called before anything is allocated.
func balanced(t testing.TB, devs []*device.Device) {
	t.Helper()
	inUse := func(d *device.Device) int64 {
		s, err := memory.StatsOf(d)
		require.NoError(t, err)
		return s.AllocatedBytes.All.Current
	}
	for _, d := range devs {
		before := inUse(d)
		t.Cleanup(func() { require.Equal(t, before, inUse(d), "memory of %s is left", d) })
	}
}

func shapeOf(r *rand.Rand, dims int) []int {
	shape := make([]int, dims)
	for i := range shape {
		shape[i] = r.IntN(6)
		if r.IntN(3) == 0 {
			shape[i] = 8
		}
	}
	return shape
}

var allTypes = []memory.DType{memory.Bool, memory.Int8, memory.Uint8, memory.Int16, memory.Uint16, memory.Int32, memory.Uint32,
	memory.Int64, memory.Uint64, memory.Float16, memory.BFloat16, memory.Float32, memory.Float64, memory.Float8E4M3, memory.Float8E5M2}

func pickType(r *rand.Rand) memory.DType { return allTypes[r.IntN(len(allTypes))] }
