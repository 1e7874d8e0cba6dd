package stream_test

import (
	"context"
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

func newStream(t *testing.T, d *device.Device) *stream.Stream {
	t.Helper()
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// An event carries the order from one stream to another: the second stream sees
// what the first one wrote, on every one of many rounds.
func TestEventOrdersTwoStreams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		a, b := newStream(t, devs[0]), newStream(t, devs[0])
		ready, err := stream.NewEvent(devs[0], nil)
		require.NoError(t, err)
		defer ready.Close()
		const n = 1 << 16
		x, err := memory.Make[int32](a, n)
		require.NoError(t, err)
		defer x.Close()
		require.NoError(t, x.RecordStream(b))
		in, out := make([]int32, n), make([]int32, n)
		for round := range int32(20) {
			for i := range in {
				in[i] = round*7 + int32(i)
			}
			require.NoError(t, x.CopyFrom(a, in))
			require.NoError(t, ready.Record(a))
			require.NoError(t, b.Wait(ready))
			require.NoError(t, x.CopyTo(b, out))
			require.Equal(t, in, out)
			require.NoError(t, a.WaitStream(b))
		}
	})
}

func TestSyncEndsWithContext(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		require.NoError(t, s.Sync(testgpu.Context(t)))
		done, err := s.Query()
		require.NoError(t, err)
		require.True(t, done)
	})
	t.Run("hang", func(t *testing.T) {
		sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "hang@cuMemsetD8Async#1"})
		d := sys.Devices()[0]
		s := newStream(t, d)
		x, err := memory.Make[uint8](s, 16)
		require.NoError(t, err)
		defer x.Close()
		require.NoError(t, x.Zero(s))
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
		defer cancel()
		err = s.Sync(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "gave up after")
		e, err := stream.NewEvent(d, nil)
		require.NoError(t, err)
		defer e.Close()
		require.NoError(t, e.Record(s))
		require.ErrorIs(t, e.Sync(ctx), context.DeadlineExceeded)
	})
}

func TestElapsed(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		var e [2]*stream.Event
		for i := range e {
			var err error
			e[i], err = stream.NewEvent(devs[0], &stream.EventConfig{Timing: true})
			require.NoError(t, err)
			defer e[i].Close()
		}
		x, err := memory.Make[uint8](s, 64<<20)
		require.NoError(t, err)
		defer x.Close()
		require.NoError(t, e[0].Record(s))
		for range 4 {
			require.NoError(t, x.Zero(s))
		}
		require.NoError(t, e[1].Record(s))
		require.NoError(t, e[1].Sync(testgpu.Context(t)))
		took, err := e[1].Elapsed(e[0])
		require.NoError(t, err)
		require.Positive(t, took)
	})
}

func TestUseAfterClose(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		e, err := stream.NewEvent(devs[0], nil)
		require.NoError(t, err)
		require.NoError(t, s.Close())
		require.NoError(t, s.Close(), "Close is idempotent")
		require.ErrorIs(t, e.Record(s), device.ErrClosed)
		require.ErrorIs(t, s.Sync(context.Background()), device.ErrClosed)
		require.ErrorIs(t, s.Wait(e), device.ErrClosed)
		require.NoError(t, e.Close())
		require.NoError(t, e.Close())
		_, err = e.Query()
		require.ErrorIs(t, err, device.ErrClosed)
		require.NoError(t, (*stream.Stream)(nil).Close())
		require.NoError(t, (*stream.Event)(nil).Close())
	})
}

func TestEventOfAnotherDevice(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s0, s1 := newStream(t, devs[0]), newStream(t, devs[1])
		e, err := stream.NewEvent(devs[1], nil)
		require.NoError(t, err)
		defer e.Close()
		require.ErrorContains(t, e.Record(s0), "use a stream of that device")
		require.NoError(t, e.Record(s1))
		require.NoError(t, s0.Wait(e), "a stream may wait for another device's event")
		require.NoError(t, s0.Sync(testgpu.Context(t)))
	})
}

// A buffer outlives the Close of its stream.
func TestStreamClosedBeforeItsMemory(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		x, err := memory.Make[float32](s, 1024)
		require.NoError(t, err)
		require.NoError(t, s.Close())
		require.NoError(t, x.Close())
	})
}

