package collective

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/timeline"
	"github.com/gochorus/chorus/stream"
)

const (
	maxInterval = time.Second
	minInterval = time.Millisecond
)

// An Owner is the rank whose operations a Watch monitors.
type Owner interface {
	// Err returns why the rank has failed, or nil.
	Err() error
	// Closed reports whether the rank was closed.
	Closed() bool
	// RecordPassed records that a stream has passed the operations up to a record. It returns
	// an error if that does not prove that the operations have completed.
	RecordPassed(record uint64, stream uintptr) error
	// Others returns the recorders of the other ranks of this process.
	Others() []*Recorder
	// TimedOut returns the error of operations that have exceeded the timeout.
	TimedOut(x Suspicion, age time.Duration) error
	// LaunchTimedOut returns the error of a launch of one of these kinds on a stream that has exceeded the timeout.
	LaunchTimedOut(kinds Launches, on string, age, timeout time.Duration) error
	// Fail fails the rank.
	Fail(cause error)
}

// A Watch is the watchdog of a rank: it records completions, and detects operations that
// hang.
type Watch struct {
	dev   *device.Device
	rec   *Recorder
	marks *Marks
	owner Owner
}

// NewWatch returns the Watch of a rank.
func NewWatch(dev *device.Device, rec *Recorder, marks *Marks, owner Owner) *Watch {
	return &Watch{dev, rec, marks, owner}
}

// interval is the interval of the checks.
func (w *Watch) interval() time.Duration {
	shortest := w.rec.shortestTimeout()
	if shortest <= 0 {
		return maxInterval
	}
	return min(max(shortest/8, minInterval), maxInterval)
}

// Run checks the rank's pending operations about once a second, on its own goroutine, so
// that operations need no goroutine. It ends when all operations have completed, and the
// next operation starts it again.
func (w *Watch) Run(ending <-chan struct{}) {
	interval := w.interval()
	tick := time.NewTicker(interval)
	defer tick.Stop()
	w.rec.StartWatch()
	var asked time.Time
	var answer chan error // nil while no query is in progress
	for {
		var err error
		select {
		case <-ending:
			return
		case err = <-answer:
			answer = nil
			if err == nil && w.rec.StopWatch() {
				return
			}
		case <-tick.C:
			if w.owner.Err() != nil || w.owner.Closed() {
				return
			}
			SetClock()
			if now := w.interval(); now != interval { // an operation with another timeout has come
				interval = now
				tick.Reset(interval)
			}
			if answer == nil {
				asked, answer = time.Now(), make(chan error, 1)
				go func(to chan<- error) { to <- w.Inspect() }(answer)
			} else {
				err = w.inspectUnanswered(time.Since(asked))
			}
		}
		if err != nil {
			w.owner.Fail(err)
			return
		}
	}
}

// Observe records completions. ahead has the marks that their streams have not
// passed, the oldest first. blind reports that a capture prevents a query of
// the latest operation's stream. Observe records nothing if operations may have
// been aborted.
func (w *Watch) Observe() (ahead []Mark, blind bool, err error) {
	passed, ahead, err := w.marks.Query(w.rec.InOrder())
	if err != nil {
		return nil, false, err
	}
	for _, k := range passed {
		if k.Record > 0 && w.owner.RecordPassed(k.Record, k.Stream) != nil {
			return nil, false, nil // the end of the communicator is reported elsewhere
		}
	}
	w.rec.SetReached(passed, ahead)
	w.marks.durations(w.rec.setTook)
	blind, err = w.follow()
	return ahead, blind, err
}

// Inspect records completions, and returns an error if an operation has timed out.
func (w *Watch) Inspect() error {
	r := w.rec
	ahead, blind, err := w.Observe()
	if err == nil {
		err = w.inspectLaunches()
	}
	x, ok := r.Suspects(ahead)
	// An operation before a mark that is not passed is known to be pending, even during
	// captures.
	blind = blind && ok && !x.Marked
	r.RecordQuery(blind)
	switch {
	case err != nil:
		return err
	case blind || !ok:
		return w.inspectUnaccepted()
	}
	x.Narrow(w.rec, w.owner.Others())
	x.setTimeout(r)
	if age := time.Duration(r.Clock() - x.Begun); exceeded(age, x.Timeout) {
		return w.owner.TimedOut(x, age)
	}
	return w.inspectUnaccepted()
}

