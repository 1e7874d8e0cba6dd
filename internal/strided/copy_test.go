package strided_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/dtype"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

var allTypes = []memory.DType{memory.Bool, memory.Int8, memory.Uint8, memory.Int16, memory.Uint16, memory.Int32, memory.Uint32,
	memory.Int64, memory.Uint64, memory.Float16, memory.BFloat16, memory.Float32, memory.Float64, memory.Float8E4M3, memory.Float8E5M2}

func newStream(t testing.TB, d *device.Device) *stream.Stream {
	t.Helper()
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// A field is a tensor with gaps, in a larger one whose bytes are known.
type field struct {
	root, view tensor.Tensor
	bytes      []byte // of root
}

// fieldOf returns a tensor of a shape with random strides in random memory: on the
// device of s, or on the host where s is nil.
func fieldOf(t testing.TB, r *rand.Rand, s *stream.Stream, d memory.DType, shape []int) *field {
	t.Helper()
	order := r.Perm(len(shape))
	outer := make([]int, len(shape)) // of the root: its dimension i is order[i] of the shape
	start, step := make([]int, len(shape)), make([]int, len(shape))
	for i, dim := range order {
		step[i] = 1
		outer[i] = shape[dim]
		if r.IntN(3) == 0 {
			start[i], step[i] = r.IntN(3), 1+r.IntN(2)
			outer[i] = start[i] + shape[dim]*step[i] + r.IntN(4)
		}
	}
	f := &field{}
	f.root = allocate(t, s, d, outer)
	f.bytes = make([]byte, f.root.Bytes())
	for i := range f.root.Len() {
		if dtype.Of(d).IsFloat() {
			dtype.Of(d).Store(f.bytes, i, dtype.FloatValue(float64(r.IntN(100))))
		} else {
			dtype.Of(d).Store(f.bytes, i, dtype.IntValue(int64(r.IntN(100))))
		}
	}
	f.put(t, s)
	var err error
	f.view = f.root
	back := make([]int, len(shape))
	for i, dim := range order {
		f.view, err = f.view.Step(i, start[i], start[i]+shape[dim]*step[i], step[i])
		require.NoError(t, err)
		back[dim] = i
	}
	f.view, err = f.view.Permute(back...)
	require.NoError(t, err)
	require.Equal(t, shape, f.view.Shape())
	return f
}

func allocate(t testing.TB, s *stream.Stream, d memory.DType, shape []int) tensor.Tensor {
	t.Helper()
	x, err := tensor.MakeHost(d, shape...)
	if s != nil {
		x, err = tensor.Make(s, d, shape...)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// raw returns the root as bytes.
func raw(t testing.TB, x tensor.Tensor) memory.Slice[uint8] {
	t.Helper()
	b, err := memory.View[uint8](x.Buffer(), x.Offset(), x.Bytes())
	require.NoError(t, err)
	return b
}

func (f *field) put(t testing.TB, s *stream.Stream) {
	t.Helper()
	if s != nil {
		require.NoError(t, raw(t, f.root).CopyFrom(s, f.bytes))
		return
	}
	copy(strided.HostBytes(f.root), f.bytes)
}

func (f *field) get(t testing.TB, s *stream.Stream) []byte {
	t.Helper()
	out := make([]byte, len(f.bytes))
	if s != nil {
		require.NoError(t, raw(t, f.root).CopyTo(s, out))
		return out
	}
	copy(out, strided.HostBytes(f.root))
	return out
}

// each calls fn with the places of all elements of two tensors of one shape, in
// elements from the start of their memory.
func each(a, b tensor.Tensor, fn func(i, j int)) {
	shape, sa, sb := a.Shape(), a.Strides(), b.Strides()
	var walk func(dim, i, j int)
	walk = func(dim, i, j int) {
		if dim == len(shape) {
			fn(i, j)
			return
		}
		for k := range shape[dim] {
			walk(dim+1, i+k*sa[dim], j+k*sb[dim])
		}
	}
	walk(0, a.Offset()/a.DType().Size(), b.Offset()/b.DType().Size())
}

// want is what the destination's memory holds after a copy.
func want(dst, src *field) []byte {
	out := slices.Clone(dst.bytes)
	from, _ := src.view.Expand(dst.view.Shape()...)
	to, of := dst.view.DType(), src.view.DType()
	each(dst.view, from, func(i, j int) {
		if to == of {
			copy(out[i*to.Size():(i+1)*to.Size()], src.bytes[j*to.Size():])
			return
		}
		dtype.Of(to).Store(out, i, dtype.Of(of).Load(src.bytes, j))
	})
	return out
}

// Any layout is copied to any other, on one device, between devices and from and to
// the host, and what lies between the elements stays.
func TestCopy(t *testing.T) {
	for _, p2p := range []bool{true, false} {
		t.Run(fmt.Sprint("p2p=", p2p), func(t *testing.T) {
			if !p2p {
				t.Setenv(env.P2P.Name, "off")
			}
			testCopies(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), 250)
		})
	}
	t.Run("cuda", func(t *testing.T) { testCopies(t, testgpu.CUDA(t, 2), 1000) })
	t.Run("cuda, one device", func(t *testing.T) {
		d := testgpu.CUDA(t, 1)[0]
		testCopies(t, []*device.Device{d, d}, 1000)
	})
}

func testCopies(t *testing.T, devs []*device.Device, rounds int) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	places := []*stream.Stream{newStream(t, devs[0]), newStream(t, devs[1]), nil}
	for round := range rounds {
		shape := make([]int, r.IntN(5))
		for i, n := range r.Perm(len(shape)) { // some hundred elements, and some 16 in a row
			shape[n] = r.IntN([]int{33, 9, 5, 3}[i])
			if i == 0 && r.IntN(2) == 0 {
				shape[n] = 16
			}
		}
		d := allTypes[r.IntN(len(allTypes))]
		of := d
		if r.IntN(2) == 0 {
			of = allTypes[r.IntN(len(allTypes))]
		}
		to, from := places[r.IntN(3)], places[r.IntN(3)]
		narrow := slices.Clone(shape)
		if len(shape) > 0 && r.IntN(4) == 0 { // the source repeats
			narrow[r.IntN(len(shape))] = 1
		}
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			dst, src := fieldOf(t, r, to, d, shape), fieldOf(t, r, from, of, narrow)
			by := to
			if by == nil || from != nil && r.IntN(2) == 0 {
				by = from
			}
			if by == to && from != nil && to != from {
				require.NoError(t, to.WaitStream(from))
				require.NoError(t, src.root.RecordStream(to))
			}
			if by == from && to != nil && to != from {
				require.NoError(t, from.WaitStream(to))
				require.NoError(t, dst.root.RecordStream(from))
			}
			require.NoError(t, tensor.Copy(by, dst.view, src.view), "%v to %v", src.view, dst.view)
			if by == from && to != nil && to != from {
				require.NoError(t, to.WaitStream(from))
			}
			require.Equal(t, want(dst, src), dst.get(t, to), "%v %v to %v %v", src.view, src.view.Strides(), dst.view, dst.view.Strides())
			if from != nil && to != nil && from != to {
				require.NoError(t, from.WaitStream(to))
			}
			require.Equal(t, src.bytes, src.get(t, from))
		})
	}
}

