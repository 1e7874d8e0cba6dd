package stream_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
)

// The tests of this file have the names of those of torch whose meaning they
// keep (test_cuda.py and test_cuda_multigpu.py). Tests of order let one side
// come late by a spin; without the order, the other would see old data.

// late is how long a spin lets something come late.
const late = 50 * time.Millisecond

// busy returns a stream that is held until open is called, and then spins.
func busy(t *testing.T, dev *device.Device) (s *stream.Stream, open func()) {
	t.Helper()
	p, s := streamtest.NewSpinner(t, dev), newStream(t, dev)
	t.Cleanup(func() { require.NoError(t, s.Sync(context.Background())) })
	open = streamtest.Hold(t, s)
	p.On(s, late)
	return s, open
}

func synced(t *testing.T, s *stream.Stream) bool {
	t.Helper()
	done, err := s.Query()
	require.NoError(t, err)
	return done
}

func passed(t *testing.T, e *stream.Event) bool {
	t.Helper()
	done, err := e.Query()
	require.NoError(t, err)
	return done
}

func timedEvent(t *testing.T, dev *device.Device) *stream.Event {
	t.Helper()
	e, err := stream.NewEvent(dev, &stream.EventConfig{Timing: true})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, e.Close()) })
	return e
}

func TestTorch_test_cuda_synchronize(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, dev := range devs {
			s, open := busy(t, dev)
			p := stream.Default(dev)
			open()
			require.NoError(t, dev.Sync(testgpu.Context(t)))
			require.True(t, synced(t, s))
			require.True(t, synced(t, p))
		}
	})
}

// A copy waits for the work before it on either device, and work after it on
// either waits for the copy.
func TestTorch_test_copy_streams(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, to := range devs {
			a, b := newStream(t, devs[0]), newStream(t, to)
			p := streamtest.NewSpinner(t, devs[0])
			x, err := memory.MakeFrom(a, []int32{0, 0, 0})
			require.NoError(t, err)
			y, err := memory.Make[int32](b, 3)
			require.NoError(t, err)
			if to == devs[0] {
				require.NoError(t, x.RecordStream(b))
			}
			in := must(memory.MakePinned[int32](devs[0], 3))
			copy(in.Data(), []int32{7, 8, 9})
			p.On(a, late)
			require.NoError(t, x.CopyFromPinned(a, in))
			require.NoError(t, b.WaitStream(a))
			require.NoError(t, memory.Copy(b, y, x))
			require.NoError(t, a.WaitStream(b))
			require.NoError(t, x.Zero(a))
			out := make([]int32, 3)
			require.NoError(t, y.CopyTo(b, out))
			require.Equal(t, []int32{7, 8, 9}, out)
			require.NoError(t, a.Sync(testgpu.Context(t)))
			require.NoError(t, x.Close())
			require.NoError(t, y.Close())
			require.NoError(t, in.Close())
		}
	})
}

func TestTorch_test_current_stream(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := context.Background()
		for _, dev := range devs {
			require.Same(t, stream.Default(dev), stream.Current(ctx, dev))
			require.Same(t, dev, stream.Current(ctx, dev).Device())
		}
		require.NotSame(t, stream.Current(ctx, devs[0]), stream.Current(ctx, devs[1]))
		require.False(t, stream.Current(ctx, devs[0]).Equal(stream.Current(ctx, devs[1])), "both have the handle 0")
	})
}

func TestTorch_test_default_stream(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := stream.NewContext(context.Background(), newStream(t, devs[1]))
		for _, dev := range devs {
			require.Same(t, dev, stream.Default(dev).Device())
		}
		require.Same(t, stream.Default(devs[0]), stream.Current(ctx, devs[0]))
		require.NotSame(t, stream.Default(devs[1]), stream.Current(ctx, devs[1]))
	})
}

func TestTorch_test_stream_context(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s0, s1, s2 := newStream(t, devs[1]), newStream(t, devs[0]), newStream(t, devs[1])
		outer := stream.NewContext(device.NewContext(context.Background(), devs[1]), s0)
		middle := stream.NewContext(outer, s1)
		inner := stream.NewContext(middle, s2)
		for _, c := range []struct {
			ctx         context.Context
			dev         *device.Device
			first, last *stream.Stream
		}{
			{outer, devs[1], stream.Default(devs[0]), s0},
			{middle, devs[0], s1, s0},
			{inner, devs[1], s1, s2},
			{middle, devs[0], s1, s0}, // as before
			{outer, devs[1], stream.Default(devs[0]), s0},
		} {
			require.Same(t, c.dev, device.Current(c.ctx))
			require.Same(t, c.first, stream.Current(c.ctx, devs[0]))
			require.Same(t, c.last, stream.Current(c.ctx, devs[1]))
		}
	})
}

