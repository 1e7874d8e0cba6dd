package memory

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/alloc"
)

// A watcher is told of the segments of a pool.
type watcher struct {
	fn    func(d *device.Device, ptr, bytes uint64, taken bool) error
	parts map[partKey]*alloc.Watcher // guarded by the pool's lock
}

// Watch calls fn for each segment that the pool has, and then for each that it
// takes from its Allocator or the driver, before any of it is used, and for each
// that it gives back, when the streams are past it and before it is freed: so that
// the memory can be registered with who wants to know it, as NCCL does. stop calls
// fn for the segments that there still are, as if they were given back, and then fn
// is called no more; it is idempotent. Where fn returns an error about a segment
// that is taken, the allocation fails with it.
//
// fn may use the device, but nothing of this package: allocations that need the
// driver wait for it. A pool that is watched has no expandable segments, and one
// that has some cannot be watched.
func (p *Pool) Watch(fn func(d *device.Device, ptr, bytes uint64, taken bool) error) (stop func() error, err error) {
	const op = "memory: watch a pool"
	if err := p.check(op); err != nil {
		return nil, err
	}
	w := &watcher{fn: fn, parts: map[partKey]*alloc.Watcher{}}
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, x := range p.parts {
		if err := w.add(key, x); err != nil {
			return nil, fmt.Errorf("%s: %w", op, errors.Join(err, w.end(p)))
		}
	}
	p.watch = append(p.watch, w)
	return sync.OnceValue(func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.watch = slices.DeleteFunc(p.watch, func(o *watcher) bool { return o == w })
		return w.end(p)
	}), nil
}

// add lets the watcher know a part of the pool. The pool is locked.
func (w *watcher) add(key partKey, x *alloc.Pool) error {
	a := &alloc.Watcher{Segment: func(addr, bytes uint64, taken bool) error { return w.fn(key.h.dev, addr, bytes, taken) }}
	err := x.Watch(a)
	if err == nil {
		w.parts[key] = a
	}
	return err
}

// end lets the watcher forget the pool, which is locked.
func (w *watcher) end(p *Pool) error {
	var errs []error
	for key, a := range w.parts {
		errs = append(errs, p.parts[key].Unwatch(a))
	}
	clear(w.parts)
	return errors.Join(errs...)
}
