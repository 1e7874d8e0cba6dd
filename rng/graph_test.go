package rng_test

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// A drawer fills its memory by three distributions in turn.
type drawer struct {
	s *stream.Stream
	u memory.Slice[float32]
	n memory.Slice[float64]
	r memory.Slice[int64]
}

func newDrawer(t *testing.T, s *stream.Stream) *drawer {
	t.Helper()
	d := &drawer{s: s}
	var err [3]error
	d.u, err[0] = memory.Make[float32](s, 3000)
	d.n, err[1] = memory.Make[float64](s, 1001)
	d.r, err[2] = memory.Make[int64](s, 70000)
	require.NoError(t, errors.Join(err[:]...))
	t.Cleanup(func() { require.NoError(t, errors.Join(d.u.Close(), d.n.Close(), d.r.Close())) })
	return d
}

func (d *drawer) draw(g *rng.Generator) error {
	return errors.Join(rng.Uniform(g, d.s, d.u, 0, 1), rng.Normal(g, d.s, d.n, 0, 1), rng.Random(g, d.s, d.r))
}

// drawn clears the memory, lets fill write it, and returns it.
func (d *drawer) drawn(t *testing.T, fill func() error) []byte {
	t.Helper()
	require.NoError(t, errors.Join(d.u.Zero(d.s), d.n.Zero(d.s), d.r.Zero(d.s), fill()))
	return d.read(t)
}

func (d *drawer) read(t *testing.T) []byte {
	t.Helper()
	u, n, r := make([]float32, d.u.Len()), make([]float64, d.n.Len()), make([]int64, d.r.Len())
	require.NoError(t, errors.Join(d.u.CopyTo(d.s, u), d.n.CopyTo(d.s, n), d.r.CopyTo(d.s, r)))
	return append(append(append([]byte(nil), bytesOf(u)...), bytesOf(n)...), bytesOf(r)...)
}

func capture(t *testing.T, fn func() error, streams ...*stream.Stream) *graph.Exec {
	t.Helper()
	x, err := graph.Capture(streams, fn, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// Launches and fills in turn draw what the fills alone would
// (test_graph_rng_functional).
func TestGraphDrawsAsFills(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := newDrawer(t, newStream(t, devs[0]))
		plain, g := rng.New(devs[0], 5), rng.New(devs[0], 5)
		fill := func() error { return d.draw(g) }
		require.NoError(t, d.draw(rng.New(devs[0], 1))) // loads the kernels
		x := capture(t, fill, d.s)
		require.Equal(t, state(plain), state(g), "the capture itself draws nothing")
		require.Equal(t, d.drawn(t, func() error { return d.draw(plain) }), d.drawn(t, fill))
		for i := range 3 {
			want := d.drawn(t, func() error { return d.draw(plain) })
			require.Equal(t, want, d.drawn(t, func() error { return x.Launch(d.s) }), "launch %d", i)
			require.Equal(t, state(plain), state(g), "launch %d", i)
			require.Equal(t, d.drawn(t, func() error { return d.draw(plain) }), d.drawn(t, fill))
		}
		// The seed and the offset are those of the launch.
		g.ManualSeed(77)
		plain.ManualSeed(77)
		want := d.drawn(t, func() error { return d.draw(plain) })
		require.Equal(t, want, d.drawn(t, func() error { return x.Launch(d.s) }))
		require.NoError(t, g.SetOffset(0))
		require.Equal(t, want, d.drawn(t, func() error { return x.Launch(d.s) }))
		s := rng.New(devs[0], 77).State()
		require.NoError(t, g.SetState(s[:]))
		require.Equal(t, want, d.drawn(t, func() error { return x.Launch(d.s) }))
	})
}

