package nccl

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/stream"
)

// recorded has recorded n collectives, of which NCCL has taken all.
func (r *idleRank) recorded(n int) *collective.Recorder {
	rec := collective.NewRecorder(16)
	rec.Rank = 1
	rec.Unwatched(0)
	for range n {
		r.record(rec, false)
	}
	return rec
}

func (r *idleRank) record(rec *collective.Recorder, captured bool) collective.Entry {
	o := collective.Call{Request: collective.Request{Kind: collective.AllReduce, N: 64, Captured: captured}, Stream: r.s}
	rec.Schedule(&o, collective.Now())
	rec.Accept(&o)
	return rec.Entry(o.Record)
}

// What is captured does not run and is not waited for.
func TestOldestIsNotCaptured(t *testing.T) {
	r := newIdleRank(t)
	rec := r.recorded(0)
	defer rec.Close()
	r.record(rec, true)
	_, ok := rec.Suspects(nil)
	require.False(t, ok)
	want := r.record(rec, false)
	got, ok := rec.Suspects(nil)
	require.True(t, ok)
	require.Equal(t, want.ID, got.First.ID)
}

// A rank that has issued the operation is not behind, and one that has not is. Of several
// operations, those behind the first that a rank has not issued are not to blame.
func TestBehindAndAwaited(t *testing.T) {
	r := newIdleRank(t)
	mine := r.recorded(5)
	defer mine.Close()
	r.c.rec = mine // of which the watch knows nothing
	mine.Complete(2, uintptr(gpu.StreamOf(r.s).Raw()))
	for theirs, want := range map[int]struct {
		behind []int
		last   uint64
		text   string
	}{
		2: {[]int{1}, 3, "nccl: ncclAllReduce(64 x invalid, sum) as collective 3 on rank"},
		3: {[]int{1}, 4, "nccl: one of collectives 3 to 4, such as ncclAllReduce(64 x invalid, sum), on rank"},
		4: {[]int{1}, 5, "nccl: one of collectives 3 to 5, such as ncclAllReduce(64 x invalid, sum), on rank"},
		5: {nil, 5, "nccl: one of collectives 3 to 5, such as ncclAllReduce(64 x invalid, sum), on rank"},
	} {
		rec := r.recorded(theirs)
		others := []*member{{Recorder: rec}}
		x, found := mine.Suspects(nil)
		require.True(t, found)
		x.Narrow(mine, recorders(others))
		late := r.c.errTimeout(x, time.Second, others)
		require.Equal(t, want.behind, late.Behind, "%d issued", theirs)
		require.Equal(t, []uint64{3, want.last}, []uint64{late.Operation.Collective, late.Last.Collective}, "%d issued", theirs)
		require.ErrorContains(t, late, want.text, "%d issued", theirs)
		rec.Close()
	}
}

// An operation that the ring has lost is timed by the first mark behind it.
func TestDeadlineOfWhatTheRingHasLost(t *testing.T) {
	r := newIdleRank(t)
	rec := r.c.rec
	rec.Resize(1)
	rec.Unwatched(time.Hour)
	open := streamtest.Hold(t, r.s)
	defer open()
	require.NoError(t, AllReduce(r.c, r.s, r.y, r.x, Sum))
	last, s, _, held := rec.Latest()
	require.True(t, held)
	require.NoError(t, setMark(r.c, s, collective.Mark{Record: last, At: rec.Clock()}))
	require.NoError(t, gpu.StreamOf(s).Release())
	require.NoError(t, AllReduce(r.c, r.s, r.y, r.x, Sum))
	require.NoError(t, r.c.watch.Inspect(), "all are young")
	r.c.marks.Age(2 * time.Hour)
	var late *TimeoutError
	require.ErrorAs(t, r.c.watch.Inspect(), &late)
	require.Greater(t, late.Age, time.Hour)
}

// inCapture calls f while the rank's stream is captured, though not by Chorus.
func (r *idleRank) inCapture(t *testing.T, f func()) {
	require.NoError(t, gpu.DeviceOf(r.c.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.StreamBeginCapture(gpu.StreamOf(r.s).Raw(), cudadrv.CaptureRelaxed)
	}))
	f()
	var captured cudadrv.Graph
	require.NoError(t, gpu.DeviceOf(r.c.dev).Do(func(drv cudadrv.Driver) (result cudadrv.Result) {
		captured, result = drv.StreamEndCapture(gpu.StreamOf(r.s).Raw())
		return result
	}))
	require.NoError(t, gpu.DeviceOf(r.c.dev).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.GraphDestroy(captured) }))
}

