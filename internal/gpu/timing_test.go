package gpu

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/timeline"
)

// A clock is the clock of the virtual devices. Each record of an event on the stream ticks, or while
// the devices are busy, happens ten seconds after the one before. Other records happen at once. It
// knows which handles exist.
type clock struct {
	mu      sync.Mutex
	ticks   cudadrv.Stream
	busy    bool // no event is passed
	next    time.Time
	at      map[cudadrv.Event]time.Time
	events  map[cudadrv.Event]bool
	streams map[cudadrv.Stream]bool
}

const tick = 10 * time.Second

// left returns how many handles exist.
func (c *clock) left() (events, streams int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.events), len(c.streams)
}

// binding is the driver of a virtual device that binds the context with each call, as CUDA's does.
type binding struct {
	cudadrv.Driver
	ctx cudadrv.Context
	*clock
}

func (b binding) bound() cudadrv.Driver { b.Driver.CtxSetCurrent(b.ctx); return b.Driver }

func (b binding) EventCreate(flags uint32) (cudadrv.Event, cudadrv.Result) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e, r := b.bound().EventCreate(flags)
	if r == cudadrv.Success {
		b.events[e] = true
	}
	return e, r
}

func (b binding) EventDestroy(e cudadrv.Event) cudadrv.Result {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.events, e)
	return b.bound().EventDestroy(e)
}

func (b binding) EventRecord(e cudadrv.Event, s cudadrv.Stream) cudadrv.Result {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.at[e] = time.Now()
	if s == b.ticks || b.busy {
		b.at[e], b.next = b.next, b.next.Add(tick)
	}
	return b.bound().EventRecord(e, s)
}

func (b binding) EventElapsedTime(x, y cudadrv.Event) (float32, cudadrv.Result) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, r := b.bound().EventElapsedTime(x, y)
	return float32(b.at[y].Sub(b.at[x]).Seconds() * 1e3), r
}

func (b binding) StreamCreateWithPriority(flags uint32, p int32) (cudadrv.Stream, cudadrv.Result) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s, r := b.bound().StreamCreateWithPriority(flags, p)
	if r == cudadrv.Success {
		b.streams[s] = true
	}
	return s, r
}

func (b binding) StreamDestroy(s cudadrv.Stream) cudadrv.Result {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.streams, s)
	return b.bound().StreamDestroy(s)
}

func (b binding) EventQuery(e cudadrv.Event) cudadrv.Result {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.busy {
		return cudadrv.ErrorNotReady
	}
	return b.bound().EventQuery(e)
}

func (b binding) StreamWaitEvent(s cudadrv.Stream, e cudadrv.Event, flags uint32) cudadrv.Result {
	return b.bound().StreamWaitEvent(s, e, flags)
}
func (b binding) EventRecordWithFlags(e cudadrv.Event, s cudadrv.Stream, flags uint32) cudadrv.Result {
	return b.bound().EventRecordWithFlags(e, s, flags)
}
func (b binding) EventSynchronize(e cudadrv.Event) cudadrv.Result {
	return b.bound().EventSynchronize(e)
}
func (b binding) StreamSynchronize(s cudadrv.Stream) cudadrv.Result {
	return b.bound().StreamSynchronize(s)
}
func (b binding) StreamIsCapturing(s cudadrv.Stream) (cudadrv.CaptureStatus, cudadrv.Result) {
	return b.bound().StreamIsCapturing(s)
}
func (b binding) StreamBeginCapture(s cudadrv.Stream, m cudadrv.CaptureMode) cudadrv.Result {
	return b.bound().StreamBeginCapture(s, m)
}
func (b binding) StreamEndCapture(s cudadrv.Stream) (cudadrv.Graph, cudadrv.Result) {
	return b.bound().StreamEndCapture(s)
}
func (b binding) GraphDestroy(g cudadrv.Graph) cudadrv.Result { return b.bound().GraphDestroy(g) }
func (b binding) GraphGetNodes(g cudadrv.Graph) (uintptr, cudadrv.Result) {
	return b.bound().GraphGetNodes(g)
}
func (b binding) MemAllocAsync(n uintptr, s cudadrv.Stream) (cudadrv.DevicePtr, cudadrv.Result) {
	return b.bound().MemAllocAsync(n, s)
}
func (b binding) MemFreeAsync(p cudadrv.DevicePtr, s cudadrv.Stream) cudadrv.Result {
	return b.bound().MemFreeAsync(p, s)
}
func (b binding) MemAlloc(n uintptr) (cudadrv.DevicePtr, cudadrv.Result) {
	return b.bound().MemAlloc(n)
}
func (b binding) LaunchKernel(f cudadrv.Function, grid, block [3]uint32, n uint32, s cudadrv.Stream, p unsafe.Pointer) cudadrv.Result {
	return b.bound().LaunchKernel(f, grid, block, n, s, p)
}
func (b binding) MemsetD8Async(p cudadrv.DevicePtr, v uint8, n uintptr, s cudadrv.Stream) cudadrv.Result {
	return b.bound().MemsetD8Async(p, v, n, s)
}

