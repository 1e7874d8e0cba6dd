package memory_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// contract is what TestBackends checks.
var contract = []struct {
	name  string
	check func(t *testing.T, d *device.Device, b backend)
}{
	{"round trip", checkRoundTrip},
	{"order of one stream", checkOrder},
	{"record stream", checkRecordStream},
	{"two orders", checkTwoOrders},
	{"out of memory", checkOutOfMemory},
	{"fraction", checkFraction},
	{"use after close", checkUseAfterClose},
	{"closed stream", checkClosedStream},
	{"raw", checkRaw},
	{"statistics", checkStatistics},
	{"many streams", checkManyStreams},
	{"capture", checkCapture},
	{"empty cache", checkEmptyCache},
}

func checkRoundTrip(t *testing.T, d *device.Device, _ backend) {
	s := newStream(t, d)
	for _, n := range []int{0, 1, 127, 128, 129, 1 << 18, 1<<18 + 1, 3 << 20} {
		in, out := random(n), make([]float32, n)
		x, err := memory.MakeFrom(s, in)
		require.NoError(t, err)
		require.Zero(t, x.Ptr()%512)
		require.NoError(t, x.CopyTo(s, out))
		same(t, in, out)
		require.NoError(t, x.Close())
		require.NoError(t, x.Close())
	}
	_, err := memory.Alloc(s, -1)
	require.ErrorContains(t, err, "memory: allocate -1 bytes on "+d.String()+": the size is negative")
}

// What was freed is used again behind the work that is on the stream.
func checkOrder(t *testing.T, d *device.Device, _ backend) {
	s := newStream(t, d)
	const n = 1 << 18
	x, out := random(n), make([]float32, n)
	for i := range 8 {
		a, err := memory.Make[float32](s, n)
		require.NoError(t, err)
		require.NoError(t, a.Zero(s))
		require.NoError(t, a.Close())
		b, err := memory.Make[float32](s, n>>(i%2))
		require.NoError(t, err)
		require.NoError(t, b.CopyFrom(s, x[:b.Len()]))
		require.NoError(t, b.CopyTo(s, out[:b.Len()]))
		same(t, x[:b.Len()], out[:b.Len()])
		require.NoError(t, b.Close())
	}
}

// What another stream uses is freed behind its work: strict devices report it
// otherwise.
func checkRecordStream(t *testing.T, d *device.Device, _ backend) {
	a, b := newStream(t, d), newStream(t, d)
	const n = 1 << 18
	want, out := random(n), make([]float32, n)
	for range 4 {
		x, err := memory.Make[float32](a, n)
		require.NoError(t, err)
		require.NoError(t, b.WaitStream(a))
		require.NoError(t, x.RecordStream(b))
		require.NoError(t, x.RecordStream(b))
		require.NoError(t, x.RecordStream(a))
		for range 8 {
			require.NoError(t, x.Zero(b))
		}
		require.NoError(t, x.Close())
		y, err := memory.Make[float32](a, n)
		require.NoError(t, err)
		require.NoError(t, y.CopyFrom(a, want))
		require.NoError(t, y.CopyTo(a, out))
		same(t, want, out)
		require.NoError(t, y.Close())
	}
	require.NoError(t, b.Sync(testgpu.Context(t)))
}

// Memory goes from one stream to another and back, ordered by events.
func checkTwoOrders(t *testing.T, d *device.Device, _ backend) {
	streams := []*stream.Stream{newStream(t, d), newStream(t, d)}
	const n = 4096
	for i := range 6 {
		a, b := streams[i%2], streams[1-i%2]
		want, out := random(n+i), make([]float32, n+i)
		x, err := memory.MakeFrom(a, want)
		require.NoError(t, err)
		require.NoError(t, b.WaitStream(a))
		y, err := memory.Make[float32](b, n+i)
		require.NoError(t, err)
		require.NoError(t, x.RecordStream(b))
		require.NoError(t, memory.Copy(b, y, x))
		require.NoError(t, x.Close())
		require.NoError(t, y.CopyTo(b, out))
		same(t, want, out)
		require.NoError(t, y.Close())
		require.NoError(t, a.WaitStream(b))
	}
}

