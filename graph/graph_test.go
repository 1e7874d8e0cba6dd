package graph_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

var addSource = kernel.Source{
	Name: "add.cu",
	CUDA: `extern "C" __global__ void add(float* x, float by, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) x[i] += by;
}
extern "C" __global__ void scale(float* x, float by, int n) {
	int i = blockIdx.x * blockDim.x + threadIdx.x;
	if (i < n) x[i] *= by;
}`,
	Kernels: []kernel.Def{{
		Name: "add", Params: []kernel.Param{kernel.Pointer, kernel.F32, kernel.I32},
		Go: func(c *kernel.Call) {
			x := kernel.Update[float32](c, 0, int(kernel.Get[int32](c, 2)))
			for i := range x {
				x[i] += kernel.Get[float32](c, 1)
			}
		},
	}, {
		Name: "scale", Params: []kernel.Param{kernel.Pointer, kernel.F32, kernel.I32},
		Go: func(c *kernel.Call) {
			x := kernel.Update[float32](c, 0, int(kernel.Get[int32](c, 2)))
			for i := range x {
				x[i] *= kernel.Get[float32](c, 1)
			}
		},
	}},
}

// A bench is a device with a stream and the kernels, which have run once.
type bench struct {
	t          *testing.T
	dev        *device.Device
	s          *stream.Stream
	add, scale *kernel.Kernel
}

const elems = 1000

func newBench(t *testing.T, dev *device.Device) *bench {
	t.Helper()
	b := &bench{t: t, dev: dev, s: newStream(t, dev)}
	m, err := kernel.Compile(dev, &addSource)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	b.add, err = m.Kernel("add")
	require.NoError(t, err)
	b.scale, err = m.Kernel("scale")
	require.NoError(t, err)
	x := b.make(0)
	require.NoError(t, b.launch(b.add, b.s, x, 1))
	require.NoError(t, b.launch(b.scale, b.s, x, 1))
	require.NoError(t, b.s.Sync(testgpu.Context(t)))
	return b
}

func newStream(t *testing.T, dev *device.Device) *stream.Stream {
	t.Helper()
	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// make returns memory that is filled with v and that every stream may use.
func (b *bench) make(v float32) memory.Slice[float32] {
	b.t.Helper()
	x, err := memory.Make[float32](b.s, elems)
	require.NoError(b.t, err)
	b.t.Cleanup(func() { require.NoError(b.t, x.Close()) })
	b.fill(x, v)
	require.NoError(b.t, b.s.Sync(testgpu.Context(b.t)))
	return x
}

func (b *bench) fill(x memory.Slice[float32], v float32) {
	b.t.Helper()
	in := make([]float32, x.Len())
	for i := range in {
		in[i] = v
	}
	require.NoError(b.t, x.CopyFrom(b.s, in))
}

func (b *bench) launch(k *kernel.Kernel, s *stream.Stream, x memory.Slice[float32], by float32) error {
	return k.Launch(s, kernel.Cover(x.Len()), kernel.Ptr(x), kernel.Scalar(by), kernel.Scalar(int32(x.Len())))
}

// want checks every element.
func (b *bench) want(v float32, x memory.Slice[float32]) {
	b.t.Helper()
	out := make([]float32, x.Len())
	require.NoError(b.t, x.CopyTo(b.s, out))
	for i := range out {
		require.Equal(b.t, v, out[i], "element %d", i)
	}
}

func capture(t *testing.T, fn func() error, streams ...*stream.Stream) *graph.Exec {
	t.Helper()
	x, err := graph.Capture(streams, fn, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// Capturing runs nothing, and each launch works on what is in the memory then.
func TestLaunchReadsNewInputs(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		in, out := b.make(1), b.make(-1)
		x := capture(t, func() error {
			return errors.Join(memory.Copy(b.s, out, in), b.launch(b.add, b.s, out, 10), b.launch(b.scale, b.s, out, 2))
		}, b.s)
		b.want(-1, out)
		require.Equal(t, 3, x.Nodes())
		require.NoError(t, x.Upload(b.s))
		for i := range 20 {
			b.fill(in, float32(i))
			require.NoError(t, x.Launch(b.s))
			b.want(float32(i+10)*2, out)
		}
	})
}

// Ten launches that only the stream orders: nothing overtakes.
func TestLaunchesFollowEachOther(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(0)
		side := newStream(t, devs[0])
		x := capture(t, func() error {
			for range 5 { // to and fro between two branches
				err := errors.Join(b.launch(b.add, b.s, v, 1), side.WaitStream(b.s), b.launch(b.add, side, v, 1), b.s.WaitStream(side))
				if err != nil {
					return err
				}
			}
			return side.WaitStream(b.s)
		}, b.s)
		other := newStream(t, devs[0])
		for range 50 {
			require.NoError(t, x.Launch(b.s))
			require.NoError(t, x.Launch(other)) // not ordered with the former but by the graph
		}
		require.NoError(t, b.s.WaitStream(other))
		b.want(1000, v)
	})
}

