package collective

import (
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/stream"
)

// A launchStream is a stream on which graphs with operations of a rank, or one-sided operations, were launched. The flight
// recorder does not have them. A launch only counts: the watchdog sets marks behind the launches, and so do some launches. The recorder's mu guards all fields but marks.
type launchStream struct {
	s        *stream.Stream // retained
	marks    *Marks         // whose records are numbers of launches
	launched uint64         // number of launches
	marked   uint64         // the latest launch with a mark
	ended    uint64         // launches that are known to have ended
	progress int64          // when a launch was last observed to have ended, or the first was enqueued after all had, by the recorder's clock
	timeout  time.Duration  // of the latest launch
	kinds    Launches       // of all launches
}

// Launches are kinds of launches.
type Launches uint8

const (
	GraphLaunches    Launches = 1 << iota // of graphs with operations of the rank
	OneSidedLaunches                      // one-sided operations
)

// markedLaunches is the maximum number of launches without a mark between them. If a program launches faster than
// the device works, the marks show progress.
const markedLaunches = 64

// Launched records a launch with that many collectives, which has been enqueued on s outside of captures. It reports whether the
// caller must start the watchdog.
func (w *Watch) Launched(s *stream.Stream, kind Launches, collectives uint64) (watch bool) {
	w.rec.launchedCollectives.Add(collectives)
	l, n, unmarked, watch := w.rec.launch(s, kind)
	if l == nil {
		return watch
	}
	if t := Now(); l.marks.Due(t) || unmarked >= markedLaunches {
		l.marks.SetRequested(t)
		gpu.Outside(func() {
			if blind, err := w.captured(s); !blind && err == nil { // a lost device is reported elsewhere
				_ = w.markLaunch(l, n)
			}
		})
	}
	return watch
}

// markLaunch sets a mark behind the first n launches.
func (w *Watch) markLaunch(l *launchStream, n uint64) error {
	_, err := l.marks.Set(l.s, Mark{Record: n, At: w.rec.Clock()})
	if err == nil {
		w.rec.mu.Lock()
		l.marked = max(l.marked, n)
		w.rec.mu.Unlock()
	}
	return err
}

// launch counts a launch, and returns its stream, its number there and the number of launches since the last mark. It
// returns nil if launches have no deadline.
func (r *Recorder) launch(s *stream.Stream, kind Launches) (l *launchStream, n, unmarked uint64, watch bool) {
	timeout := time.Duration(r.timeout.Load())
	if timeout == 0 {
		return nil, 0, 0, false
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, 0, 0, false
	}
	for _, x := range r.launches {
		if x.s == s {
			l = x
		}
	}
	if l == nil {
		if !gpu.StreamOf(s).Retain() {
			return nil, 0, 0, false
		}
		l = &launchStream{s: s, marks: NewMarks(s.Device())}
		r.launches = append(r.launches, l)
	}
	if l.launched == l.ended {
		l.progress = r.Clock()
	}
	l.launched++
	l.timeout = timeout
	l.kinds |= kind
	if r.shortest == 0 || timeout < r.shortest {
		r.shortest = timeout
	}
	watch = !r.watched
	r.watched = true
	return l, l.launched, l.launched - l.marked, watch
}

// LaunchedCollectives returns how many collectives launches of graphs have enqueued. The ranks that launch the same work have the same
// number, also if they capture it in different graphs.
func (r *Recorder) LaunchedCollectives() uint64 { return r.launchedCollectives.Load() }

// launchesPending reports whether a launch is not known to have ended. mu is held.
func (r *Recorder) launchesPending() bool {
	for _, l := range r.launches {
		if l.launched > l.ended {
			return true
		}
	}
	return false
}

// waitsForLaunches returns for how long no launch is known to have ended while launches are pending on some stream, or 0. mu is held.
func (r *Recorder) waitsForLaunches() (longest time.Duration) {
	for _, l := range r.launches {
		if l.launched > l.ended {
			longest = max(longest, time.Duration(r.Clock()-l.progress), 1)
		}
	}
	return longest
}

// takeLaunches removes the streams with launches, for endLaunches. mu is held.
func (r *Recorder) takeLaunches() []*launchStream {
	list := r.launches
	r.launches = nil
	return list
}

// endLaunches releases streams with launches.
func endLaunches(list []*launchStream) {
	for _, l := range list {
		l.marks.Close()
		_ = gpu.StreamOf(l.s).Release()
	}
}

// pendingLaunches returns a copy of each stream with launches that are not known to have ended. The caller must release
// the streams.
func (r *Recorder) pendingLaunches() (list []launchStream, of []*launchStream) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, l := range r.launches {
		if l.launched > l.ended && gpu.StreamOf(l.s).Retain() {
			list, of = append(list, *l), append(of, l)
		}
	}
	return list, of
}

// endedLaunches records that the first n launches on a stream have ended, and returns the stream's state.
func (r *Recorder) endedLaunches(l *launchStream, n uint64) launchStream {
	now := r.Clock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if n > l.ended {
		l.ended, l.progress = n, now
	}
	return *l
}

// inspectLaunches records which launches have ended, and returns an error if one has exceeded the timeout.
func (w *Watch) inspectLaunches() error {
	list, of := w.rec.pendingLaunches()
	var first error
	for i, l := range of {
		if err := w.inspectLaunch(l, list[i].launched); first == nil {
			first = err
		}
		_ = gpu.StreamOf(l.s).Release()
	}
	return first
}

// inspectLaunch is inspectLaunches for the first n launches on one stream.
func (w *Watch) inspectLaunch(l *launchStream, n uint64) (err error) {
	passed, ahead, err := l.marks.Query(false)
	if err != nil {
		return err
	}
	var ended uint64
	for _, k := range passed {
		ended = max(ended, k.Record)
	}
	now := w.rec.endedLaunches(l, ended)
	if now.marked < n {
		gpu.Outside(func() { err = w.followLaunch(l, n) })
		if err != nil {
			return err
		}
		now = w.rec.endedLaunches(l, 0)
	}
	for _, k := range ahead { // the oldest first
		if k.Record <= now.ended {
			continue
		}
		if age := time.Duration(w.rec.Clock() - max(k.At, now.progress)); exceeded(age, now.timeout) {
			return w.owner.LaunchTimedOut(now.kinds, l.s.String(), age, now.timeout)
		}
		break
	}
	return nil
}

// followLaunch queries whether the first n launches on a stream have ended, and sets a mark behind them if not.
func (w *Watch) followLaunch(l *launchStream, n uint64) error {
	if blind, err := w.captured(l.s); blind || err != nil {
		return err
	}
	done, err := QueryDone(l.s.Device(), "cuStreamQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(gpu.StreamOf(l.s).Raw()) })
	switch {
	case err != nil:
		return err
	case done:
		w.rec.endedLaunches(l, n)
		return nil
	}
	return w.markLaunch(l, n)
}

// inspectUnansweredLaunches is inspectLaunches while the driver has not answered for some time: a launch that hangs may
// fill its stream.
func (w *Watch) inspectUnansweredLaunches(since time.Duration) error {
	list, of := w.rec.pendingLaunches()
	var err error
	for i, l := range of {
		if err == nil && exceeded(since, list[i].timeout) {
			err = w.owner.LaunchTimedOut(list[i].kinds, l.s.String(), since, list[i].timeout)
		}
		_ = gpu.StreamOf(l.s).Release()
	}
	return err
}
