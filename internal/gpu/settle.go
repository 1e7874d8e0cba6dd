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
	for _, d := range s.devs {
		if err := d.settle(deadline); err != nil {
			return fmt.Errorf("%w for %v: enqueue what its work waits for, and try again", err, limit)
		}
	}
	return nil
}

func (d *Device) settle(deadline time.Time) error {
	if d.ctx.Load() == 0 || d.Err() != nil {
		return nil
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
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		for len(marks) > 0 {
			k := marks[len(marks)-1]
			if done, err := d.ReadyRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(k.e) }); err == nil && !done {
				break
			}
			pool.Give(d, k.e)
			marks = marks[:len(marks)-1]
		}
		if len(marks) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("stream %#x on %s has been busy", uintptr(marks[len(marks)-1].s), d)
		}
		time.Sleep(pause)
	}
}