// The branches of a fork run between what the stream has before and after.
func TestForkAndJoin(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		side, inner := newStream(t, devs[0]), newStream(t, devs[0])
		v, w, u := b.make(1), b.make(1), b.make(1)
		x := capture(t, func() error {
			// A stream that fn forks by itself is joined by fn.
			return errors.Join(inner.WaitStream(side), b.launch(b.add, inner, u, 5), side.WaitStream(inner),
				b.launch(b.add, side, w, 1), b.launch(b.add, b.s, v, 2),
				b.s.WaitStream(side), b.launch(b.add, b.s, w, 10), side.WaitStream(b.s), b.launch(b.scale, side, v, 2))
		}, b.s, side)
		for range 5 {
			b.fill(v, 3)
			b.fill(w, 4)
			b.fill(u, 5)
			require.NoError(t, x.Launch(b.s))
			b.want(10, v)
			b.want(15, w)
			b.want(10, u)
		}
	})
}

func TestSeveralDevices(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		b0, b1 := newBench(t, devs[0]), newBench(t, devs[1])
		v, w := b0.make(1), b1.make(0)
		require.NoError(t, memory.Copy(b1.s, w, v)) // lets the devices see each other
		require.NoError(t, b1.s.Sync(testgpu.Context(t)))
		x := capture(t, func() error {
			return errors.Join(b0.launch(b0.add, b0.s, v, 1), b1.s.WaitStream(b0.s),
				memory.Copy(b1.s, w, v), b1.launch(b1.scale, b1.s, w, 3))
		}, b0.s, b1.s)
		for i := range 10 {
			require.NoError(t, x.Launch(b0.s))
			require.NoError(t, b1.s.WaitStream(b0.s))
			b0.want(float32(2+i), v)
			b1.want(float32(2+i)*3, w)
		}
	})
}

func TestModes(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(0)
		for _, m := range []graph.Mode{graph.ThreadLocal, graph.Global, graph.Relaxed} {
			x, err := graph.Capture([]*stream.Stream{b.s},
				func() error { return b.launch(b.add, b.s, v, 1) }, &graph.Config{Name: "of " + m.String(), Mode: m})
			require.NoError(t, err, m)
			require.Contains(t, x.String(), "graph of "+m.String())
			require.NoError(t, x.Launch(b.s))
			require.NoError(t, x.Close())
		}
		b.want(3, v)
		_, err := graph.Begin(b.s, &graph.Config{Mode: 7})
		require.ErrorContains(t, err, "Mode(7)")
	})
}

func TestBeginEnd(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		r, err := graph.Begin(b.s, nil)
		require.NoError(t, err)
		yes, err := b.s.Capturing()
		require.NoError(t, err)
		require.True(t, yes)
		require.NoError(t, b.launch(b.add, b.s, v, 1))
		_, err = graph.Begin(b.s, nil)
		require.ErrorContains(t, err, "captures do not nest")
		_, err = graph.Begin(newStream(t, devs[0]), nil)
		require.ErrorContains(t, err, "captures do not nest")
		x, err := r.End()
		require.NoError(t, err)
		yes, err = b.s.Capturing()
		require.NoError(t, err)
		require.False(t, yes)
		_, err = r.End()
		require.ErrorIs(t, err, device.ErrClosed)
		require.NoError(t, r.Abort())
		require.NoError(t, x.Launch(b.s))
		b.want(2, v)
		require.NoError(t, x.Close())
	})
}

