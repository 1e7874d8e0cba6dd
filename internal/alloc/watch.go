package alloc

import (
	"errors"
	"slices"
)

// A Watcher is told of the segments of a pool: of each that the pool takes, before
// any of it is used, and of each that it gives back, when the streams are past it
// and before it is freed. It may use the device, but not the allocator: an
// allocation waits for it. Where it returns an error about a segment that is taken,
// the allocation fails and the segment goes back.
type Watcher struct {
	Segment func(addr, bytes uint64, taken bool) error
}

// ErrExpandable says that a pool cannot be watched, whose memory changes by pages.
var ErrExpandable = errors.New("the pool has expandable segments")

// Watch tells w of the segments that there are, and then of the others. A pool that
// is watched has no expandable segments. After an error w is told of nothing.
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

// Unwatch tells w that all segments are gone, and then nothing any more.
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

// tell tells all watchers of a segment. When one does not want it, those that do
// know at once that it is gone. growth is held.
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
