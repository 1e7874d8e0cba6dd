package graph_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A callable warms up, leaves its result there, and then works on what each call
// brings.
func TestCallable(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		in, out, fresh := b.make(1), b.make(0), b.make(5)
		require.NoError(t, b.launch(b.add, b.s, in, -1)) // comes before
		require.NoError(t, b.launch(b.add, b.s, in, 1))
		calls := 0
		c, err := graph.NewCallable(b.s, []memory.Slice[float32]{in}, func(s *stream.Stream) error {
			calls++
			return errors.Join(memory.Copy(s, out, in), b.launch(b.add, s, out, 10))
		}, nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, c.Close()) }()
		require.Equal(t, 4, calls, "three to warm up, one to capture")
		b.want(11, out)
		require.Equal(t, 2, c.Exec().Nodes())
		require.NoError(t, c.Call(b.s, fresh))
		b.want(15, out)
		b.want(5, in)
		b.fill(in, 7)
		require.NoError(t, c.Call(b.s, in), "the input itself needs no copy")
		b.want(17, out)
		require.ErrorContains(t, c.Call(b.s), "0 inputs: want 1")
		require.ErrorContains(t, c.Call(b.s, in.Slice(0, 3)), "input 0 has 3 elements: want 1000")
		require.NoError(t, c.Close())
		require.ErrorIs(t, c.Call(b.s, in), device.ErrClosed)
		require.NoError(t, (*graph.Callable[float32])(nil).Close())
	})
}

func TestCallableFails(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		for _, warmup := range []int{0, 2, -1} {
			calls, last := 0, map[int]int{0: 4, 2: 3, -1: 1}[warmup]
			boom := errors.New("boom")
			_, err := graph.NewCallable(b.s, []memory.Slice[float32]{v}, func(s *stream.Stream) error {
				if calls++; calls == last {
					return boom
				}
				return b.launch(b.add, s, v, 1)
			}, &graph.CallableConfig{Warmup: warmup})
			require.ErrorIs(t, err, boom)
			require.Equal(t, last, calls)
			usable(b, v)
		}
	})
}

// The first matrix product of a stream can be captured, and so can later ones. The graph
// owns their workspace, so that it outlives the stream.
func TestCapturedMatMul(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		for _, first := range []bool{true, false} {
			testCapturedMatMul(t, devs[0], first)
		}
	})
}

func testCapturedMatMul(t *testing.T, dev *device.Device, first bool) {
	s, captured := newStream(t, dev), must(stream.New(dev, nil))(t)
	const n = 64
	in := make([]memory.BFloat16Bits, n*n)
	x, err := memory.Make[memory.BFloat16Bits](s, 3*n*n)
	require.NoError(t, err)
	defer func() { require.NoError(t, x.Close()) }()
	part := func(i int) memory.Slice[memory.BFloat16Bits] { return x.Slice(i*n*n, (i+1)*n*n) }
	var m [3]tensor.Tensor
	for i := range m {
		m[i], err = tensor.Of(part(i), n, n)
		require.NoError(t, err)
	}
	require.NoError(t, x.Zero(s))
	require.NoError(t, captured.WaitStream(s))
	product := func() error { return tensor.MatMul(captured, m[2], m[0], m[1], nil) }
	if !first {
		require.NoError(t, product())
	}
	g := capture(t, product, captured)
	require.NoError(t, s.WaitStream(captured))
	require.NoError(t, captured.Close())
	for round := range 3 {
		for i := range in {
			in[i] = memory.BFloat16Of(float32(i%7 + round))
		}
		require.NoError(t, part(0).CopyFrom(s, in))
		for i := range in { // twice the identity
			in[i] = memory.BFloat16Of(0)
			if i/n == i%n {
				in[i] = memory.BFloat16Of(2)
			}
		}
		require.NoError(t, part(1).CopyFrom(s, in))
		require.NoError(t, g.Launch(s))
		require.NoError(t, part(2).CopyTo(s, in))
		for i := range in {
			require.Equal(t, float32(2*(i%7+round)), in[i].Float32())
		}
	}
}

// must returns the value of a call that cannot fail.
func must[T any](v T, err error) func(t *testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		require.NoError(t, err)
		return v
	}
}

// What is wrong is found before anything is enqueued, and a function that panics
// leaves nothing open.
func TestCallableArguments(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		in, fresh := b.make(1), b.make(2)
		_, err := graph.NewCallable(b.s, []memory.Slice[float32]{in}, nil, nil)
		require.ErrorContains(t, err, "graph: new callable: no function given")
		for _, warmup := range []int{1, -1} { // in the warm-up, in the capture
			require.PanicsWithValue(t, "boom", func() {
				_, _ = graph.NewCallable[float32](b.s, nil, func(*stream.Stream) error { panic("boom") },
					&graph.CallableConfig{Warmup: warmup})
			})
		}
		c, err := graph.NewCallable(b.s, []memory.Slice[float32]{in}, func(s *stream.Stream) error { return b.launch(b.add, s, in, 1) }, nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, c.Close()) }()
		x := capture(t, func() error {
			var ce *device.CaptureError
			require.ErrorAs(t, c.Call(b.s, fresh), &ce)
			return nil
		}, b.s)
		require.Zero(t, x.Nodes(), "no copy was captured")
	})
}