func TestUpdate(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v, w := b.make(0), b.make(0)
		first := capture(t, func() error { return b.launch(b.add, b.s, v, 1) }, b.s)
		second, err := graph.Capture([]*stream.Stream{b.s}, func() error { return b.launch(b.add, b.s, w, 5) }, nil)
		require.NoError(t, err)
		require.NoError(t, first.Launch(b.s))
		require.NoError(t, first.Update(second))
		require.NoError(t, second.Close())
		require.NoError(t, first.Launch(b.s))
		b.want(1, v)
		b.want(5, w)
		two := capture(t, func() error {
			return errors.Join(b.launch(b.add, b.s, v, 1), b.launch(b.add, b.s, v, 1))
		}, b.s)
		var ue *graph.UpdateError
		require.ErrorAs(t, first.Update(two), &ue)
		require.ErrorIs(t, ue, graph.ErrorUpdate)
		require.NotEmpty(t, ue.Reason)
		require.NoError(t, first.Launch(b.s), "it is as it was")
		b.want(10, w)
		require.NoError(t, first.Update(first))
	})
}

// That holds across the streams of the graph too: what one stream does first
// comes behind what another one did last in the launch before.
func TestLaunchesFollowOnAllStreams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		side, other := newStream(t, devs[0]), newStream(t, devs[0])
		v, w := b.make(0), b.make(0)
		x := capture(t, func() error {
			return errors.Join(memory.Copy(side, w, v), b.s.WaitStream(side), b.launch(b.add, b.s, v, 1))
		}, b.s, side)
		for range 10 {
			require.NoError(t, errors.Join(x.Launch(b.s), x.Launch(other)))
		}
		require.NoError(t, b.s.WaitStream(other))
		b.want(20, v)
		b.want(19, w)
	})
}

func TestDot(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(0)
		x := capture(t, func() error { return errors.Join(b.launch(b.add, b.s, v, 1), b.launch(b.scale, b.s, v, 1)) }, b.s)
		var text strings.Builder
		require.NoError(t, x.Dot(&text))
		require.Contains(t, text.String(), "digraph")
		require.Contains(t, text.String(), "add")
		require.Contains(t, text.String(), "->")
	})
}

func TestUseAfterClose(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(0)
		x := capture(t, func() error { return b.launch(b.add, b.s, v, 1) }, b.s)
		y := capture(t, func() error { return b.launch(b.add, b.s, v, 1) }, b.s)
		require.NoError(t, x.Launch(b.s))
		require.NoError(t, x.Close(), "a launch that is under way completes")
		require.NoError(t, x.Close())
		require.ErrorIs(t, x.Launch(b.s), device.ErrClosed)
		require.ErrorIs(t, x.Upload(b.s), device.ErrClosed)
		require.ErrorIs(t, x.Update(y), device.ErrClosed)
		require.ErrorIs(t, y.Update(x), device.ErrClosed)
		require.ErrorIs(t, x.Dot(&strings.Builder{}), device.ErrClosed)
		require.NoError(t, (*graph.Exec)(nil).Close())
		require.ErrorContains(t, (*graph.Exec)(nil).Launch(b.s), "no graph given")
		require.ErrorContains(t, y.Launch(nil), "no stream given")
		b.want(1, v)
	})
}

// An empty graph is launched like any other.
func TestEmpty(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		x := capture(t, func() error { return nil }, b.s, newStream(t, devs[0]))
		require.Zero(t, x.Nodes())
		require.NoError(t, x.Launch(b.s))
		require.NoError(t, b.s.Sync(testgpu.Context(t)))
	})
}

func TestLaunchAllocatesNothing(t *testing.T) {
	b := newBench(t, testgpu.CUDA(t, 1)[0])
	v := b.make(0)
	x := capture(t, func() error { return b.launch(b.add, b.s, v, 1) }, b.s)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := x.Launch(b.s); err != nil {
			t.Fatal(err)
		}
	}))
	require.NoError(t, b.s.Sync(testgpu.Context(t)))
}
