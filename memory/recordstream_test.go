package memory_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A block is nobody's while a stream that RecordStream named has not done its
// work, and then it is used again (torch's test_record_stream).
func TestRecordStreamKeepsTheBlock(t *testing.T) {
	for name, record := range map[string]func(x memory.Slice[int32], s *stream.Stream) error{
		"slice": func(x memory.Slice[int32], s *stream.Stream) error { return x.RecordStream(s) },
		"part":  func(x memory.Slice[int32], s *stream.Stream) error { return x.Slice(9, 10).RecordStream(s) },
		"raw":   func(x memory.Slice[int32], s *stream.Stream) error { return memory.RecordStreamRaw(x.Ptr(), s) },
		"raw interior": func(x memory.Slice[int32], s *stream.Stream) error {
			return memory.RecordStreamRaw(x.Ptr()+100, s)
		},
	} {
		t.Run(name, func(t *testing.T) {
			eachFresh(t, "", func(t *testing.T, d *device.Device) {
				a, b := newStream(t, d), newStream(t, d)
				const n = 1 << 18 // half a segment
				x, err := memory.MakeFrom(a, random32(n))
				require.NoError(t, err)
				was := x.Ptr()
				require.NoError(t, b.WaitStream(a))
				open := streamtest.Hold(t, b)
				require.NoError(t, record(x, b))
				require.NoError(t, x.CopyTo(a, make([]int32, n)))
				y, err := memory.Make[int32](b, n)
				require.NoError(t, err)
				require.NoError(t, memory.Copy(b, y, x))
				require.NoError(t, x.Close())
				s := statsOf(t, d)
				require.EqualValues(t, 1, s.Allocation.All.Current, "closed at once")
				require.EqualValues(t, 2, s.Active.All.Current, "but active until b is past it")
				other, err := memory.Make[int32](a, n)
				require.NoError(t, err)
				require.NotEqual(t, was, other.Ptr(), "b still has to read it")
				require.NoError(t, other.Zero(a))
				open()
				out := make([]int32, n)
				require.NoError(t, y.CopyTo(b, out))
				same(t, random32(n), out)
				require.NoError(t, y.Close())
				calls := statsOf(t, d).DeviceAllocs
				z, err := memory.Make[int32](a, n)
				require.NoError(t, err)
				require.Equal(t, was, z.Ptr(), "before the driver is asked for more")
				require.Equal(t, calls, statsOf(t, d).DeviceAllocs)
				require.NoError(t, z.Zero(a))
				require.NoError(t, z.Close())
				require.NoError(t, other.Close())
				require.EqualValues(t, 0, statsOf(t, d).Active.All.Current)
			})
		})
	}
}

func random32(n int) []int32 {
	x := make([]int32, n)
	for i := range x {
		x[i] = int32(i) * 2654435
	}
	return x
}

// The stream that a block belongs to needs no record: the next user comes behind.
func TestOneStreamUsesItAtOnce(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		open := streamtest.Hold(t, s)
		x, err := memory.Make[int32](s, 1000)
		require.NoError(t, err)
		was := x.Ptr()
		require.NoError(t, x.Zero(s))
		require.NoError(t, x.RecordStream(s))
		require.NoError(t, x.Close())
		calls := statsOf(t, d).DeviceAllocs
		y, err := memory.Make[int32](s, 1000)
		require.NoError(t, err)
		require.Equal(t, was, y.Ptr(), "although the stream has not zeroed it")
		require.NoError(t, y.Close())
		require.Equal(t, calls, statsOf(t, d).DeviceAllocs)
		o := newStream(t, d)
		z, err := memory.Make[int32](o, 1000)
		require.NoError(t, err)
		require.NotEqual(t, was, z.Ptr(), "another stream has memory of its own")
		require.NoError(t, z.Close())
		open()
	})
}

// One stream makes and another uses, for long: what is reserved stays small
// although the host runs ahead.
func TestProducerAndConsumer(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		a, b := newStream(t, d), newStream(t, d)
		const n = 1 << 18
		for i := range 1000 {
			x, err := memory.Make[int32](a, n)
			require.NoError(t, err)
			require.NoError(t, x.Slice(0, 1).Zero(a))
			require.NoError(t, b.WaitStream(a))
			require.NoError(t, x.RecordStream(b))
			require.NoError(t, x.Slice(0, 1).Zero(b))
			require.NoError(t, x.Close())
			if i%100 == 99 {
				require.NoError(t, b.Sync(testgpu.Context(t)))
			}
		}
		require.LessOrEqual(t, statsOf(t, d).ReservedBytes.All.Peak, int64(300*mib))
		require.NoError(t, b.Sync(testgpu.Context(t)))
	})
}