// More dimensions than the kernel has loops, none of which can be joined.
func TestCopyOfManyDimensions(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		root := allocate(t, s, memory.Int16, []int{4, 4, 4, 4, 4, 4, 4, 4, 4, 4})
		h := make([]int16, root.Len())
		for i := range h {
			h[i] = int16(i * 13)
		}
		x, err := tensor.Slice[int16](root)
		require.NoError(t, err)
		require.NoError(t, x.CopyFrom(s, h))
		v := root
		for i := range 10 {
			v, err = v.Step(i, 0, 4, 2)
			require.NoError(t, err)
		}
		v, err = v.Permute(9, 8, 7, 6, 5, 4, 3, 2, 1, 0)
		require.NoError(t, err)
		got := make([]int16, v.Len())
		to, err := tensor.OfHost(got, v.Shape()...)
		require.NoError(t, err)
		require.NoError(t, tensor.Copy(s, to, v))
		each(to, v, func(i, j int) { require.Equal(t, h[j], got[i]) })
	})
}

// What torch's conversions give, also where the types are tricky.
func TestConversions(t *testing.T) {
	nan, inf := math.NaN(), math.Inf(1)
	for _, c := range []struct {
		of, to memory.DType
		in     []float64
		want   []float64
	}{
		{memory.Float32, memory.Int32, []float64{-1.9, 1.9, 0, 1e9}, []float64{-1, 1, 0, 1e9}},
		{memory.Float32, memory.Uint8, []float64{-1, 255.9, 3}, []float64{255, 255, 3}},
		{memory.Float64, memory.Bool, []float64{0, 0.25, -3, nan, math.Copysign(0, -1)}, []float64{0, 1, 1, 1, 0}},
		{memory.Int32, memory.Bool, []float64{0, 256, -1}, []float64{0, 1, 1}},
		{memory.Bool, memory.Float16, []float64{0, 1}, []float64{0, 1}},
		{memory.Int64, memory.Float32, []float64{1 << 24, 1<<24 + 1, 1<<24 + 3}, []float64{1 << 24, 1 << 24, 1<<24 + 4}},
		{memory.Float64, memory.Float16, []float64{65519, 65520, 0x1p-25, 0x1.8p-25, -inf}, []float64{65504, inf, 0, 0x1p-24, -inf}},
		{memory.Float32, memory.BFloat16, []float64{1 + 0x1p-8, 1 + 0x3p-8, inf}, []float64{1, 1 + 0x2p-7, inf}},
		{memory.Float32, memory.Float8E4M3, []float64{448, 464, 465, 0x1p-9, 0x1p-10, 0x1.8p-10, -0.3}, []float64{448, 448, nan, 0x1p-9, 0, 0x1p-9, -0.3125}},
		{memory.Float32, memory.Float8E5M2, []float64{57344, 61439, 61440, 0x1p-16, 0x1p-17}, []float64{57344, 57344, inf, 0x1p-16, 0}},
		{memory.Float8E4M3, memory.Float64, []float64{448, -0.0625, 0x1p-9}, []float64{448, -0.0625, 0x1p-9}},
		{memory.Float8E5M2, memory.Float32, []float64{57344, inf, 0x1p-16}, []float64{57344, inf, 0x1p-16}},
		{memory.Int16, memory.Int8, []float64{300, -129}, []float64{44, 127}},
		{memory.Float64, memory.Uint64, []float64{0x1p63, 1.5}, []float64{0x1p63, 1}},
		{memory.Uint64, memory.Float32, []float64{0x1p63}, []float64{0x1p63}},
	} {
		testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
			s := newStream(t, devs[0])
			src := allocate(t, nil, c.of, []int{len(c.in)})
			for i, v := range c.in {
				if dtype.Of(c.of).IsFloat() {
					dtype.Of(c.of).Store(strided.HostBytes(src), i, dtype.FloatValue(v))
				} else {
					dtype.Of(c.of).Store(strided.HostBytes(src), i, dtype.FloatValue(v))
				}
			}
			onDevice, out := allocate(t, s, c.of, []int{len(c.in)}), allocate(t, nil, c.to, []int{len(c.in)})
			require.NoError(t, tensor.Copy(s, onDevice, src))
			require.NoError(t, tensor.Copy(s, out, onDevice)) // the device converts
			hosts := allocate(t, nil, c.to, []int{len(c.in)})
			require.NoError(t, tensor.Copy(nil, hosts, src)) // the host does
			for i, v := range c.want {
				for _, x := range []tensor.Tensor{out, hosts} {
					got := dtype.Of(c.to).Load(strided.HostBytes(x), i).Float64()
					if math.IsNaN(v) {
						require.True(t, math.IsNaN(got), "%v of %s to %s", c.in[i], c.of, c.to)
						continue
					}
					require.Equal(t, v, got, "%v of %s to %s", c.in[i], c.of, c.to)
				}
			}
		})
	}
}