func checkOutOfMemory(t *testing.T, d *device.Device, b backend) {
	s := newStream(t, d)
	kept, err := memory.MakeFrom(s, random(1000))
	require.NoError(t, err)
	for i, n := range []int{1 << 50, 1 << 60, 1<<63 - 1} {
		_, err := memory.Alloc(s, n)
		oom, ok := errors.AsType[*memory.OutOfMemoryError](err)
		require.True(t, ok, "%d bytes: %v", n, err)
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
		require.EqualValues(t, n, oom.Requested)
		require.Equal(t, d.String(), oom.Device)
		require.ErrorContains(t, err, "memory: out of memory on "+d.String()+": tried to allocate ")
		if i > 0 {
			require.ErrorContains(t, err, "more than any device has: check the size")
		}
		if b.caches {
			require.EqualValues(t, min(i+1, 1), statsOf(t, d).OOMs, "absurd sizes are refused before the count, as in torch")
		}
		out := make([]float32, 1000)
		require.NoError(t, kept.CopyTo(s, out), "the device is as good as before")
		require.Equal(t, random(1000), out)
	}
	require.NoError(t, kept.Close())
	checkRoundTrip(t, d, b)
}

func checkFraction(t *testing.T, d *device.Device, _ backend) {
	s := newStream(t, d)
	_, total, err := d.MemoryInfo()
	require.NoError(t, err)
	f, err := memory.Fraction(d)
	require.NoError(t, err)
	require.Equal(t, 1.0, f)
	limit := 256 << 20
	require.NoError(t, memory.SetFraction(d, float64(limit)/float64(total)))
	x, err := memory.Alloc(s, limit/2)
	require.NoError(t, err)
	_, err = memory.Alloc(s, limit/2+4<<20)
	oom, ok := errors.AsType[*memory.OutOfMemoryError](err)
	require.True(t, ok, "%v", err)
	require.InDelta(t, float64(limit)/float64(total), oom.Fraction, 1e-9)
	require.ErrorContains(t, err, "the process may use 256.00 MiB")
	require.NoError(t, x.Close())
	x, err = memory.Alloc(s, limit/2+4<<20)
	require.NoError(t, err, "what was freed is there")
	require.NoError(t, memory.SetFraction(d, 1))
	y, err := memory.Alloc(s, limit/2+4<<20)
	require.NoError(t, err)
	require.NoError(t, errors.Join(x.Close(), y.Close()))
}

func checkUseAfterClose(t *testing.T, d *device.Device, _ backend) {
	s := newStream(t, d)
	x, err := memory.Make[float32](s, 100)
	require.NoError(t, err)
	part := x.Slice(10, 20)
	require.NoError(t, x.Close())
	require.ErrorIs(t, x.Zero(s), device.ErrClosed)
	require.ErrorIs(t, part.Zero(s), device.ErrClosed)
	require.ErrorIs(t, x.CopyFrom(s, make([]float32, 100)), device.ErrClosed)
	require.ErrorIs(t, x.CopyTo(s, make([]float32, 100)), device.ErrClosed)
	require.ErrorIs(t, x.RecordStream(newStream(t, d)), device.ErrClosed)
	require.ErrorContains(t, x.RecordStream(newStream(t, d)), "memory: record stream: the buffer of 400 bytes on "+d.String()+": use after Close")
	require.NoError(t, x.Close())
}