func TestTorch_test_streams_multi_gpu_query(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s0 := newStream(t, devs[0])
		s1, open := busy(t, devs[1])
		require.True(t, synced(t, s0))
		require.False(t, synced(t, s1), "whatever device is current")
		open()
		require.NoError(t, s1.Sync(testgpu.Context(t)))
		require.True(t, synced(t, s1))
	})
}

func TestTorch_test_streams_multi_gpu_eq(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := context.Background()
		s0, s1 := stream.Current(ctx, devs[0]), stream.Current(ctx, devs[0])
		s2, s3 := stream.Current(ctx, devs[1]), stream.Default(devs[1])
		require.True(t, s0.Equal(s1) && s2.Equal(s3))
		require.False(t, s0.Equal(s2) || s1.Equal(s3) || s0.Equal(nil))
		require.Equal(t, s0.Handle(), s2.Handle())
	})
}

func TestTorch_test_streams_priority(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		least, greatest, err := stream.PriorityRange(devs[1])
		require.NoError(t, err)
		for _, priority := range []int{least, greatest} {
			s := must(stream.FromPool(devs[1], priority))
			require.Equal(t, priority, must(s.Priority()))
			require.Same(t, devs[1], s.Device())
		}
	})
}

func TestTorch_test_stream_event_device(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, dev := range devs {
			e, err := newStream(t, dev).Record(nil)
			require.NoError(t, err)
			require.Same(t, dev, e.Device())
			require.NoError(t, e.Close())
		}
	})
}

// A wait of a goroutine for one device keeps no other from waiting for another.
func TestTorch_test_stream_event_nogil(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for name, wait := range map[string]func(*stream.Stream) error{
			"stream": func(s *stream.Stream) error { return s.Sync(testgpu.Context(t)) },
			"event": func(s *stream.Stream) error {
				e, err := s.Record(&stream.EventConfig{Blocking: true})
				if err != nil {
					return err
				}
				defer e.Close()
				return e.Sync(testgpu.Context(t))
			},
		} {
			for i := range devs {
				held, open := busy(t, devs[i])
				done := make(chan error, 1)
				go func() { done <- wait(held) }()
				other, p := newStream(t, devs[1-i]), streamtest.NewSpinner(t, devs[1-i])
				p.On(other, late) // the wait for the other device has begun by then
				require.NoError(t, wait(other), name)
				require.Empty(t, done, name)
				open()
				require.NoError(t, <-done, name)
			}
		}
	})
}

func TestTorch_test_events_wait(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s0, open := busy(t, devs[0])
		s1 := newStream(t, devs[1])
		e0, err := s0.Record(nil)
		require.NoError(t, err)
		defer e0.Close()
		require.False(t, synced(t, s0))
		require.NoError(t, s1.Wait(e0))
		open()
		require.NoError(t, s1.Sync(testgpu.Context(t)))
		require.True(t, passed(t, e0))
		require.True(t, synced(t, s0))
		require.True(t, synced(t, s1))
	})
}

func TestTorch_test_events_multi_gpu_query(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s0 := newStream(t, devs[0])
		s1, open := busy(t, devs[1])
		e0 := timedEvent(t, devs[0])
		require.NoError(t, e0.Record(s0))
		require.NoError(t, s0.Sync(testgpu.Context(t)))
		e1 := timedEvent(t, devs[1])
		require.NoError(t, e1.Record(s1))
		require.True(t, passed(t, e0))
		require.False(t, passed(t, e1))
		open()
		require.NoError(t, e1.Sync(testgpu.Context(t)))
		require.True(t, passed(t, e1))
	})
}

func TestTorch_test_events_multi_gpu_elapsed_time(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s0, s1 := newStream(t, devs[0]), newStream(t, devs[1])
		p := streamtest.NewSpinner(t, devs[1])
		e0, e1, e2 := timedEvent(t, devs[0]), timedEvent(t, devs[1]), timedEvent(t, devs[1])
		require.NoError(t, e0.Record(s0))
		require.NoError(t, e1.Record(s1))
		p.On(s1, late)
		require.NoError(t, e2.Record(s1))
		require.NoError(t, s0.Sync(testgpu.Context(t)))
		require.NoError(t, s1.Sync(testgpu.Context(t)))
		_, err := e1.Elapsed(e0)
		require.ErrorIs(t, err, device.ErrorInvalidHandle)
		require.ErrorContains(t, err, "clocks of two devices do not compare")
		took, err := e2.Elapsed(e1)
		require.NoError(t, err, "the refusal has harmed nothing")
		require.Positive(t, took)
		back, err := e1.Elapsed(e2)
		require.NoError(t, err)
		require.Equal(t, -took, back)
	})
}