// The memory of streams that live for one task goes to those that come after them.
func TestShortStreams(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True"} {
		t.Run(conf, func(t *testing.T) {
			eachFresh(t, conf, func(t *testing.T, d *device.Device) {
				for i := range 50 {
					s, err := stream.New(d, nil)
					require.NoError(t, err)
					x, err := memory.MakeFrom(s, random32(1<<18+i))
					require.NoError(t, err)
					if i%2 == 0 {
						require.NoError(t, s.Close())
						require.NoError(t, x.Close())
						continue
					}
					require.NoError(t, x.Close())
					require.NoError(t, s.Close())
				}
				require.LessOrEqual(t, statsOf(t, d).ReservedBytes.All.Peak, int64(22*mib))
			})
		})
	}
}

// The stream of another device is recorded too, by any address of the block.
func TestRecordStreamRawOfAnotherDevice(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		s, other := newStream(t, devs[0]), newStream(t, devs[1])
		require.NoError(t, memory.EmptyCache(devs[1]))
		p, err := memory.AllocRaw(s, 100_000)
		require.NoError(t, err)
		require.NoError(t, memory.RecordStreamRaw(p+777, other))
		require.NoError(t, memory.FreeRaw(devs[0], p))
		var wrong *memory.PointerError
		require.ErrorAs(t, memory.RecordStreamRaw(p, other), &wrong)
	})
}

// The first allocation after the other stream is past a freed block gets it, however
// small it is and however few there are, before anything else of its size
// (process_events at each malloc).
func TestRecordStreamIsReusedAtOnce(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		a, b := newStream(t, d), newStream(t, d)
		const n = 1000
		x, err := memory.Make[int32](a, n)
		require.NoError(t, err)
		require.NoError(t, x.Zero(a))
		require.NoError(t, b.WaitStream(a))
		for range 10 {
			was := x.Ptr()
			open := streamtest.Hold(t, b)
			require.NoError(t, x.RecordStream(b))
			require.NoError(t, x.Zero(b))
			require.NoError(t, x.Close())
			// What b does from now on is nothing to the block.
			passed, err := b.Record(nil)
			require.NoError(t, err)
			later := streamtest.Hold(t, b)
			y, err := memory.Make[int32](a, n)
			require.NoError(t, err)
			require.NotEqual(t, was, y.Ptr(), "b still has to write it")
			open()
			require.NoError(t, passed.Sync(testgpu.Context(t)))
			z, err := memory.Make[int32](a, n)
			require.NoError(t, err)
			require.Equal(t, was, z.Ptr(), "b is past it, although it is busy")
			later()
			require.NoError(t, errors.Join(passed.Close(), y.Close(), b.Sync(testgpu.Context(t)), z.Zero(a)))
			x = z
			require.NoError(t, b.WaitStream(a))
		}
		require.NoError(t, x.Close())
	})
}

// A buffer that lives long does not keep the closed streams that have used it, nor the memory that was cached for them.
func TestClosedStreamsAreForgotten(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		a := newStream(t, d)
		x, err := memory.Make[int32](a, 1000)
		require.NoError(t, err)
		require.NoError(t, x.Zero(a))
		var reserved int64
		for i := range 20 {
			s, err := stream.New(d, nil)
			require.NoError(t, err)
			require.NoError(t, s.WaitStream(a))
			own, err := memory.Make[int32](s, 1000)
			require.NoError(t, err)
			require.NoError(t, memory.Copy(s, own, x))
			require.NoError(t, x.RecordStream(s))
			require.NoError(t, own.Close())
			require.NoError(t, s.Sync(t.Context()))
			require.NoError(t, s.Close())
			if i == 1 {
				reserved = statsOf(t, d).ReservedBytes.All.Current
			}
		}
		require.Equal(t, reserved, statsOf(t, d).ReservedBytes.All.Current)
		require.NoError(t, x.Close())
	})
}