// Buffers outlive their stream, and are freed in its order.
func checkClosedStream(t *testing.T, d *device.Device, _ backend) {
	ctx := testgpu.Context(t)
	for range 4 {
		s, o := newStream(t, d), newStream(t, d)
		x, err := memory.Make[float32](s, 1<<18)
		require.NoError(t, err)
		y, err := memory.Make[float32](s, 1000)
		require.NoError(t, err)
		require.NoError(t, x.Zero(s))
		require.NoError(t, o.WaitStream(s))
		require.NoError(t, y.RecordStream(o))
		require.NoError(t, y.Zero(o))
		require.NoError(t, errors.Join(s.Close(), o.Close()))
		require.NoError(t, x.RecordStream(newStream(t, d)))
		require.ErrorIs(t, x.RecordStream(o), device.ErrClosed)
		require.NoError(t, errors.Join(x.Close(), y.Close()))
		_, err = memory.Alloc(s, 1000)
		require.ErrorIs(t, err, device.ErrClosed)
	}
	s := newStream(t, d)
	x, err := memory.MakeFrom(s, random(1<<18))
	require.NoError(t, err)
	require.NoError(t, s.Sync(ctx))
	require.NoError(t, x.Close())
}

func checkRaw(t *testing.T, d *device.Device, _ backend) {
	s, o := newStream(t, d), newStream(t, d)
	require.NoError(t, memory.FreeRaw(d, 0))
	zero, err := memory.AllocRaw(s, 0)
	require.NoError(t, err)
	require.Zero(t, zero)
	p, err := memory.AllocRaw(s, 5000)
	require.NoError(t, err)
	fill(t, s, p, 5000)
	require.NoError(t, memory.RecordStreamRaw(p, o))
	require.NoError(t, memory.FreeRaw(d, p))
	for what, call := range map[string]func() error{
		"free":          func() error { return memory.FreeRaw(d, p) },
		"record stream": func() error { return memory.RecordStreamRaw(p, o) },
	} {
		err := call()
		bad, ok := errors.AsType[*memory.PointerError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, p, bad.Address)
		require.Equal(t, what, bad.Op)
		require.ErrorContains(t, err, fmt.Sprintf("memory: %s on %s: %#x", what, d, p))
	}
	err = memory.FreeRaw(d, 0x1234)
	require.ErrorContains(t, err, "0x1234 is not memory of this allocator")
}

// TestMemoryStats of torch: what is allocated goes up and down with each step.
func checkStatistics(t *testing.T, d *device.Device, b backend) {
	s := newStream(t, d)
	rnd := rand.New(rand.NewPCG(3, 5))
	var open []*memory.Buffer
	requested := int64(0)
	for range 200 {
		before := statsOf(t, d)
		if len(open) > 0 && rnd.IntN(2) == 0 {
			i := rnd.IntN(len(open))
			x := open[i]
			open[i] = open[len(open)-1]
			open = open[:len(open)-1]
			requested -= int64(x.Bytes())
			require.NoError(t, x.Close())
		} else {
			n := 1 + rnd.IntN(1<<(8+rnd.IntN(15)))
			x, err := memory.Alloc(s, n)
			require.NoError(t, err)
			open = append(open, x)
			requested += int64(n)
		}
		after := statsOf(t, d)
		consistent(t, after, b)
		require.EqualValues(t, len(open), after.Allocation.All.Current)
		require.Equal(t, requested, after.RequestedBytes.All.Current)
		require.GreaterOrEqual(t, after.AllocatedBytes.All.Current, requested)
		require.GreaterOrEqual(t, after.AllocatedBytes.All.Peak, before.AllocatedBytes.All.Peak)
	}
	peak := statsOf(t, d).AllocatedBytes.All.Peak
	for _, x := range open {
		require.NoError(t, x.Close())
	}
	was := statsOf(t, d)
	require.Equal(t, peak, was.AllocatedBytes.All.Peak)
	require.NoError(t, memory.ResetPeakStats(d))
	now := statsOf(t, d)
	require.Zero(t, now.AllocatedBytes.All.Peak)
	require.Equal(t, now.ReservedBytes.All.Current, now.ReservedBytes.All.Peak)
	require.Equal(t, was.AllocatedBytes.All.Allocated, now.AllocatedBytes.All.Allocated)
	_, err := memory.Alloc(s, 1<<50)
	require.Error(t, err)
	require.EqualValues(t, 1, statsOf(t, d).OOMs)
	require.NoError(t, memory.EmptyCache(d))
	require.NoError(t, memory.ResetAccumulatedStats(d))
	now = statsOf(t, d)
	require.Zero(t, now.AllocatedBytes.All.Allocated)
	require.Zero(t, now.Allocation.All.Freed)
	require.Equal(t, make([]int64, 5), []int64{now.OOMs, now.AllocRetries, now.SyncAllStreams, now.DeviceAllocs, now.DeviceFrees})
}