// Launches on streams that nothing else orders have a place each
// (test_graph_concurrent_replay).
func TestGraphLaunchesOnTwoStreams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, other := newStream(t, devs[0]), newStream(t, devs[0])
		const rounds, n = 40, 512
		all, err := memory.Make[float32](s, rounds*n)
		require.NoError(t, err)
		defer all.Close()
		at, err := memory.Make[float32](s, n)
		require.NoError(t, err)
		defer at.Close()
		g := rng.New(devs[0], 9)
		require.NoError(t, rng.Uniform(g, s, at, 0, 1)) // loads the kernel
		g.ManualSeed(9)
		x := capture(t, func() error { return rng.Uniform(g, s, at, 0, 1) }, s)
		streams := []*stream.Stream{s, other}
		require.NoError(t, other.WaitStream(s))
		for i := range rounds {
			on := streams[i%2]
			require.NoError(t, x.Launch(on))
			require.NoError(t, memory.Copy(on, all.Slice(i*n, i*n+n), at))
			require.NoError(t, streams[(i+1)%2].WaitStream(on))
		}
		got := make([]float32, rounds*n)
		require.NoError(t, all.CopyTo(s, got))
		require.NoError(t, other.Sync(context.Background()))
		want := rng.New(devs[0], 9)
		for i := range rounds {
			require.Equal(t, fetch(t, s, n, func(x memory.Slice[float32]) error { return rng.Uniform(want, s, x, 0, 1) }), got[i*n:i*n+n], "launch %d", i)
		}
	})
}

// Nothing but the graph orders its launches, on streams that know nothing of each
// other: none may write its place while the one before still reads.
func TestGraphLaunchesAreOrdered(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		streams := []*stream.Stream{newStream(t, devs[0]), newStream(t, devs[0]), newStream(t, devs[0])}
		d := newDrawer(t, streams[0])
		g, plain := rng.New(devs[0], 9), rng.New(devs[0], 9)
		require.NoError(t, d.draw(g)) // loads the kernels
		x := capture(t, func() error { return d.draw(g) }, d.s)
		g.ManualSeed(9)
		require.NoError(t, d.s.Sync(context.Background()))
		for i := range 40 {
			require.NoError(t, x.Launch(streams[i%3]))
		}
		for _, s := range streams {
			require.NoError(t, s.Sync(context.Background()))
		}
		last := d.read(t)
		for range 39 {
			require.NoError(t, d.draw(plain))
		}
		require.Equal(t, d.drawn(t, func() error { return d.draw(plain) }), last)
		require.Equal(t, state(plain), state(g))
	})
}

// Several generators in several graphs, on several devices
// (test_memory_stats_of_multiple_generators_and_graphs).
func TestGraphsWithSeveralGenerators(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		a, b := newDrawer(t, newStream(t, devs[0])), newDrawer(t, newStream(t, devs[1]))
		gens := []*rng.Generator{rng.New(devs[0], 1), rng.New(devs[1], 2)}
		require.NoError(t, errors.Join(a.draw(gens[0]), b.draw(gens[1])))
		require.NoError(t, errors.Join(a.s.Sync(context.Background()), b.s.Sync(context.Background())))
		both := func() error { return errors.Join(a.draw(gens[0]), b.draw(gens[1])) }
		var graphs []*graph.Exec
		for range 3 {
			graphs = append(graphs, capture(t, both, a.s, b.s))
		}
		gens[0].ManualSeed(1)
		gens[1].ManualSeed(2)
		plain := []*rng.Generator{rng.New(devs[0], 1), rng.New(devs[1], 2)}
		for i, x := range graphs {
			wantA := a.drawn(t, func() error { return a.draw(plain[0]) })
			wantB := b.drawn(t, func() error { return b.draw(plain[1]) })
			// The stream is of another device than the second generator.
			gotB := b.drawn(t, func() error {
				return errors.Join(a.s.WaitStream(b.s), x.Launch(a.s), b.s.WaitStream(a.s))
			})
			require.Equal(t, wantA, a.read(t), "graph %d", i)
			require.Equal(t, wantB, gotB, "graph %d", i)
			require.Equal(t, state(plain[0]), state(gens[0]))
			require.Equal(t, state(plain[1]), state(gens[1]))
		}
	})
}

