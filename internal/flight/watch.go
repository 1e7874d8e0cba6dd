package flight

import (
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
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

// Observe records completions. ahead has the marks that their streams have not passed, the
// oldest first. blind reports that a capture prevents a query of the latest operation's
// stream. If operations may have been aborted, Observe records nothing.
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
	blind, err = w.follow()
	return ahead, blind, err
}

// Inspect records completions, and returns an error if an operation has timed out.
func (w *Watch) Inspect() error {
	r := w.rec
	ahead, blind, err := w.Observe()
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
	return nil
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

// follow queries whether the latest operation has completed. If other work is enqueued
// behind it, follow sets a mark. blind reports that a capture prevents the query.
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