func TestCopyErrors(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	s, o := newStream(t, devs[0]), newStream(t, devs[2])
	x, y := allocate(t, s, memory.Float32, []int{2, 3}), allocate(t, s, memory.Float32, []int{3, 2})
	err := tensor.Copy(s, x, y)
	require.ErrorContains(t, err, "float32 [3 2] on virtual:0 to float32 [2 3] on virtual:0: the shapes do not fit")
	require.NoError(t, tensor.Copy(o, x, x.T().T())) // the same elements are no work, whatever the stream
	z := allocate(t, newStream(t, devs[1]), memory.Float32, []int{2, 3})
	require.ErrorContains(t, tensor.Copy(o, x, z), "is of neither device")
	require.ErrorContains(t, tensor.Copy(nil, x, z), "no stream given")
	require.ErrorContains(t, tensor.Copy(s, x, tensor.Tensor{}), "no tensor given")
	wide, err := x.Narrow(0, 0, 1)
	require.NoError(t, err)
	wide, err = wide.Expand(2, 3)
	require.NoError(t, err)
	require.ErrorContains(t, tensor.Copy(s, wide, z), "several elements of the destination have one place")
	flat, err := x.View(6)
	require.NoError(t, err)
	a, err := flat.Narrow(0, 0, 4)
	require.NoError(t, err)
	b, err := flat.Narrow(0, 2, 4)
	require.NoError(t, err)
	require.ErrorContains(t, tensor.Copy(s, a, b), "they share some memory")
	require.NoError(t, y.Close())
	require.ErrorIs(t, tensor.Copy(s, x, y.T()), device.ErrClosed)
}