// While the process captures, nobody can ask how far an operation is that has no mark
// behind it: that time does not count.
func TestCapturesAreNotCounted(t *testing.T) {
	r := newIdleRank(t)
	rec := r.c.rec
	rec.Unwatched(time.Hour)
	open := streamtest.Hold(t, r.s)
	defer open()
	issue := func() { require.NoError(t, AllReduce(r.c, r.s, r.y, r.x, Sum)) }
	issue()
	older := func() { rec.Age(1, 2*time.Hour) }
	older()
	rec.StartWatch()
	rec.LastQuery(2 * time.Hour)
	r.inCapture(t, func() { require.NoError(t, r.c.watch.Inspect()) })
	require.NoError(t, r.c.watch.Inspect(), "two hours were those of the capture")
	issue()
	age := time.Duration(rec.Clock() - rec.Entry(2).Begun)
	require.GreaterOrEqual(t, age, time.Duration(0), "the capture was before it, and gives it no time")
	require.Less(t, age, time.Hour, "nor takes it some")
	older()
	var late *TimeoutError
	require.ErrorAs(t, r.c.watch.Inspect(), &late)
	require.Greater(t, late.Age, time.Hour)
	require.Less(t, late.Age, 3*time.Hour)
}

// A mark behind an operation tells that it hangs, also while the process captures.
func TestMarksTellWhileOthersCapture(t *testing.T) {
	r := newIdleRank(t)
	rec := r.c.rec
	rec.Unwatched(time.Hour)
	open := streamtest.Hold(t, r.s)
	defer open()
	require.NoError(t, AllReduce(r.c, r.s, r.y, r.x, Sum))
	require.NoError(t, r.c.watch.Inspect(), "it is young, and gets a mark")
	rec.LastQuery(2 * time.Hour)
	rec.Age(1, 2*time.Hour)
	r.inCapture(t, func() {
		var late *TimeoutError
		require.ErrorAs(t, r.c.watch.Inspect(), &late)
	})
}

// What came before the watch began is no time in which it could not ask.
func TestTheWatchBeginsNow(t *testing.T) {
	r := newIdleRank(t)
	r.c.rec.SetTimeout(time.Hour)
	r.c.rec.StartWatch()
	r.c.rec.LastQuery(2 * time.Hour)
	over := make(chan struct{})
	close(over)
	r.c.watch.Run(over) // which begins and ends
	require.Less(t, collective.Now()-r.c.rec.LastQuery(0), int64(time.Hour))
}

// A stream that the driver fails to ask for takes part in no capture: the error counts.
func TestWhoCannotBeAskedIsNotCaptured(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuStreamIsCapturing#1=CUDA_ERROR_INVALID_VALUE"})
	cs, err := NewCommunicators(testgpu.Context(t), sys.Devices(), nil)
	require.NoError(t, err)
	r := makeIdle(t, cs[0])
	r.c.rec.Unwatched(time.Hour)
	open := streamtest.Hold(t, r.s)
	defer open()
	require.NoError(t, AllReduce(r.c, r.s, r.y, r.x, Sum))
	require.ErrorIs(t, r.c.watch.Inspect(), device.ErrorInvalidValue)
	require.NoError(t, r.c.watch.Inspect())
}

// A refusingNCCL takes no sends, and has no gather.
type refusingNCCL struct{ *idleNCCL }

func (refusingNCCL) Has(f ncclapi.Func) bool { return f != ncclapi.FuncAlltoAll }

func (l refusingNCCL) Collective(c ncclapi.Call) ncclapi.Result {
	if c.Func == ncclapi.FuncSend {
		return ncclapi.InvalidUsage
	}
	return l.idleNCCL.Collective(c)
}

// The first that NCCL refuses of what an operation is made of is what it returns, also
// where the next would be taken.
func TestGroupedOperationThatIsRefused(t *testing.T) {
	r := newIdleRank(t)
	r.c.api = refusingNCCL{r.c.api.(*idleNCCL)}
	for name, issue := range map[string]func() error{
		"gather":     func() error { return Gather(r.c, r.s, r.y, r.x, 0) },
		"scatter":    func() error { return Scatter(r.c, r.s, r.y, r.x, 0) },
		"all-to-all": func() error { return AllToAll(r.c, r.s, r.y, r.x) },
	} {
		require.ErrorIs(t, issue(), ErrorInvalidUsage, name)
	}
}

// An entry has nothing of the operation that was in its place before.
func TestEntryIsNew(t *testing.T) {
	r := newIdleRank(t)
	rec := r.recorded(16)
	defer rec.Close()
	rec.Complete(1, uintptr(gpu.StreamOf(r.s).Raw()))
	rec.Remove(2)
	for range 2 {
		e := r.record(rec, false)
		o := e.Operation()
		require.Equal(t, "scheduled", o.State)
		require.Zero(t, o.Completed)
		list := rec.Trace()
		require.Equal(t, o.Record, list[len(list)-1].Record, "it is not refused")
	}
}

func setMark(c *Communicator, s *stream.Stream, k collective.Mark) error {
	_, err := c.marks.Set(s, k)
	return err
}