// A bench is a virtual device whose operations are timed by events, as on CUDA. Other libraries may
// use its stream, so each operation has two events.
type bench struct {
	t   *testing.T
	sys *System
	d   *Device
	dir string
	rec *timeline.Recorder
	drv timed
	s   cudadrv.Stream
	mem cudadrv.DevicePtr

	clock   *clock
	begin   time.Time // the first tick
	timings []*timing // of the devices
	lost    atomic.Int32
}

func newBench(t *testing.T) *bench { return newBenchWith(t, "") }

func newBenchWith(t *testing.T, faults string) *bench {
	runtime.LockOSThread() // binding's two calls must be on one thread
	t.Cleanup(runtime.UnlockOSThread)
	b := &bench{t: t, dir: t.TempDir(), begin: time.Now()}
	b.clock = &clock{next: b.begin, at: map[cudadrv.Event]time.Time{}, events: map[cudadrv.Event]bool{}, streams: map[cudadrv.Stream]bool{}}
	back, err := OpenBackend(&BackendConfig{Backend: Virtual, Devices: 2, Faults: faults})
	require.NoError(t, err)
	b.lost.Store(-1)
	b.sys = NewSystem(back, plainErrors{lost: &b.lost}, time.Minute)
	b.rec, err = timeline.New(b.dir)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.rec.Close()) })
	b.drv = b.device(0)
	b.d = b.drv.d
	drv := b.drv.Driver
	var r cudadrv.Result
	b.s, r = drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0)
	require.Zero(t, r)
	b.clock.mu.Lock()
	b.clock.ticks = b.s
	b.clock.mu.Unlock()
	b.d.exposed.Store(b.s, true)
	b.mem, r = drv.MemAlloc(1 << 20)
	require.Zero(t, r)
	return b
}

// device returns the decorated driver of a device.
func (b *bench) device(ordinal int32) timed {
	b.t.Helper()
	h, r := b.sys.Driver.DeviceGet(ordinal)
	require.Zero(b.t, r)
	d := b.sys.Add(h).device()
	ctx, err := d.Context()
	require.NoError(b.t, err)
	var drv cudadrv.Driver = binding{b.sys.Driver, ctx, b.clock}
	d.binding.Store(&drv)
	t := d.timingOf(b.rec)
	b.timings = append(b.timings, t)
	return timed{Driver: drv, d: d, rec: b.rec, t: t}
}

// plainErrors constructs errors without the types of package device.
type plainErrors struct {
	Errors
	lost *atomic.Int32 // ordinal of the lost device, or -1
}

func (plainErrors) Failed(op string, ordinal int, r cudadrv.Result) error { return r }
func (p plainErrors) Lost(ordinal int) error {
	if p.lost != nil && p.lost.Load() == int32(ordinal) {
		return cudadrv.ErrorLaunchFailed
	}
	return nil
}