// A kernel that reads what it writes has no defined result on a GPU, also if the tensors are not dense. Copies between
// elements that only interleave are possible.
func TestCopyOfSharedMemory(t *testing.T) {
	s := newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	x := allocate(t, s, memory.Float32, []int{4, 6, 8})
	view := func(v tensor.Tensor, err error) tensor.Tensor {
		require.NoError(t, err)
		return v
	}
	shared := []tensor.Tensor{
		view(x.Narrow(2, 0, 7)), view(x.Narrow(2, 1, 7)), // a window that moves along the last dimension
		view(x.Narrow(1, 0, 5)), view(x.Narrow(1, 1, 5)),
		view(view(x.Step(2, 0, 8, 2)).Narrow(2, 0, 3)), view(view(x.Step(2, 0, 8, 2)).Narrow(2, 1, 3)),
		view(x.Narrow(2, 0, 6)).T(), view(x.Narrow(2, 2, 6)).T(),
		view(x.Select(2, 3)), view(x.Select(0, 1)).T(),
		view(view(x.View(24, 8)).Narrow(0, 0, 8)), view(view(view(x.View(24, 8)).Narrow(0, 0, 8)).View(8, 8)).T(),
	}
	for i := 0; i < len(shared); i += 2 {
		a, b := shared[i], shared[i+1]
		if a.Size(0) != b.Size(0) {
			b = view(b.Narrow(0, 0, a.Size(0)))
		}
		require.ErrorContains(t, tensor.Copy(s, a, b), "they share some memory", "%v %v from %v", a, a.Strides(), b.Strides())
		require.ErrorContains(t, tensor.CopyAll(s, []tensor.Tensor{a}, []tensor.Tensor{b}), "they share some memory")
	}
	apart := []tensor.Tensor{
		view(x.Step(2, 0, 8, 2)), view(x.Step(2, 1, 8, 2)),
		view(x.Narrow(2, 0, 4)), view(x.Narrow(2, 4, 4)),
		view(x.Step(1, 0, 6, 2)), view(x.Step(1, 1, 6, 2)),
		view(x.Select(2, 3)), view(x.Select(2, 4)),
	}
	for i := 0; i < len(apart); i += 2 {
		require.NoError(t, tensor.Copy(s, apart[i], apart[i+1]), "%v", apart[i].Strides())
	}
	require.NoError(t, s.Sync(testgpu.Context(t)))
}

