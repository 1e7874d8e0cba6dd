package graph_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

const mib = 1 << 20

// captureIn captures what fn enqueues on b.s with memory from the pool.
func (b *bench) captureIn(pool *memory.Pool, fn func() error) (*graph.Exec, error) {
	return graph.Capture([]*stream.Stream{b.s}, fn, &graph.Config{Pool: pool})
}

// The output is allocated in the capture; it has each launch's result, and
// outlives the graph.
func TestAllocateInCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		in := b.make(1)
		var out, other memory.Slice[float32]
		x, err := b.captureIn(nil, func() error {
			tmp, errT := memory.Make[float32](b.s, elems)
			used := errors.Join(errT, memory.Copy(b.s, tmp, in), b.launch(b.add, b.s, tmp, 1))
			var errO, errP error
			out, errO = memory.Make[float32](b.s, elems)
			copied := errors.Join(memory.Copy(b.s, out, tmp), b.launch(b.scale, b.s, out, 2), tmp.Close())
			other, errP = memory.Make[float32](b.s, elems)
			require.Equal(t, tmp.Ptr(), other.Ptr(), "what is closed in the capture is used again")
			return errors.Join(used, errO, copied, errP, memory.Copy(b.s, other, out), b.launch(b.add, b.s, other, 7))
		})
		require.NoError(t, err)
		require.Equal(t, 2*mib, x.Pool().Reserved())
		require.Equal(t, 2*4096, x.Pool().Allocated(), "two of 4000 bytes, rounded to 512")
		for i := range 5 {
			b.fill(in, float32(i))
			require.NoError(t, x.Launch(b.s))
			b.want(float32(i+1)*2, out)
			b.want(float32(i+1)*2+7, other)
		}
		pool := x.Pool()
		require.NoError(t, x.Close())
		b.want(10, out)
		require.NoError(t, other.Close())
		require.Equal(t, 2*mib, pool.Reserved())
		require.NoError(t, out.Close())
		require.NoError(t, out.Close())
		require.Zero(t, pool.Reserved(), "graph and buffers are gone, and the memory with them")
	})
}

// Graphs with a pool in common need the memory of one (torch's
// test_graph_two_successive and test_graph_three_successive).
func TestSharedPool(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(0)
		pool := memory.NewPool(nil)
		step := func(by float32) func() error {
			return func() error {
				tmp, err := memory.Make[float32](b.s, elems)
				if err != nil {
					return err
				}
				return errors.Join(memory.Copy(b.s, tmp, v), b.launch(b.add, b.s, tmp, by), memory.Copy(b.s, v, tmp), tmp.Close())
			}
		}
		var graphs []*graph.Exec
		for i := range 3 {
			// Each capture may be of another stream.
			x, err := b.captureIn(pool, step(float32(i+1)))
			require.NoError(t, err)
			require.Same(t, pool, x.Pool())
			graphs = append(graphs, x)
			b.s = newStream(t, devs[0])
		}
		require.Equal(t, 2*mib, pool.Reserved(), "three graphs with the memory of one")
		require.Zero(t, pool.Allocated())
		for range 4 {
			for _, x := range graphs {
				require.NoError(t, x.Launch(b.s))
			}
		}
		b.want(4*(1+2+3), v)
		require.NoError(t, pool.Close())
		require.NoError(t, pool.Close())
		_, err := b.captureIn(pool, step(1))
		require.ErrorIs(t, err, device.ErrClosed)
		for i, x := range graphs {
			require.Equal(t, 2*mib, pool.Reserved(), "graph %d uses it", i)
			require.NoError(t, x.Launch(b.s))
			require.NoError(t, x.Close())
		}
		require.Zero(t, pool.Reserved())
		b.want(30, v)
	})
}