// inspectUnanswered is Inspect while the driver has not answered for some time. The driver
// does not answer while a launch waits for room in a full stream, which an operation that
// hangs may cause.
func (w *Watch) inspectUnanswered(since time.Duration) error {
	if err := w.inspectUnaccepted(); err != nil || since <= maxInterval {
		return err
	}
	if x, ok := w.rec.Suspects(nil); ok {
		x.Narrow(w.rec, w.owner.Others())
		x.First.started, x.First.queued = 0, false // as of the last answer
		if x.setTimeout(w.rec); exceeded(since, x.Timeout) {
			return w.owner.TimedOut(x, time.Duration(w.rec.Clock()-x.First.Begun))
		}
	}
	return w.inspectUnansweredLaunches(since)
}

// inspectUnaccepted returns an error for an operation that has been in NCCL for too long. It
// queries no stream, so it works during captures too.
func (w *Watch) inspectUnaccepted() error {
	e, ok := w.rec.Unaccepted()
	if !ok {
		return nil
	}
	if age := time.Duration(Now() - e.Created); exceeded(age, e.timeout) {
		return w.owner.TimedOut(Suspicion{First: e, Last: e, Timeout: e.timeout}, age)
	}
	return nil
}

// follow queries whether the latest operation has completed, and sets a mark if
// other work is enqueued behind it. blind reports that a capture prevents the
// query.
func (w *Watch) follow() (blind bool, err error) {
	r := w.rec
	last, s, behind, held := r.Latest()
	if !held {
		if behind {
			r.SetUnknown(last) // a destroyed stream cannot be queried
		}
		return false, nil
	}
	defer gpu.StreamOf(s).Release()
	blind = true
	gpu.Outside(func() {
		if blind, err = w.captured(s); blind || err != nil {
			return
		}
		var done bool
		done, err = QueryDone(w.dev, "cuStreamQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(gpu.StreamOf(s).Raw()) })
		switch {
		case done:
			_ = w.owner.RecordPassed(last, uintptr(gpu.StreamOf(s).Raw())) // if the communicator ends, nothing is recorded
		case err == nil && w.marks.Newest() < last:
			_, err = w.marks.Set(s, Mark{Record: last, At: r.Clock()})
		}
	})
	return blind, err
}

// captured reports whether the stream takes part in a capture that Chorus did not begin,
// and that must not be disturbed.
func (w *Watch) captured(s *stream.Stream) (bool, error) {
	status := cudadrv.CaptureNone
	told, err := QueryDone(w.dev, "cuStreamIsCapturing", func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, r = drv.StreamIsCapturing(gpu.StreamOf(s).Raw())
		return r
	})
	return err == nil && (!told || status != cudadrv.CaptureNone), err
}

// Marks are events on the streams of a communicator, which show how far its operations have
// progressed. Two events for each operation would add a quarter to its time. Marks are
// therefore set only around an operation that comes some time after the last marks. The event
// before the operation shows whether its stream has reached it, and the event behind it whether
// it has completed. If one of many operations between two marks hangs, the marks do not show
// which one, nor whether other work between them does.
type Marks struct {
	dev    *device.Device
	mu     sync.Mutex
	list   [numMarks]Mark
	next   int
	closed bool

	last atomic.Int64 // time of the last request for a mark
}

// A Mark is a position on a stream.
type Mark struct {
	event  cudadrv.Event
	used   bool
	timed  bool // the time since the mark before it was read
	Stream uintptr
	Record uint64 // the mark is after the stream's operations up to this one; 0 if it says nothing about them
	Next   uint64 // the stream's operations from this one on are after the mark; 0 if that is not known
	Direct bool   // operation Next follows the mark directly: a stream that has passed the mark has reached it
	At     int64
}

const (
	numMarks  = 32
	markEvery = int64(2 * time.Millisecond) // two marks take a few thousandths of this time
)

// closeTimeout is how long Close waits for a call of the driver to return.
const closeTimeout = 100 * time.Millisecond

// NewMarks returns the marks of a device.
func NewMarks(dev *device.Device) *Marks { return &Marks{dev: dev} }

// Due reports whether it is time for a mark.
func (m *Marks) Due(t int64) bool { return t-m.last.Load() > markEvery }

// SetRequested records the time of a request for a mark.
func (m *Marks) SetRequested(t int64) { m.last.Store(t) }