// An update takes the other graph's draws over.
func TestGraphUpdateDraws(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := newDrawer(t, newStream(t, devs[0]))
		g, h := rng.New(devs[0], 3), rng.New(devs[0], 4)
		require.NoError(t, d.draw(rng.New(devs[0], 1)))
		x := capture(t, func() error { return d.draw(g) }, d.s)
		y, err := graph.Capture([]*stream.Stream{d.s}, func() error { return d.draw(h) }, nil)
		require.NoError(t, err)
		require.NoError(t, x.Update(y))
		require.NoError(t, y.Close())
		require.Equal(t, 1, rng.Captures(h), "the place of a launch is still in use")
		want := d.drawn(t, func() error { return d.draw(rng.New(devs[0], 4)) })
		require.Equal(t, want, d.drawn(t, func() error { return x.Launch(d.s) }))
		require.Zero(t, g.Offset(), "it draws no more")
		require.NotZero(t, h.Offset())
	})
}

// A capture that fails draws nothing and leaves nothing behind.
func TestFailedCaptureDrawsNothing(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := newDrawer(t, newStream(t, devs[0]))
		g := rng.New(devs[0], 3)
		require.NoError(t, d.draw(g))
		before := state(g)
		boom := errors.New("boom")
		pool := memory.NewPool(nil)
		_, err := graph.Capture([]*stream.Stream{d.s}, func() error { return errors.Join(d.draw(g), boom) }, &graph.Config{Pool: pool})
		require.ErrorIs(t, err, boom)
		require.Equal(t, before, state(g))
		require.Zero(t, pool.Allocated())
		require.Zero(t, rng.Captures(g))
		x, err := graph.Capture([]*stream.Stream{d.s}, func() error { return d.draw(g) }, &graph.Config{Pool: pool})
		require.NoError(t, err)
		require.Equal(t, 1, rng.Captures(g))
		require.NoError(t, x.Close())
		require.Zero(t, rng.Captures(g))
		require.NoError(t, pool.Close())
	})
}

// Fills and other calls on a generator in a capture that an illegal call has invalidated
// change neither the generator nor the memory, and leave nothing behind.
func TestInvalidatedCaptureDrawsNothing(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := newDrawer(t, newStream(t, devs[0]))
		for _, drawn := range []bool{false, true} { // before the capture is invalidated
			g := rng.New(devs[0], 3)
			require.NoError(t, d.draw(g))
			before, contents := state(g), d.read(t)
			e, err := d.s.Record(nil)
			require.NoError(t, err)
			_, err = graph.Capture([]*stream.Stream{d.s}, func() error {
				if drawn {
					require.NoError(t, d.draw(g))
				}
				require.Error(t, d.s.Wait(e))
				for _, err := range []error{rng.Uniform(g, d.s, d.u, 0, 1), rng.Normal(g, d.s, d.n, 0, 1), rng.Random(g, d.s, d.r)} {
					require.ErrorIs(t, err, graph.ErrorInvalidated)
				}
				g.ManualSeed(8)
				return nil
			}, nil)
			require.ErrorIs(t, err, graph.ErrorInvalidated)
			require.Equal(t, before, state(g))
			require.Equal(t, contents, d.read(t))
			require.Zero(t, rng.Captures(g))
			require.NoError(t, e.Close())
		}
	})
}

// An update takes what the other graph captured, whatever that one was updated
// to since.
func TestGraphUpdateOfAnUpdated(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := newDrawer(t, newStream(t, devs[0]))
		require.NoError(t, d.draw(rng.New(devs[0], 1)))
		var graphs [3]*graph.Exec
		var gens [3]*rng.Generator
		for i := range graphs {
			gens[i] = rng.New(devs[0], uint64(i))
			graphs[i] = capture(t, func() error { return d.draw(gens[i]) }, d.s)
		}
		require.NoError(t, graphs[0].Update(graphs[1]))
		require.NoError(t, graphs[2].Update(graphs[0]))
		for graph, seed := range map[int]uint64{0: 1, 1: 1, 2: 0} {
			gens[0].ManualSeed(0)
			gens[1].ManualSeed(1)
			want := d.drawn(t, func() error { return d.draw(rng.New(devs[0], seed)) })
			require.Equal(t, want, d.drawn(t, func() error { return graphs[graph].Launch(d.s) }), "graph %d", graph)
		}
		require.Zero(t, gens[2].Offset())
	})
}