// Goroutines with a stream each find what they wrote.
func checkManyStreams(t *testing.T, d *device.Device, _ backend) {
	var wg sync.WaitGroup
	for w := range 6 {
		s := newStream(t, d)
		rnd := rand.New(rand.NewPCG(11, uint64(w)))
		wg.Go(func() {
			for range 25 {
				in := random(1 + rnd.IntN(1<<uint(6+rnd.IntN(12))))
				out := make([]float32, len(in))
				x, err := memory.MakeFrom(s, in)
				if err == nil {
					err = errors.Join(x.CopyTo(s, out), x.Close())
				}
				if err != nil || in[len(in)-1] != out[len(out)-1] || in[0] != out[0] {
					t.Errorf("stream %d, %d elements: %v", w, len(in), err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// What is allocated in a capture belongs to the graph, whoever has the rest.
func checkCapture(t *testing.T, d *device.Device, b backend) {
	s := newStream(t, d)
	before, err := memory.MakeFrom(s, random(1000))
	require.NoError(t, err)
	raw, err := memory.AllocRaw(s, 100)
	require.NoError(t, err)
	var x memory.Slice[float32]
	g, err := graph.Capture([]*stream.Stream{s}, func() (err error) {
		require.ErrorIs(t, before.Close(), graph.ErrorUnsupported)
		if !b.caches {
			require.ErrorIs(t, memory.FreeRaw(d, raw), graph.ErrorUnsupported)
		}
		if x, err = memory.Make[float32](s, 1000); err != nil {
			return err
		}
		return memory.Copy(s, x, before)
	}, nil)
	require.NoError(t, err)
	require.NoError(t, memory.FreeRaw(d, raw))
	require.NoError(t, memory.EmptyCache(d))
	require.NoError(t, g.Launch(s))
	out := make([]float32, 1000)
	require.NoError(t, x.CopyTo(s, out))
	require.Equal(t, random(1000), out)
	require.NoError(t, g.Close())
	require.NoError(t, errors.Join(x.Close(), before.Close()))
}

func checkEmptyCache(t *testing.T, d *device.Device, b backend) {
	s := newStream(t, d)
	require.NoError(t, memory.EmptyCache(d))
	was := statsOf(t, d).SyncAllStreams
	x, err := memory.Alloc(s, 30<<20)
	require.NoError(t, err)
	y, err := memory.MakeFrom(s, random(1000))
	require.NoError(t, err)
	require.NoError(t, x.Close())
	if b.caches {
		require.GreaterOrEqual(t, statsOf(t, d).ReservedBytes.All.Current, int64(30<<20))
	}
	require.NoError(t, memory.EmptyCache(d))
	now := statsOf(t, d)
	require.Equal(t, was+1, now.SyncAllStreams)
	if b.caches {
		require.EqualValues(t, 2<<20, now.ReservedBytes.All.Current)
	}
	out := make([]float32, 1000)
	require.NoError(t, y.CopyTo(s, out), "what is in use stays")
	require.Equal(t, random(1000), out)
	require.NoError(t, y.Close())
}