// Set sets a mark on a stream, which must not be in a capture. The mark replaces the oldest one,
// or the newest one if the stream has not passed the oldest: the oldest one then shows
// which operation hangs. Set returns the mark that it has replaced if its stream has passed it.
func (m *Marks) Set(s *stream.Stream, mark Mark) (passed Mark, err error) {
	if !m.mu.TryLock() {
		return passed, nil // this mark is optional
	}
	defer m.mu.Unlock()
	if m.closed {
		return passed, nil
	}
	k := &m.list[m.next]
	if k.used {
		if ok, err := m.passed(k); err == nil && !ok {
			m.next = (m.next + numMarks - 1) % numMarks
			k = &m.list[m.next]
		} else if ok {
			passed = *k
		}
	}
	if k.event == 0 {
		err := gpu.DeviceOf(m.dev).DoRelaxed(func(drv cudadrv.Driver) (r cudadrv.Result) {
			k.event, r = drv.EventCreate(cudadrv.EventDefault)
			return r
		})
		if err != nil {
			return passed, err
		}
	}
	k.used, k.timed = false, false
	err = gpu.DeviceOf(m.dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(k.event, gpu.StreamOf(s).Raw()) })
	if err != nil {
		return passed, err
	}
	mark.event, mark.used, mark.Stream = k.event, true, uintptr(gpu.StreamOf(s).Raw())
	*k = mark
	m.next = (m.next + 1) % numMarks
	return passed, nil
}

func (m *Marks) passed(k *Mark) (passed bool, err error) {
	return QueryDone(m.dev, "cuEventQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(k.event) })
}

// Query queries the marks, the newest first. passed has the marks that their streams have
// passed, ahead the others. If operations complete in order, a passed mark behind operations
// implies that all earlier ones are passed.
func (m *Marks) Query(ordered bool) (passed, ahead []Mark, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil, nil, nil
	}
	for i := range numMarks {
		k := &m.list[(m.next+numMarks-1-i)%numMarks]
		if !k.used {
			continue
		}
		ok, err := m.passed(k)
		if err != nil {
			return passed, ahead, err
		}
		if !ok {
			ahead = append(ahead, *k)
			continue
		}
		if passed = append(passed, *k); ordered && k.Record > 0 {
			break
		}
	}
	slices.Reverse(ahead)
	return passed, ahead, nil
}

// Newest returns the record of the newest mark.
func (m *Marks) Newest() uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	if k := &m.list[(m.next+numMarks-1)%numMarks]; k.used {
		return k.Record
	}
	return 0
}

// Close destroys the events, unless a call of the driver hangs.
func (m *Marks) Close() {
	if !poll.UntilNoLaterThan(closeTimeout, m.mu.TryLock) {
		return
	}
	defer m.mu.Unlock()
	m.closed = true
	for i := range m.list {
		if e := m.list[i].event; e != 0 {
			_ = gpu.DeviceOf(m.dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventDestroy(e) })
		}
	}
}

// QueryDone queries the driver whether something has completed.
func QueryDone(dev *device.Device, op string, query func(cudadrv.Driver) cudadrv.Result) (done bool, err error) {
	result := cudadrv.Success
	err = gpu.DeviceOf(dev).DoRelaxed(func(drv cudadrv.Driver) cudadrv.Result {
		switch result = query(drv); result {
		case cudadrv.ErrorNotReady, cudadrv.ErrorCapturedEvent, cudadrv.ErrorStreamCaptureUnsupported, cudadrv.ErrorStreamCaptureImplicit:
			return cudadrv.Success
		}
		return result
	})
	return err == nil && result == cudadrv.Success, err
}

// open begins the operation in the timeline, which Accept ends.
func (r *Recorder) open(t *timeline.Recorder, o *Call) {
	if r.shown.Swap(t) != t {
		r.show(t, gpu.StreamOf(o.Stream).Place().Device)
	}
	k := &Kinds[o.Kind]
	op := timeline.Op{
		Group: r.Group, Name: o.Kind.String(), Sequence: o.Number, Transfer: k.Peer, Rank: r.Rank, Peer: -1,
		Bytes: uint64(max(o.In, o.Out) * o.DType.Size()),
	}
	if k.Rooted {
		op.Peer = o.Root
	}
	gpu.StreamOf(o.Stream).OpenCollective(t, op)
}

// show describes the rank to the timeline.
func (r *Recorder) show(t *timeline.Recorder, device int) {
	r.mu.Lock()
	r.ordinal = device
	m := &timeline.Membership{Group: r.Group, Label: r.Name, Rank: r.Rank, Size: r.Size, World: r.world, WorldSize: r.worldSize}
	r.mu.Unlock()
	registerAccount()
	t.SetObserver(countDuration)
	t.Add(timeline.Record{Kind: timeline.Member, Name: r.Device, Device: device, Begin: t.Now(), Member: m})
}

// refuseOpen removes an operation that was refused from the timeline.
func (r *Recorder) refuseOpen(e *Entry) {
	if t := timeline.Current(); t != nil && r.shown.Load() == t {
		t.Refuse(timeline.Stream{Device: r.ordinal, Handle: uint64(e.stream)})
	}
}