// A launch waits for the one before. Where that was on a stream that is captured
// by now, the launch is refused, and neither stream is harmed.
func TestGraphLaunchWhileItsStreamIsCaptured(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d, other := newDrawer(t, newStream(t, devs[0])), newStream(t, devs[0])
		g := rng.New(devs[0], 7)
		require.NoError(t, d.draw(g))
		x := capture(t, func() error { return d.draw(g) }, d.s)
		require.NoError(t, x.Launch(d.s))
		before := state(g)
		zero, err := memory.Make[float32](d.s, 4)
		require.NoError(t, err)
		defer func() { require.NoError(t, zero.Close()) }()
		y := capture(t, func() error {
			var ce *device.CaptureError
			require.ErrorAs(t, x.Launch(other), &ce)
			require.Contains(t, ce.Error(), d.s.String())
			return zero.Zero(d.s)
		}, d.s)
		require.Equal(t, 1, y.Nodes())
		require.Equal(t, before, state(g), "nothing was drawn")
		require.NoError(t, x.Launch(other))
		require.NoError(t, other.Sync(testgpu.Context(t)))
	})
}

// A kernel that nobody has used yet is loaded within the capture, in every mode.
func TestFirstUseInCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		g, plain := rng.New(devs[0], 6), rng.New(devs[0], 6)
		x, err := memory.Make[int16](s, 5000)
		require.NoError(t, err)
		defer x.Close()
		fills := map[graph.Mode]func(*rng.Generator) error{
			graph.ThreadLocal: func(g *rng.Generator) error { return rng.Geometric(g, s, x, 0.3) },
			graph.Global:      func(g *rng.Generator) error { return rng.RandomFromTo(g, s, x, -5, 300) },
			graph.Relaxed:     func(g *rng.Generator) error { return rng.Bernoulli(g, s, x, 0.3) },
		}
		for mode, fill := range fills {
			exec, err := graph.Capture([]*stream.Stream{s}, func() error { return fill(g) }, &graph.Config{Mode: mode})
			require.NoError(t, err, mode)
			got, want := make([]int16, x.Len()), make([]int16, x.Len())
			require.NoError(t, errors.Join(x.Zero(s), exec.Launch(s), x.CopyTo(s, got), x.Zero(s), fill(plain), x.CopyTo(s, want)))
			require.Equal(t, want, got, mode)
			require.NoError(t, exec.Close())
		}
	})
}

// Launches on streams that are being closed draw or meet device.ErrClosed, and the
// launches after them wait for them (the stream of a launch is held until then).
func TestLaunchWhileTheStreamCloses(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	d, g := newDrawer(t, newStream(t, devs[0])), rng.New(devs[0], 5)
	x := capture(t, func() error { return rng.Uniform(g, d.s, d.u, 0, 1) }, d.s)
	for range 5 {
		o, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		launched := make(chan error, 1)
		began := make(chan struct{})
		go func() {
			err := x.Launch(o)
			close(began)
			for err == nil {
				err = x.Launch(o)
			}
			launched <- err
		}()
		<-began
		require.NoError(t, o.Close())
		require.ErrorIs(t, <-launched, device.ErrClosed)
		require.NoError(t, x.Launch(d.s))
		require.NoError(t, d.s.Sync(testgpu.Context(t)))
	}
}

// The place of a launch is memory that no other operation of the graph writes, such as
// those on memory that the captured function has closed before its first fill.
func TestGraphPlaceIsApart(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := newDrawer(t, newStream(t, devs[0]))
		g, plain := rng.New(devs[0], 12), rng.New(devs[0], 12)
		x := capture(t, func() error {
			for range 3 { // blocks of the sizes that a place may have
				x, err := memory.Make[uint64](d.s, 2)
				if err != nil {
					return err
				}
				if err := errors.Join(x.Zero(d.s), x.Close()); err != nil {
					return err
				}
			}
			return d.draw(g)
		}, d.s)
		for i := range 3 {
			want := d.drawn(t, func() error { return d.draw(plain) })
			require.Equal(t, want, d.drawn(t, func() error { return x.Launch(d.s) }), "launch %d", i)
		}
	})
}