func TestTorch_test_external_streams(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, dev := range devs { // _multi_device
			own := newStream(t, dev)
			p := streamtest.NewSpinner(t, dev)
			x, err := stream.External(dev, own.Handle())
			require.NoError(t, err)
			require.Equal(t, own.Handle(), x.Handle())
			require.Same(t, dev, x.Device())
			open := streamtest.Hold(t, own)
			p.On(own, late)
			require.False(t, synced(t, x), "the work is that of the stream")
			open()
			require.NoError(t, x.Sync(testgpu.Context(t)))
			require.NoError(t, x.Close())
			require.True(t, synced(t, own), "and the stream outlives the wrapper")
		}
	})
}

func TestTorch_test_events(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, p := newStream(t, devs[0]), streamtest.NewSpinner(t, devs[0])
		e, start := timedEvent(t, devs[0]), timedEvent(t, devs[0])
		require.True(t, passed(t, e), "never recorded")
		require.NoError(t, e.Sync(testgpu.Context(t)))
		require.NoError(t, start.Record(s))
		require.NoError(t, s.Sync(testgpu.Context(t)))
		open := streamtest.Hold(t, s)
		p.On(s, late)
		require.NoError(t, e.Record(s))
		require.False(t, passed(t, e))
		open()
		require.NoError(t, e.Sync(testgpu.Context(t)))
		require.True(t, passed(t, e))
		took, err := e.Elapsed(start)
		require.NoError(t, err)
		require.Greater(t, took, late*9/10)
	})
}

func TestTorch_test_streams(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		def, user := stream.Default(devs[0]), newStream(t, devs[0])
		p := streamtest.NewSpinner(t, devs[0])
		require.False(t, def.Equal(user))
		require.Zero(t, def.Handle())
		require.NotZero(t, user.Handle())
		require.True(t, synced(t, user))
		open := streamtest.Hold(t, user)
		p.On(user, late)
		require.False(t, synced(t, user))
		require.True(t, synced(t, def), "the default stream does not wait for it")
		open()
		require.NoError(t, user.Sync(testgpu.Context(t)))
		require.True(t, synced(t, user))
	})
}

func TestTorch_test_graph_is_current_stream_capturing(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		p := streamtest.NewSpinner(t, devs[0])
		p.On(s, 0) // loads the kernel
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.False(t, must(s.Capturing()))
		x, err := graph.Capture([]*stream.Stream{s}, func() error {
			require.True(t, must(s.Capturing()))
			require.False(t, must(stream.Default(devs[0]).Capturing()))
			p.On(s, late)
			return nil
		}, nil)
		require.NoError(t, err)
		require.False(t, must(s.Capturing()))
		require.True(t, synced(t, s), "the capture has not run")
		open := streamtest.Hold(t, stream.Default(devs[0]))
		require.NoError(t, x.Launch(stream.Default(devs[0])), "a graph may be launched there")
		require.NoError(t, s.WaitStream(stream.Default(devs[0])))
		require.False(t, synced(t, s))
		open()
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.NoError(t, x.Close())
	})
}

// A recorded use keeps memory from being used again before the work that uses it
// has completed.
func TestTorch_test_record_stream(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, side, p := newStream(t, devs[0]), newStream(t, devs[0]), streamtest.NewSpinner(t, devs[0])
		x, err := memory.MakeFrom(s, []int32{1, 2, 3, 4})
		require.NoError(t, err)
		out := must(memory.MakePinned[int32](devs[0], 4))
		require.NoError(t, side.WaitStream(s))
		p.On(side, 2*late)
		require.NoError(t, x.RecordStream(side))
		require.NoError(t, x.CopyToPinned(side, out))
		require.NoError(t, x.Close())
		for range 4 { // would find the memory at once if it were free
			y, err := memory.MakeFrom(s, []int32{9, 9, 9, 9})
			require.NoError(t, err)
			require.NoError(t, y.Close())
		}
		require.NoError(t, side.Sync(testgpu.Context(t)))
		require.Equal(t, []int32{1, 2, 3, 4}, out.Data())
		require.NoError(t, out.Close())
	})
}

func TestTorch_test_rng_state_of_each_device(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		draw := func(dev *device.Device) []float32 {
			s := must(stream.FromPool(dev, 0))
			x, err := memory.Make[float32](s, 100)
			require.NoError(t, err)
			require.NoError(t, rng.Uniform(rng.Default(dev), s, x, 0, 1))
			out := make([]float32, 100)
			require.NoError(t, x.CopyTo(s, out))
			require.NoError(t, x.Close())
			return out
		}
		for _, dev := range devs {
			rng.Default(dev).ManualSeed(5)
		}
		a, b := draw(devs[0]), draw(devs[1])
		require.Equal(t, a, b, "one seed, two devices")
		require.NotEqual(t, a, draw(devs[0]))
		rng.Default(devs[0]).ManualSeed(5)
		require.Equal(t, a, draw(devs[0]))
	})
}