// Copies from pinned memory and within a device can be captured, others cannot.
func TestCopyInGraph(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		pin, err := memory.MakePinned[float32](devs[0], 12)
		require.NoError(t, err)
		in, err := tensor.OfPinned(pin, 3, 4)
		require.NoError(t, err)
		x, y := allocate(t, s, memory.Float32, []int{3, 4}), allocate(t, s, memory.BFloat16, []int{4, 3})
		require.NoError(t, tensor.Copy(s, y.T(), x)) // compiles
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			if err := tensor.Copy(s, x, in); err != nil {
				return err
			}
			return tensor.Copy(s, y.T(), x)
		}, nil)
		require.NoError(t, err)
		out, err := tensor.MakeHost(memory.Float32, 4, 3)
		require.NoError(t, err)
		for round := range 2 {
			for i := range pin.Data() {
				pin.Data()[i] = float32(i + round)
			}
			require.NoError(t, g.Launch(s))
			require.NoError(t, tensor.Copy(s, out, y))
			got, err := tensor.Data[float32](out)
			require.NoError(t, err)
			for i := range 12 {
				require.Equal(t, float32(i+round), got[i%4*3+i/4])
			}
		}
		require.NoError(t, g.Close())
		pageable, err := tensor.MakeHost(memory.Float32, 3, 4)
		require.NoError(t, err)
		strided, err := tensor.OfPinned(pin, 4, 3)
		require.NoError(t, err)
		strided = strided.T()
		for _, f := range []func() error{
			func() error { return tensor.Copy(s, x, pageable) },
			func() error { return tensor.Copy(s, x, pageable.T().T()) },
			func() error { return tensor.Copy(s, x, strided) },
			func() error { return tensor.Copy(s, pageable, x) },
		} {
			_, err := graph.Capture([]*stream.Stream{s}, f, nil)
			var refused *device.CaptureError
			require.ErrorAs(t, err, &refused)
		}
		require.NoError(t, pin.Close())
		require.ErrorIs(t, tensor.Copy(s, x, in), device.ErrClosed)
	})
}

// The sum of any layouts and types that torch adds.
func TestAdd(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		r := rand.New(rand.NewPCG(5, 5))
		done := 0
		for _, d := range allTypes {
			for _, e := range allTypes {
				sum, err := kernel.Promote(d, e)
				if err != nil {
					continue
				}
				done++
				a, b, c := fieldOf(t, r, s, d, []int{3, 5}), fieldOf(t, r, s, e, []int{3, 5}), fieldOf(t, r, s, sum, []int{3, 5})
				require.NoError(t, tensor.Add(s, c.view, a.view, b.view))
				out := append([]byte(nil), c.bytes...)
				each(c.view, a.view, func(i, j int) { dtype.Of(sum).Store(out, i, dtype.Of(d).Load(a.bytes, j)) })
				each(c.view, b.view, func(i, j int) {
					x, y := dtype.Of(sum).Load(out, i), dtype.Of(e).Load(b.bytes, j)
					if dtype.Of(sum).IsFloat() { // of whole numbers up to 198, rounded where the type is small
						dtype.Of(sum).Store(out, i, dtype.FloatValue(x.Float64()+y.Float64()))
					} else {
						dtype.Of(sum).Store(out, i, dtype.IntValue(x.Int64()+y.Int64()))
					}
				})
				require.Equal(t, out, c.get(t, s), "%s and %s to %s", d, e, sum)
			}
		}
		require.Greater(t, done, 80)
		x := allocate(t, s, memory.Int32, []int{2})
		f := allocate(t, s, memory.Float32, []int{2})
		require.ErrorContains(t, tensor.Add(s, x, x, f), "the sum is of float32 and cannot be cast to int32")
		require.ErrorContains(t, tensor.Add(s, x, x, allocate(t, s, memory.Int32, []int{3})), "want one shape")
	})
}

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

// calls counts the calls of the driver that fn makes; nil on CUDA.
func calls(d *device.Device, fn func()) map[string]int {
	m := gpu.DeviceOf(d).System().Machine
	if m == nil {
		fn()
		return nil
	}
	stop := m.CountCalls()
	fn()
	return stop()
}