// A graph that is closed while its launch is under way keeps its place until the launch has
// ended: the next graph gets another one. That holds although the stream of the launch is
// closed by then, or captured.
func TestGraphPlaceAfterClose(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		for name, end := range map[string]func(s *stream.Stream, x *graph.Exec) error{
			"open":   func(s *stream.Stream, x *graph.Exec) error { return x.Close() },
			"closed": func(s *stream.Stream, x *graph.Exec) error { return errors.Join(s.Close(), x.Close()) },
			"captured": func(s *stream.Stream, x *graph.Exec) error {
				y, err := graph.Capture([]*stream.Stream{s}, x.Close, nil)
				return errors.Join(err, y.Close())
			},
		} {
			t.Run(name, func(t *testing.T) { placeAfterClose(t, devs[0], end) })
		}
	})
}

func placeAfterClose(t *testing.T, dev *device.Device, end func(*stream.Stream, *graph.Exec) error) {
	ctx := testgpu.Context(t)
	d, other := newDrawer(t, newStream(t, dev)), newStream(t, dev)
	z, err := memory.Make[float32](other, 3000)
	require.NoError(t, err)
	require.NoError(t, errors.Join(rng.Uniform(rng.New(dev, 0), other, z, 0, 1), d.draw(rng.New(dev, 0)))) // loads the kernels
	require.NoError(t, errors.Join(d.s.Sync(ctx), other.Sync(ctx)))
	before, err := memory.Allocated(dev)
	require.NoError(t, err)

	s, err := stream.New(dev, nil)
	require.NoError(t, err)
	x, err := graph.Capture([]*stream.Stream{d.s}, func() error { return d.draw(rng.New(dev, 1)) }, nil)
	require.NoError(t, err)
	open := streamtest.Hold(t, s)
	require.NoError(t, x.Launch(s))
	mark, err := s.Record(nil)
	require.NoError(t, err)
	require.NoError(t, end(s, x))
	y, err := graph.Capture([]*stream.Stream{other}, func() error { return rng.Uniform(rng.New(dev, 2), other, z, 0, 1) }, nil)
	require.NoError(t, err)
	require.NoError(t, y.Launch(other))
	if gpu.StreamOf(s).Open() { // else it has to wait
		require.NoError(t, other.Sync(ctx))
	}
	open()
	require.NoError(t, errors.Join(mark.Sync(ctx), mark.Close(), other.Sync(ctx)))
	got := d.read(t)
	require.Equal(t, d.drawn(t, func() error { return d.draw(rng.New(dev, 1)) }), got)

	require.NoError(t, errors.Join(y.Close(), s.Close()))
	after, err := memory.Allocated(dev)
	require.NoError(t, err)
	require.Equal(t, before, after)
	require.NoError(t, z.Close())
}

// A closed System has returned the memory with the places of launches to the driver.
func TestGraphPlacesAreFreed(t *testing.T) {
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "virtual", VirtualDevices: 1})
	require.NoError(t, err)
	s, err := stream.New(sys.Devices()[0], nil)
	require.NoError(t, err)
	g := rng.New(s.Device(), 7)
	x, err := memory.Make[float32](s, 100)
	require.NoError(t, err)
	fill := capture(t, func() error { return rng.Uniform(g, s, x, 0, 1) }, s)
	require.NoError(t, fill.Launch(s))
	require.NoError(t, s.Sync(context.Background()))
	pool := rng.PlacesPool(s.Device())
	require.Positive(t, pool.Reserved())
	require.NoError(t, errors.Join(fill.Close(), x.Close(), s.Close()))
	require.Positive(t, pool.Reserved(), "the memory is cached for the next graph")
	require.NoError(t, sys.Close())
	require.Zero(t, pool.Reserved())
}