// Torch's sizes: segments of 2 MiB for what has up to 1 MiB, of 20 MiB below 10
// MiB, and of the size rounded to 2 MiB from there on
// (test_graph_memory_stats_and_use_result_after_destroy_graph).
func TestSegmentSizes(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		for _, c := range []struct{ bytes, count, reserved int }{
			{1, 1, 2 * mib}, {512, 4096, 2 * mib}, {512, 4097, 4 * mib},
			{mib, 2, 2 * mib}, {mib, 3, 4 * mib}, {mib + 512, 1, 20 * mib},
			{10*mib - 512, 2, 20 * mib}, {10 * mib, 2, 20 * mib}, {10*mib + 512, 3, 36 * mib},
		} {
			pool := memory.NewPool(nil)
			var all []memory.Slice[byte]
			x, err := b.captureIn(pool, func() error {
				for range c.count {
					y, err := memory.Make[byte](b.s, c.bytes)
					if err != nil {
						return err
					}
					all = append(all, y)
				}
				return nil
			})
			require.NoError(t, err)
			require.Equal(t, c.reserved, pool.Reserved(), "%d of %d bytes", c.count, c.bytes)
			seen := map[uint64]bool{}
			for _, y := range all {
				require.False(t, seen[y.Ptr()])
				require.Zero(t, y.Ptr()%512)
				seen[y.Ptr()] = true
				require.NoError(t, y.Close())
			}
			require.Zero(t, pool.Allocated())
			require.NoError(t, errors.Join(x.Close(), pool.Close()))
			require.Zero(t, pool.Reserved())
		}
	})
}

// In a capture, what one stream has freed is not another's: nothing orders them.
func TestPoolKeepsStreamsApart(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		side := newStream(t, devs[0])
		v := b.make(3)
		var first, unrelated, shared, last memory.Slice[float32]
		x, err := graph.Capture([]*stream.Stream{b.s, side}, func() (err error) {
			make := func(s *stream.Stream) memory.Slice[float32] {
				y, e := memory.Make[float32](s, elems)
				err = errors.Join(err, e)
				return y
			}
			first = make(b.s)
			err = errors.Join(err, memory.Copy(b.s, first, v), first.Close())
			unrelated = make(side)
			require.NotEqual(t, first.Ptr(), unrelated.Ptr())
			err = errors.Join(err, memory.Copy(side, unrelated, v))
			shared = make(b.s)
			require.Equal(t, first.Ptr(), shared.Ptr())
			err = errors.Join(err, shared.RecordStream(side), shared.Close())
			last = make(b.s)
			require.NotEqual(t, shared.Ptr(), last.Ptr(), "the other stream may use it still")
			return err
		}, nil)
		require.NoError(t, err)
		require.NoError(t, x.Launch(b.s))
		b.want(3, unrelated)
		require.Equal(t, 2*4096, x.Pool().Allocated())
		require.NoError(t, errors.Join(unrelated.Close(), last.Close(), x.Close()))
	})
}

// A capture that fails leaves nothing of its pool.
func TestAbortLeavesNoPool(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		pool := memory.NewPool(nil)
		boom := errors.New("boom")
		for range 3 {
			var left memory.Slice[byte]
			_, err := b.captureIn(pool, func() (err error) {
				left, err = memory.Make[byte](b.s, 30*mib)
				return errors.Join(err, boom)
			})
			require.ErrorIs(t, err, boom)
			require.Equal(t, 30*mib, pool.Allocated(), "the buffer is the function's to close")
			require.NoError(t, left.Close())
			require.Zero(t, pool.Allocated())
		}
		require.Equal(t, 30*mib, pool.Reserved())
		require.NoError(t, pool.Close())
		require.Zero(t, pool.Reserved())

		r, err := graph.Begin(b.s, nil)
		require.NoError(t, err)
		left, err := memory.Make[byte](b.s, 30*mib)
		require.NoError(t, err)
		require.NoError(t, left.Close())
		_, before := memoryInfo(t, devs[0])
		require.NoError(t, r.Abort())
		_, after := memoryInfo(t, devs[0])
		require.GreaterOrEqual(t, before-after, uint64(30*mib))
	})
}

func memoryInfo(t *testing.T, dev *device.Device) (total, used uint64) {
	t.Helper()
	free, total, err := dev.MemoryInfo()
	require.NoError(t, err)
	return total, total - free
}

func TestPoolInUse(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		pool := memory.NewPool(nil)
		other := newStream(t, devs[0])
		x, err := b.captureIn(pool, func() error {
			_, err := graph.Capture([]*stream.Stream{other}, func() error { return nil }, &graph.Config{Pool: pool, Mode: graph.Relaxed})
			require.ErrorContains(t, err, "captures that share a pool come one after another")
			return nil
		})
		require.NoError(t, err)
		require.NoError(t, errors.Join(x.Close(), pool.Close()))
		require.NoError(t, (*memory.Pool)(nil).Close())
		_, err = graph.Begin(b.s, &graph.Config{Pool: new(memory.Pool)})
		require.ErrorIs(t, err, device.ErrClosed, "the zero pool")
	})
}