// Rows of another device's tensor that become one run are a copy engine's, on a stream of
// either device, and all arrives whoever copies.
func TestRowsByEngine(t *testing.T) {
	eachPair(t, func(t *testing.T, s, o *stream.Stream) {
		strided.SetEngineBytes(t, 64, 1024)
		r := random(t)
		reach, err := inside.Reach(s.Device(), o.Device())
		require.NoError(t, err)
		for _, c := range []struct {
			name     string
			rows, n  int // elements of a row
			of       int // the row that it is part of
			to       int // the row in the destination
			of1, to1 int // how many come before it
			engine   bool
		}{
			{"long rows", 16, 64, 200, 64, 0, 0, true},
			{"anywhere", 64, 16, 17, 16, 1, 0, true},
			{"short rows", 80, 15, 17, 15, 0, 0, false},
			{"few", 15, 16, 17, 16, 0, 0, false},
			{"strided to strided", 16, 64, 200, 65, 3, 1, false},
			{"dense to strided", 16, 64, 64, 200, 0, 9, false},
			{"one run", 16, 64, 64, 64, 0, 0, false},
		} {
			t.Run(c.name, func(t *testing.T) {
				for _, by := range []*stream.Stream{s, o} {
					in, gap := make([]int32, c.rows*c.of), make([]int32, c.rows*c.to+8)
					for i := range in {
						in[i] = r.Int32()
					}
					for i := range gap {
						gap[i] = r.Int32()
					}
					x, err := memory.MakeFrom(s, in)
					require.NoError(t, err)
					y, err := memory.MakeFrom(o, gap)
					require.NoError(t, err)
					src, err := tensor.Of(x, c.rows, c.of)
					require.NoError(t, err)
					src, err = src.Narrow(1, c.of1, c.n)
					require.NoError(t, err)
					dst, err := tensor.Of(y.Slice(4, 4+c.rows*c.to), c.rows, c.to)
					require.NoError(t, err)
					dst, err = dst.Narrow(1, c.to1, c.n)
					require.NoError(t, err)
					require.Equal(t, c.engine || c.name == "one run", strided.ByEngine(dst, src))

					require.NoError(t, s.WaitStream(o))
					require.NoError(t, o.WaitStream(s))
					got := calls(s.Device(), func() { require.NoError(t, tensor.Copy(by, dst, src)) })
					require.NoError(t, s.WaitStream(o))
					require.NoError(t, o.WaitStream(s))
					if got != nil {
						require.Equal(t, c.engine && reach, got["cuMemcpy2DAsync"] == 1, "%v", got)
						require.Equal(t, c.engine && reach || c.name == "one run", got["cuLaunchKernel"] == 0, "%v", got)
					}
					for i := range c.rows {
						copy(gap[4+i*c.to+c.to1:][:c.n], in[i*c.of+c.of1:][:c.n])
					}
					out, kept := make([]int32, len(gap)), make([]int32, len(in))
					require.NoError(t, y.CopyTo(o, out))
					require.NoError(t, x.CopyTo(s, kept))
					require.Equal(t, gap, out)
					require.Equal(t, in, kept)
					require.NoError(t, x.Close())
					require.NoError(t, y.Close())
				}
			})
		}
	})
}

// Rows that share memory, or are one row again and again, are no rows of an engine's.
func TestRowsThatAreNone(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		strided.SetEngineBytes(t, 64, 1024)
		s, o := newStream(t, devs[0]), newStream(t, devs[1])
		in := make([]int32, 64)
		for i := range in {
			in[i] = int32(i * i)
		}
		x, err := memory.MakeFrom(s, in)
		require.NoError(t, err)
		defer x.Close()
		one, err := tensor.Of(x, 1, 64)
		require.NoError(t, err)
		many, err := one.Expand(32, 64)
		require.NoError(t, err)
		to := allocate(t, o, memory.Int32, []int{32, 64})
		require.False(t, strided.ByEngine(to, many))
		require.NoError(t, o.WaitStream(s))
		require.NoError(t, tensor.Copy(o, to, many))
		require.NoError(t, s.WaitStream(o))
		out := make([]int32, 32*64)
		flat, err := tensor.Slice[int32](to)
		require.NoError(t, err)
		require.NoError(t, flat.CopyTo(o, out))
		for i, v := range out {
			require.Equal(t, in[i%64], v)
		}
		half := allocate(t, o, memory.Float16, []int{32, 64})
		require.False(t, strided.ByEngine(half, to), "another type")
	})
}
