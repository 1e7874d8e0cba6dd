package stream_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
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
	var key kept.Key
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