// What a device has not is an error of the allocation, and the capture goes on.
func TestOutOfMemoryInCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		v := b.make(1)
		total, _ := memoryInfo(t, devs[0])
		x, err := b.captureIn(nil, func() error {
			_, err := memory.Make[byte](b.s, int(total)+1)
			var oom *memory.OutOfMemoryError
			require.ErrorAs(t, err, &oom)
			require.Greater(t, oom.Requested, total)
			return b.launch(b.add, b.s, v, 1)
		})
		require.NoError(t, err)
		require.NoError(t, x.Launch(b.s))
		b.want(2, v)
		require.NoError(t, x.Close())
	})
}

// At the end of a capture its streams no longer keep free blocks apart: several
// in a row become one, and the one in use behind them stays what it is.
func TestPoolJoinsBlocks(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		side := newStream(t, devs[0])
		pool := memory.NewPool(nil)
		var out memory.Slice[float32]
		x, err := graph.Capture([]*stream.Stream{b.s, side}, func() error {
			var xs []memory.Slice[float32]
			var errs []error
			for i := range 7 {
				y, err := memory.Make[float32]([]*stream.Stream{b.s, side}[i%2], elems)
				xs, errs = append(xs, y), append(errs, err)
			}
			out = xs[6]
			for _, y := range xs[:6] {
				errs = append(errs, y.Close())
			}
			return errors.Join(errs...)
		}, &graph.Config{Pool: pool})
		require.NoError(t, err)
		require.Equal(t, 4096, pool.Allocated())
		require.Equal(t, 2*mib, pool.Reserved())
		var all, rest memory.Slice[float32]
		y, err := b.captureIn(pool, func() (err error) {
			var errR error
			all, err = memory.Make[float32](b.s, 6*1024)
			rest, errR = memory.Make[float32](b.s, 1024)
			return errors.Join(err, errR)
		})
		require.NoError(t, err)
		require.Equal(t, all.Ptr()+6*4096, out.Ptr(), "the six before the output")
		require.Equal(t, out.Ptr()+4096, rest.Ptr(), "what is behind it")
		require.Equal(t, 8*4096, pool.Allocated())
		require.NoError(t, errors.Join(all.Close(), rest.Close(), out.Close(), x.Close(), y.Close(), pool.Close()))
		require.Zero(t, pool.Reserved())
	})
}

// Use of a pool on a stream that is captured leaves the capture alone, although a closed
// stream has left memory in the pool, for which its next user waits.
func TestPoolUseInCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		in := b.make(1)
		pool := memory.NewPool(nil)
		defer func() { require.NoError(t, pool.Close()) }()
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		allocate := func(s *stream.Stream) (ptr uint64) {
			require.NoError(t, pool.Use(s, func() error {
				x, err := memory.Make[float32](s, elems)
				ptr = x.Ptr()
				return errors.Join(err, x.Close())
			}))
			return ptr
		}
		before := allocate(s)
		open := streamtest.Hold(t, s)
		require.NoError(t, s.Close()) // its end has not passed
		x, err := b.captureIn(nil, func() error {
			return pool.Use(b.s, func() error {
				y, err := memory.Make[float32](b.s, elems)
				return errors.Join(err, memory.Copy(b.s, y, in), b.launch(b.add, b.s, y, 1), memory.Copy(b.s, in, y), y.Close())
			})
		})
		open()
		require.NoError(t, err)
		b.fill(in, 3)
		require.NoError(t, x.Launch(b.s))
		b.want(4, in)
		require.NoError(t, x.Close())
		require.Equal(t, before, allocate(b.s), "outside of the capture the pool gives the memory to the next stream")
	})
}

// The error of an allocation in a capture that has been invalidated says so.
func TestAllocateInInvalidatedCapture(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		b := newBench(t, devs[0])
		e, err := b.s.Record(nil)
		require.NoError(t, err)
		_, err = b.captureIn(nil, func() error {
			require.Error(t, b.s.Wait(e))
			_, err := memory.Make[float32](b.s, elems)
			var ce *device.CaptureError
			require.ErrorAs(t, err, &ce)
			require.ErrorContains(t, err, "an earlier call has invalidated the capture")
			return nil
		})
		require.ErrorIs(t, err, graph.ErrorInvalidated)
		require.NoError(t, e.Close())
	})
}