// What is kept for a stream is made once and closed with it.
func TestKeep(t *testing.T) {
	var key handle.Key
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		opened, closed := 0, 0
		keep := func(fail error) (any, error) {
			return gpu.StreamOf(s).Keep(&key, func() (any, func() error, error) {
				opened++
				return opened, func() error { closed++; return nil }, fail
			})
		}
		_, err = keep(context.Canceled)
		require.ErrorIs(t, err, context.Canceled)
		for range 2 {
			v, err := keep(nil)
			require.NoError(t, err)
			require.Equal(t, 2, v)
		}
		require.True(t, gpu.StreamOf(s).Retain())
		require.NoError(t, s.Close())
		require.Zero(t, closed, "it is in use")
		require.NoError(t, gpu.StreamOf(s).Release())
		require.Equal(t, 1, closed)
		_, err = keep(nil)
		require.ErrorIs(t, err, device.ErrClosed)
		require.False(t, gpu.StreamOf(s).Retain(), "it is gone")
		require.Equal(t, []int{2, 1}, []int{opened, closed}, "nothing is kept with what is gone")
	})
}

func TestCurrent(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	s := newStream(t, devs[0])
	ctx := stream.NewContext(context.Background(), s)
	require.Same(t, s, stream.Current(ctx, devs[0]))
	require.Same(t, stream.Default(devs[1]), stream.Current(ctx, devs[1]))
	require.Same(t, s, stream.Current(stream.NewContext(ctx, nil), devs[0]))
}

// Enqueueing costs no allocation on CUDA; virtual devices allocate below.
func TestEnqueueAllocatesNothing(t *testing.T) {
	devs := testgpu.CUDA(t, 1)
	s := newStream(t, devs[0])
	e, err := stream.NewEvent(devs[0], nil)
	require.NoError(t, err)
	defer e.Close()
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := e.Record(s); err != nil {
			t.Fatal(err)
		}
		if err := s.Wait(e); err != nil {
			t.Fatal(err)
		}
	}))
}

// Each priority of each device has 32 streams, given out in turn.
func TestPoolGoesRound(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		least, greatest, err := stream.PriorityRange(devs[0])
		require.NoError(t, err)
		require.Zero(t, least)
		require.Negative(t, greatest)
		all := map[*stream.Stream]bool{}
		for _, dev := range devs {
			for _, priority := range []int{0, greatest} {
				var round []*stream.Stream
				for range 32 {
					s, err := stream.FromPool(dev, priority)
					require.NoError(t, err)
					require.False(t, all[s], "no stream is given out twice in a round")
					all[s], round = true, append(round, s)
					got, err := s.Priority()
					require.NoError(t, err)
					require.Equal(t, priority, got)
					require.NoError(t, s.Close(), "it stays open for the others")
				}
				for i := range 32 {
					s, err := stream.FromPool(dev, priority)
					require.NoError(t, err)
					require.True(t, s.Equal(round[i]) && s == round[i])
					require.NoError(t, s.Sync(testgpu.Context(t)))
				}
			}
		}
		require.Len(t, all, 4*32)
	})
}

// Taking a stream from the pool costs no allocation once it is there.
func TestPoolAllocatesNothing(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	take := func() { must(stream.FromPool(dev, 0)) }
	for range 32 {
		take()
	}
	require.Zero(t, testgpu.Allocs(100, take))
	require.Zero(t, testgpu.Allocs(100, func() { stream.Default(dev) }))
}

func TestPriorities(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		_, greatest, err := stream.PriorityRange(devs[0])
		require.NoError(t, err)
		for _, asked := range []int{greatest - 1, math.MinInt} {
			s, err := stream.FromPool(devs[0], asked)
			require.NoError(t, err)
			got, err := s.Priority()
			require.NoError(t, err)
			require.Equal(t, greatest, got)
			own, err := stream.New(devs[0], &stream.Config{Priority: asked})
			require.NoError(t, err)
			got, err = own.Priority()
			require.NoError(t, err)
			require.Equal(t, greatest, got)
			require.NoError(t, own.Close())
		}
		_, err = stream.FromPool(devs[0], 1)
		require.ErrorIs(t, err, device.ErrorInvalidValue)
		require.ErrorContains(t, err, "priority 1: want 0, or less")
		_, err = stream.New(devs[0], &stream.Config{Priority: 1})
		require.ErrorIs(t, err, device.ErrorInvalidValue)
		_, err = stream.FromPool(nil, 0)
		require.ErrorContains(t, err, "no device given")
		_, _, err = stream.PriorityRange(nil)
		require.ErrorContains(t, err, "no device given")
	})
}

// The default stream orders work as others do, and is nobody's to end.
func TestDefault(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := stream.Default(devs[0])
		require.Same(t, s, stream.Default(devs[0]))
		require.Zero(t, s.Handle())
		require.Contains(t, s.String(), "the default stream on ")
		x, err := memory.MakeFrom(s, []int32{1, 2, 3})
		require.NoError(t, err)
		side := newStream(t, devs[0])
		require.NoError(t, side.WaitStream(s))
		require.NoError(t, x.RecordStream(side))
		out := make([]int32, 3)
		require.NoError(t, x.CopyTo(side, out))
		require.Equal(t, []int32{1, 2, 3}, out)
		require.NoError(t, s.WaitStream(side))
		require.NoError(t, x.Close())
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.ErrorContains(t, s.Close(), "cannot be closed")
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.Nil(t, stream.Default(nil))
	})
}

func TestDefaultTakesPartInNoCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		def, s := stream.Default(devs[0]), newStream(t, devs[0])
		_, err := graph.Capture([]*stream.Stream{def}, func() error { return nil }, nil)
		require.ErrorIs(t, err, graph.ErrorUnsupported)
		require.ErrorContains(t, err, "take one of New or FromPool")
		e, err := stream.NewEvent(devs[0], nil)
		require.NoError(t, err)
		defer e.Close()
		x, err := graph.Capture([]*stream.Stream{s}, func() error {
			var ce *device.CaptureError
			require.ErrorAs(t, def.WaitStream(s), &ce)
			require.NoError(t, e.Record(s))
			require.ErrorAs(t, def.Wait(e), &ce)
			require.ErrorContains(t, ce, "let another stream wait")
			return nil
		}, nil)
		require.NoError(t, err, "the capture is still good")
		require.NoError(t, x.Launch(def))
		require.NoError(t, def.Sync(testgpu.Context(t)))
		require.NoError(t, x.Close())
	})
}

// A wrapped stream is the same queue, and outlives its wrapper.
func TestExternal(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		w, err := stream.External(devs[0], s.Handle())
		require.NoError(t, err)
		require.True(t, w.Equal(s))
		require.Equal(t, s.Handle(), w.Handle())
		x, err := memory.MakeFrom(s, []int32{4, 5})
		require.NoError(t, err)
		out := make([]int32, 2)
		require.NoError(t, x.CopyTo(w, out), "no event is needed between them")
		require.Equal(t, []int32{4, 5}, out)
		require.NoError(t, w.Close())
		require.NoError(t, w.Close())
		require.ErrorIs(t, w.Sync(testgpu.Context(t)), device.ErrClosed)
		require.NoError(t, x.Close())
		require.NoError(t, s.Sync(testgpu.Context(t)))

		for _, h := range []uintptr{0, 1} {
			d, err := stream.External(devs[0], h)
			require.NoError(t, err)
			require.Same(t, stream.Default(devs[0]), d)
		}
		_, err = stream.External(devs[0], 2)
		require.ErrorContains(t, err, "CU_STREAM_PER_THREAD")
		_, err = stream.External(nil, s.Handle())
		require.ErrorContains(t, err, "no device given")
	})
}

func TestExternalOfAnotherDevice(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[1])
		_, err := stream.External(devs[0], s.Handle())
		require.ErrorContains(t, err, "is it a stream of another device?")
		require.ErrorIs(t, err, device.ErrorInvalidContext)
	})
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	_, err := stream.External(devs[0], 0xdead0)
	require.ErrorIs(t, err, device.ErrorInvalidHandle, "virtual devices know what is no stream")
}

// Handles of one system mean something else in another.
func TestTwoSystems(t *testing.T) {
	a := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	b := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	s, o := newStream(t, a[0]), newStream(t, b[0])
	require.ErrorContains(t, s.WaitStream(o), "belongs to another system")
	e, err := o.Record(nil)
	require.NoError(t, err)
	defer e.Close()
	require.ErrorContains(t, s.Wait(e), "belongs to another system")
	require.ErrorContains(t, e.Record(s), "belongs to another system")
	x, err := memory.Make[int32](o, 10)
	require.NoError(t, err)
	defer x.Close()
	require.ErrorContains(t, x.Zero(s), "belongs to another system")
}

// A system that is closed has no streams any more.
func TestPoolAfterSystemClose(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
	dev := sys.Devices()[0]
	var all []*stream.Stream
	for range 32 { // each one of the pool
		all = append(all, must(stream.FromPool(dev, 0)))
	}
	for _, s := range append(all, stream.Default(dev)) {
		require.NoError(t, s.Sync(testgpu.Context(t)))
		x, err := memory.Make[int32](s, 10)
		require.NoError(t, err)
		require.NoError(t, x.Close())
		require.NoError(t, s.Sync(testgpu.Context(t)))
	}
	require.NoError(t, sys.Close())
	_, err := stream.FromPool(dev, 0)
	require.ErrorIs(t, err, device.ErrClosed)
	for _, s := range append(all, stream.Default(dev)) {
		_, err := memory.Make[int32](s, 10)
		require.ErrorIs(t, err, device.ErrClosed)
		require.ErrorIs(t, s.Sync(testgpu.Context(t)), device.ErrClosed)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
