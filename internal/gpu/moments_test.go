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
	for _, t := range b.timings {
		t.collecting.Lock()
		defer t.collecting.Unlock()
	}
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
		if x.Kind == timeline.Wait || x.Kind == timeline.Dropped {
			continue
		}
		require.Contains(b.t, []string{timeline.Fill, timeline.Collective}, x.Kind)
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
		p, r := b.drv.MemAllocAsync(1<<10, s)
		require.Zero(t, r)
		fill(40)
		require.Zero(t, b.drv.MemFreeAsync(p, s))
		fill(45)
		require.NotZero(t, b.drv.GraphUpload(12345, s), "refused")
		fill(47)
		var x Stream
		x.Adopt(b.d, OwnedStream, s)
		x.Expose()
		fill(50)
	})
	require.Zero(t, b.drv.Driver.StreamSynchronize(s))
	b.requireTicks(map[uint64][2]int{10: {0, 1}, 20: {3, 4}, 60: {5, 6}, 30: {8, 9}, 40: {10, 11}, 45: {12, 13}, 47: {14, 15}, 50: {16, 17}})
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

// TestRecordsOnExposedStreamsAreNotKnown records an event after work of another library.
func TestRecordsOnExposedStreamsAreNotKnown(t *testing.T) {
	b := newBench(t)
	s, e, other := b.stream(b.drv), b.event(b.drv), b.event(b.drv)
	b.whileBusy(func() {
		b.fill(10)
		b.fillOn(b.drv, s, b.mem+1<<10, 20)
		require.Zero(t, b.drv.Driver.EventRecord(other, b.s)) // tick 4: work of the library
		b.follow(b.drv, s, b.drv, b.s, e)                     // tick 5
		b.fillOn(b.drv, s, b.mem+1<<10, 30)
	})
	b.requireTicks(map[uint64][2]int{10: {0, 1}, 20: {2, 3}, 30: {6, 7}})
}

// TestWorkOfAnOpenCollectiveIsNotKnown has a collective whose parts surround work of NCCL.
func TestWorkOfAnOpenCollectiveIsNotKnown(t *testing.T) {
	for _, full := range []bool{false, true} { // the pool has no event for the collective itself
		b := newBench(t)
		var x Stream
		x.Adopt(b.d, OwnedStream, b.stream(b.drv))
		s, e, nccl := b.stream(b.drv), b.event(b.drv), b.event(b.drv)
		fill := func(n uintptr) { b.fillOn(b.drv, x.h, b.mem, n) }
		b.whileBusy(func() {
			b.fillOn(b.drv, s, b.mem+1<<10, 10) // ticks 0 and 1
			b.rec.Open(x.Place(), timeline.Op{Group: "g", Name: "ncclAllReduce"})
			if full {
				b.drv.t.events += maxEvents
			}
			b.drv.t.beginWhole(b.drv.Driver, &x) // tick 2
			if full {
				b.drv.t.events -= maxEvents
				require.Zero(t, b.drv.Driver.EventRecord(nccl, x.h))
			}
			fill(20)                                             // ticks 3 and 4
			require.Zero(t, b.drv.Driver.EventRecord(nccl, x.h)) // tick 5
			fill(30)                                             // ticks 6 and 7
			require.Zero(t, b.drv.Driver.EventRecord(nccl, x.h)) // tick 8
			b.follow(b.drv, s, b.drv, x.h, e)                    // tick 9
			b.fillOn(b.drv, s, b.mem+1<<10, 40)                  // ticks 10 and 11
			b.drv.t.endWhole(b.drv.Driver, x.h)                  // tick 12
			b.rec.Shut(x.Place())
			if full {
				require.Zero(t, b.drv.Driver.EventRecord(nccl, x.h))
			}
			fill(50)
		})
		want := map[uint64][2]int{10: {0, 1}, 20: {3, 4}, 30: {6, 7}, 40: {10, 11}, 50: {12, 13}, 0: {2, 12}}
		if full {
			want[50], want[0] = [2]int{13, 14}, [2]int{3, 7} // the collective has the time of its parts
		}
		b.requireTicks(want)
	}
}

// TestEventsThatOthersRecordAreNotKnown waits for an event that a graph has recorded again.
func TestEventsThatOthersRecordAreNotKnown(t *testing.T) {
	b := newBench(t)
	s, u, e := b.stream(b.drv), b.stream(b.drv), b.event(b.drv)
	require.Zero(t, b.drv.StreamBeginCapture(u, cudadrv.CaptureRelaxed))
	require.NoError(t, b.d.RecordExternal(e, u))
	g, r := b.drv.StreamEndCapture(u)
	require.Zero(t, r)
	require.Zero(t, b.drv.GraphDestroy(g))
	b.whileBusy(func() {
		b.fillOn(b.drv, u, b.mem, 10)
		require.Zero(t, b.drv.EventRecord(e, u)) // tick 2
		b.fillOn(b.drv, s, b.mem+1<<10, 20)
		require.Zero(t, b.drv.Driver.EventRecord(e, u)) // tick 5: by the graph
		require.Zero(t, b.drv.StreamWaitEvent(s, e, 0))
		b.fillOn(b.drv, s, b.mem+1<<10, 30)
	})
	b.requireTicks(map[uint64][2]int{10: {0, 1}, 20: {3, 4}, 30: {6, 7}})
	require.NoError(t, b.d.DestroyEvent(e))
	require.Empty(t, marksOf(b.sys).never)
}

// TestALostDeviceDoesNotStopAnother has a stream behind a device that is lost before it tells a time.
func TestALostDeviceDoesNotStopAnother(t *testing.T) {
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
		b.fillOn(first, s, b.mem, 40)
		b.lost.Store(1)
	})
	require.Zero(t, first.Driver.StreamSynchronize(s))
	require.True(t, b.collect())
	for _, p := range second.t.pending[u] {
		p.ticket.Cancel() // the recorder does not wait for it
	}
}

// TestCloseEndsTheMomentsOfItsEvents closes a timing while a stream is behind its operations.
func TestCloseEndsTheMomentsOfItsEvents(t *testing.T) {
	b := newBench(t)
	require.NoError(t, b.rec.Close())
	x := newTiming(b.d, b.rec) // the recorder does not read its times
	drv := timed{Driver: b.drv.Driver, d: b.d, rec: b.rec, t: x}
	s := b.stream(drv)
	b.fillOn(drv, s, b.mem, 10)
	ends := x.behind[s]
	require.Len(t, ends, 1)
	x.close()
	for _, m := range ends {
		require.False(t, m.ahead(nil), "the driver does not get the destroyed event")
		at, known := latest(ends)
		require.True(t, known)
		require.Zero(t, at)
	}
}

// TestAnExposedHandleIsForgottenWithItsStream has a handle that the driver may reuse.
func TestAnExposedHandleIsForgottenWithItsStream(t *testing.T) {
	b := newBench(t)
	for _, kind := range []StreamKind{OwnedStream, ExternalStream} {
		var x Stream
		x.Adopt(b.d, kind, b.stream(b.drv))
		require.Equal(t, x.h, x.Expose())
		require.True(t, b.d.othersUse(x.h))
		require.NoError(t, x.Release())
		require.Equal(t, kind == ExternalStream, b.d.othersUse(x.h))
	}
}
