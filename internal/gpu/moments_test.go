package gpu

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/timeline"
)

// whileBusy calls fn while the devices pass no event, and the recorder does not read any.
func (b *bench) whileBusy(fn func()) {
	b.t.Helper()
	b.drv.t.collecting.Lock()
	defer b.drv.t.collecting.Unlock()
	set := func(busy bool) {
		b.clock.mu.Lock()
		defer b.clock.mu.Unlock()
		b.clock.busy = busy
	}
	set(true)
	defer set(false)
	fn()
}

// stream makes a stream that only Chorus uses.
func (b *bench) stream(drv timed) cudadrv.Stream {
	b.t.Helper()
	s, r := drv.Driver.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0)
	require.Zero(b.t, r)
	return s
}

// event makes an event.
func (b *bench) event(drv timed) cudadrv.Event {
	b.t.Helper()
	e, r := drv.Driver.EventCreate(cudadrv.EventDisableTiming)
	require.Zero(b.t, r)
	return e
}

// fillOn enqueues a fill of n bytes.
func (b *bench) fillOn(drv timed, s cudadrv.Stream, p cudadrv.DevicePtr, n uintptr) {
	b.t.Helper()
	require.Zero(b.t, drv.MemsetD8Async(p, 1, n, s))
}

// follow makes a stream of a device wait for a stream of a device, by the event.
func (b *bench) follow(drv timed, s cudadrv.Stream, of timed, o cudadrv.Stream, e cudadrv.Event) {
	b.t.Helper()
	require.Zero(b.t, of.EventRecord(e, o))
	require.Zero(b.t, drv.StreamWaitEvent(s, e, 0))
}

// requireTicks compares the begins and ends of fills with ticks of the clock, by their bytes.
func (b *bench) requireTicks(want map[uint64][2]int) {
	b.t.Helper()
	exact := float64(time.Since(b.begin) + time.Millisecond)
	got := map[uint64]bool{}
	for _, x := range b.records() {
		if x.Kind == timeline.Wait {
			continue
		}
		require.Equal(b.t, timeline.Fill, x.Kind)
		got[x.Bytes] = true
		for i, at := range []int64{x.Begin, x.End} {
			tick := b.begin.Add(time.Duration(want[x.Bytes][i]) * tick)
			require.InDelta(b.t, b.rec.At(tick), at, exact, "fill of %d bytes: time %d", x.Bytes, i)
		}
	}
	require.Len(b.t, got, len(want))
}

// TestABusyStreamSharesEvents enqueues fills while the stream works, and one when it is idle.
func TestABusyStreamSharesEvents(t *testing.T) {
	b := newBench(t)
	b.d.exposed.Delete(b.s)
	b.whileBusy(func() {
		b.fill(10)
		b.fill(20)
		require.NotZero(t, b.drv.LaunchKernel(1, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, b.s, nil), "refused")
		b.fill(40)
		require.Equal(t, 5, b.drv.t.events)
	})
	require.Zero(t, b.drv.Driver.StreamSynchronize(b.s))
	b.fill(50)
	b.requireTicks(map[uint64][2]int{10: {0, 1}, 20: {1, 2}, 40: {3, 4}, 50: {5, 6}})
}

// TestWorkThatIsNotKnownEndsSharing enqueues fills behind work that the driver does not see or time.
func TestWorkThatIsNotKnownEndsSharing(t *testing.T) {
	b := newBench(t)
	e, other := b.event(b.drv), b.event(b.drv)
	s := b.stream(b.drv)
	b.whileBusy(func() {
		fill := func(n uintptr) { b.fillOn(b.drv, s, b.mem+1<<10, n) } // beside b.fill
		fill(10)
		require.Zero(t, b.drv.Driver.EventRecord(other, b.s)) // tick 2
		require.Zero(t, b.drv.StreamWaitEvent(s, other, 0))
		fill(20)
		b.fill(60)
		open.count.Add(1) // a capture
		require.Zero(t, b.drv.EventRecord(e, b.s))
		open.count.Add(-1)
		require.Zero(t, b.drv.StreamWaitEvent(s, e, 0))
		fill(30)
		b.drv.unseen(s)
		fill(40)
		var x Stream
		x.Adopt(b.d, OwnedStream, s)
		x.Expose()
		fill(50)
	})
	require.Zero(t, b.drv.Driver.StreamSynchronize(s))
	b.requireTicks(map[uint64][2]int{10: {0, 1}, 20: {3, 4}, 60: {5, 6}, 30: {8, 9}, 40: {10, 11}, 50: {12, 13}})
}

// TestAnOperationBeginsAfterAnotherDevice has a stream that waits for a stream of another device,
// whose times the recorder reads later.
func TestAnOperationBeginsAfterAnotherDevice(t *testing.T) {
	b := newBench(t)
	first, s := b.drv, b.stream(b.drv)
	second := b.device(1)
	u, e := b.stream(second), b.event(second)
	mem, r := second.Driver.MemAlloc(1 << 10)
	require.Zero(t, r)
	b.whileBusy(func() {
		b.fillOn(first, s, b.mem, 10)
		b.fillOn(second, u, mem, 20)
		b.follow(first, s, second, u, e) // tick 4
		b.fillOn(first, s, b.mem, 30)
		b.follow(first, s, second, u, e) // tick 6: u has ended before s
		b.fillOn(first, s, b.mem, 40)
	})
	require.Zero(t, first.Driver.StreamSynchronize(s))
	b.rec.Flush()
	first.t.mu.Lock()
	require.Empty(t, first.t.pending)
	first.t.mu.Unlock()
	b.requireTicks(map[uint64][2]int{10: {0, 1}, 20: {2, 3}, 30: {3, 5}, 40: {5, 7}})
	require.Empty(t, marksOf(b.sys).of, "after the recording")
}