// fill enqueues a fill of n bytes.
func (b *bench) fill(n uintptr) {
	b.t.Helper()
	require.Zero(b.t, b.drv.MemsetD8Async(b.mem, 1, n, b.s))
}

// collect collects until no operation is pending, and reports whether that happened.
func (b *bench) collect() bool {
	x := b.drv.t
	return poll.UntilNoLaterThan(time.Minute, func() bool {
		x.collect()
		x.mu.Lock()
		defer x.mu.Unlock()
		return len(x.pending) == 0
	})
}

// records closes the recording and returns its records, in call order.
func (b *bench) records() (list []timeline.Record) {
	b.t.Helper()
	require.NoError(b.t, b.rec.Close())
	files, err := filepath.Glob(filepath.Join(b.dir, "*"))
	require.NoError(b.t, err)
	require.Len(b.t, files, 1)
	f, err := os.Open(files[0])
	require.NoError(b.t, err)
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		var x timeline.Record
		require.NoError(b.t, json.Unmarshal(lines.Bytes(), &x))
		if x.Kind != "" {
			list = append(list, x)
		}
	}
	slices.SortFunc(list, func(x, y timeline.Record) int { return int(x.Order) - int(y.Order) })
	return list
}

// TestPairsOfEventsTimeOperations enqueues fills, alone and in a collective. A refused one, and one
// in a capture, are not recorded. The clocks of the device and the host are the same, and the
// recorder compares them as exactly as the whole test takes.
func TestPairsOfEventsTimeOperations(t *testing.T) {
	b := newBench(t)
	b.fill(10)
	require.NotZero(t, b.drv.MemsetD8Async(b.mem, 1, 10, 12345))
	require.NotZero(t, b.drv.LaunchKernel(1, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, b.s, nil))
	require.Zero(t, b.drv.StreamBeginCapture(b.s, cudadrv.CaptureRelaxed))
	b.fill(20)
	g, r := b.drv.StreamEndCapture(b.s)
	require.Zero(t, r)
	nodes, r := b.drv.GraphGetNodes(g)
	require.Zero(t, r)
	require.EqualValues(t, 1, nodes, "no event is captured")
	require.Zero(t, b.drv.GraphDestroy(g))
	var s Stream
	s.Adopt(b.d, ExternalStream, b.s)
	b.rec.Open(s.Place(), timeline.Op{Group: "g", Name: "ncclAllReduce"})
	b.drv.t.beginWhole(b.drv.Driver, &s)
	b.fill(30)
	b.drv.t.endWhole(b.drv.Driver, b.s)
	b.rec.Shut(s.Place())
	b.fill(40)
	b.rec.Open(s.Place(), timeline.Op{Group: "g", Name: "ncclBroadcast"}) // whose kernel the driver does not see
	b.drv.t.beginWhole(b.drv.Driver, &s)
	require.Zero(t, b.drv.Driver.MemsetD8Async(b.mem, 1, 50, b.s))
	b.drv.t.endWhole(b.drv.Driver, b.s)
	b.rec.Shut(s.Place())
	require.Zero(t, b.drv.StreamSynchronize(b.s))
	list := slices.DeleteFunc(b.records(), func(x timeline.Record) bool { return x.Kind == timeline.Wait })
	require.Len(t, list, 5)
	require.Equal(t, "ncclBroadcast", list[4].Name)
	require.Equal(t, []uint64{10, 0, 30, 40}, []uint64{list[0].Bytes, list[1].Bytes, list[2].Bytes, list[3].Bytes})
	require.Equal(t, timeline.Collective, list[1].Kind)
	require.Equal(t, list[1].Order, list[2].Parent)
	const rounding = time.Millisecond // of float32
	exact := float64(time.Since(b.begin) + rounding)
	for i, ticks := range [][2]int64{{0, 1}, {3, 6}, {4, 5}, {7, 8}, {9, 10}} { // the refused kernel has tick 2
		x := list[i]
		require.InDelta(t, b.rec.At(b.begin.Add(time.Duration(ticks[0])*tick)), x.Begin, exact)
		require.InDelta(t, (ticks[1]-ticks[0])*int64(tick), x.End-x.Begin, float64(rounding))
	}
}

