package alloc

import (
	"errors"
	"slices"
)

// A Watcher is called for each segment that a pool allocates, before its memory is
// used, and for each segment that the pool frees, after the streams have passed it and
// before it is freed. It may use the device, but not the allocator, because an
// allocation waits for it. If it returns an error for a new segment, the allocation
// fails and the segment is freed.
type Watcher struct {
	Segment func(addr, bytes uint64, taken bool) error
}

// ErrExpandable reports that a pool cannot be watched, because its memory changes by
// pages.
var ErrExpandable = errors.New("the pool has expandable segments")

// Watch calls w for the existing segments and then for each change. A watched pool has
// no expandable segments. After an error w is not called again.
func (p *Pool) Watch(w *Watcher) error {
	p.device.growth.Lock()
	defer p.device.growth.Unlock()
	for _, a := range p.arenas {
		if a.spans != [kinds]*segment{} {
			return ErrExpandable
		}
	}
	for i, s := range p.taken() {
		if err := w.Segment(s.addr, s.size(), true); err != nil {
			return errors.Join(err, w.gone(p.taken()[:i]))
		}
	}
	p.watchers = append(p.watchers, w)
	return nil
}

// Unwatch calls w as if all segments were freed, and ends the calls.
func (p *Pool) Unwatch(w *Watcher) error {
	p.device.growth.Lock()
	defer p.device.growth.Unlock()
	i := slices.Index(p.watchers, w)
	if i < 0 {
		return nil
	}
	p.watchers = slices.Delete(p.watchers, i, i+1)
	return w.gone(p.taken())
}

func (w *Watcher) gone(list []*segment) error {
	var errs []error
	for _, s := range list {
		errs = append(errs, w.Segment(s.addr, s.size(), false))
	}
	return errors.Join(errs...)
}

// taken returns the segments of the pool. growth is held.
func (p *Pool) taken() (list []*segment) {
	for _, a := range p.arenas {
		list = append(list, a.segments...)
	}
	return list
}

// tell calls all watchers for a segment. If one rejects it, the watchers that were
// called before are told that the segment is gone. growth is held.
func (p *Pool) tell(addr, bytes uint64, taken bool) error {
	var errs []error
	for i, w := range p.watchers {
		err := w.Segment(addr, bytes, taken)
		if err != nil && taken {
			for _, o := range p.watchers[:i] {
				err = errors.Join(err, o.Segment(addr, bytes, false))
			}
			return err
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
