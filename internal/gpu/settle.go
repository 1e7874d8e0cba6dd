package gpu

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// liveStreams are the streams that Chorus has created on a device.
type liveStreams struct {
	mu   sync.RWMutex // held for reading while a stream is queried, so that none is destroyed then
	list map[cudadrv.Stream]struct{}
}

func (l *liveStreams) add(s cudadrv.Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.list == nil {
		l.list = map[cudadrv.Stream]struct{}{}
	}
	l.list[s] = struct{}{}
}

func (l *liveStreams) remove(s cudadrv.Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.list, s)
}

// Quiet reports whether all streams that Chorus has created on the devices of the System are
// idle, so that a call of the driver that waits for devices does not block. It returns false while
// the process captures a graph, because captured streams cannot be queried.
func (s *System) Quiet() bool {
	if AnyCapture() {
		return false
	}
	if s.Machine != nil {
		return s.Machine.Quiet()
	}
	for _, d := range s.devs {
		if !d.quiet() {
			return false
		}
	}
	return true
}

func (d *Device) quiet() bool {
	if d.ctx.Load() == 0 || d.Err() != nil {
		return true
	}
	d.streams.mu.RLock()
	defer d.streams.mu.RUnlock()
	for s := range d.streams.list {
		if done, err := d.ReadyRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(s) }); err == nil && !done {
			return false
		}
	}
	return true
}

// Settle waits until the streams of all devices have done the work that is enqueued on them now,
// but at most for limit. It polls: some calls of the driver wait for the same work and meanwhile
// block other calls, also the one that enqueues what the work waits for. Streams that are being
// captured do not count.
func (s *System) Settle(limit time.Duration) error {
	if s.Quiet() {
		return nil
	}
	deadline := time.Now().Add(limit)
	busy := ""
	if s.Machine != nil {
		pending := s.Machine.Pending()
		busy = pollUntil(deadline, pending)
	} else {
		for _, d := range s.devs {
			if busy = d.settle(deadline); busy != "" {
				break
			}
		}
	}
	if busy != "" {
		return fmt.Errorf("%s has been busy for %v: enqueue what its work waits for, and try again", busy, limit)
	}
	return nil
}

// pollUntil calls pending until it returns "" or the deadline has passed, and returns its last result.
func pollUntil(deadline time.Time, pending func() string) (last string) {
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		if last = pending(); last == "" || time.Now().After(deadline) {
			return last
		}
		time.Sleep(pause)
	}
}

// settle waits for the streams of one device. It returns the name of a stream that is busy at the
// deadline, or "".
func (d *Device) settle(deadline time.Time) string {
	if d.ctx.Load() == 0 || d.Err() != nil {
		return ""
	}
	type mark struct {
		s cudadrv.Stream
		e cudadrv.Event
	}
	var marks []mark
	pool := d.sys.Events()
	d.streams.mu.RLock()
	for _, s := range slices.Sorted(maps.Keys(d.streams.list)) {
		if captured, err := d.Capturing(s); err != nil || captured {
			continue
		}
		e, err := pool.Take(d)
		if err != nil {
			break
		}
		if d.RecordEvent(e, s) == nil {
			marks = append(marks, mark{s, e})
		}
	}
	d.streams.mu.RUnlock()
	defer func() {
		for _, k := range marks {
			pool.Give(d, k.e)
		}
	}()
	return pollUntil(deadline, func() string {
		for len(marks) > 0 {
			k := marks[len(marks)-1]
			if done, err := d.ReadyRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(k.e) }); err == nil && !done {
				return fmt.Sprintf("stream %#x on %s", uintptr(k.s), d)
			}
			pool.Give(d, k.e)
			marks = marks[:len(marks)-1]
		}
		return ""
	})
}