// TestRecordingReleasesItsHandles closes a recording with an operation that is between its events, and
// uses it afterwards.
func TestRecordingReleasesItsHandles(t *testing.T) {
	b := newBench(t)
	for range 3 {
		b.fill(1)
	}
	drv := b.drv.Driver
	between := b.drv.t.take(drv, b.s)
	require.NotNil(t, between)
	b.records()
	events, streams := b.clock.left()
	require.Equal(t, 2, events, "between")
	require.Equal(t, 1, streams, "the test's")
	b.drv.t.end(drv, between, true)
	b.fill(1)
	events, _ = b.clock.left()
	require.Zero(t, events)

	next, err := timeline.New(t.TempDir())
	require.NoError(t, err)
	defer next.Close()
	timing := b.d.timingOf(next)
	require.NotNil(t, timing)
	require.Nil(t, b.d.timingOf(b.rec), "a late call")
	require.Same(t, timing, b.d.timingOf(next))
}

// TestCollectReturnsIfTheDeviceHangs has a stream whose first event never completes: the one that
// compares the clocks.
func TestCollectReturnsIfTheDeviceHangs(t *testing.T) {
	b := newBenchWith(t, "hang@cuEventRecord#1")
	b.drv.t.collect()
	b.drv.t.collecting.Lock()
	require.NotZero(t, b.drv.t.side)
	require.Zero(t, b.drv.t.anchor)
	b.drv.t.collecting.Unlock()
	require.NoError(t, b.rec.Close())
	events, streams := b.clock.left()
	require.Zero(t, events)
	require.Equal(t, 1, streams, "the test's")
}

// TestCapturesOfOthersStayValid collects while another library captures in the mode global.
func TestCapturesOfOthersStayValid(t *testing.T) {
	b := newBench(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	drv := b.drv.Driver
	other, r := drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0)
	require.Zero(t, r)
	b.fill(1)
	require.Zero(t, drv.StreamSynchronize(b.s))
	require.Zero(t, drv.StreamBeginCapture(other, cudadrv.CaptureGlobal))
	done := make(chan bool)
	go func() { done <- b.collect() }()
	require.True(t, <-done)
	g, r := drv.StreamEndCapture(other)
	require.Zero(t, r)
	require.Zero(t, drv.GraphDestroy(g))
}

// TestElapsedMilliseconds converts what the driver says about two events.
func TestElapsedMilliseconds(t *testing.T) {
	x := timing{anchorAt: time.Unix(100, 0)}
	require.Equal(t, time.Unix(100, 250_500_000), x.at(250.5))
	require.Equal(t, time.Unix(99, 750_000_000), x.at(-250))
}

// TestPairsAreReused enqueues more operations than the pool has pairs, one after the other, and then
// too many at once.
func TestPairsAreReused(t *testing.T) {
	b := newBench(t)
	for range 10 {
		b.fill(1)
		require.Zero(t, b.drv.Driver.StreamSynchronize(b.s))
		require.True(t, b.collect())
	}
	b.drv.t.mu.Lock()
	require.Equal(t, 2, b.drv.t.events, "of one pair")
	b.drv.t.events = maxEvents
	b.drv.t.mu.Unlock()
	b.drv.t.collecting.Lock() // the recorder cannot collect
	b.fill(2)
	b.fill(3)
	b.drv.t.collecting.Unlock()
	list := b.records()
	require.EqualValues(t, 1, list[0].Count)
	require.Equal(t, timeline.Dropped, list[0].Kind)
	require.EqualValues(t, 2, list[len(list)-1].Bytes)
}

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

// stream returns a stream that only Chorus uses.
func (b *bench) stream(drv timed) cudadrv.Stream {
	b.t.Helper()
	s, r := drv.Driver.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0)
	require.Zero(b.t, r)
	return s
}

// event returns a new event.
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

// follow orders a stream of a device after a stream of a device, by the event.
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
