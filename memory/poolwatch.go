package memory

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

// A watcher is a callback for the segments of a pool.
type watcher struct {
	fn    func(d *device.Device, ptr, bytes uint64, taken bool) error
	parts map[partKey]*alloc.Watcher // guarded by the pool's lock
}

// Watch calls fn for the segments of the pool (mem.CapturePool).
func (c *capturePool) Watch(fn func(d *device.Device, ptr, bytes uint64, taken bool) error) (stop func() error, err error) {
	const op = "memory: watch a pool"
	p := (*Pool)(c)
	if err := p.check(op); err != nil {
		return nil, err
	}
	w := &watcher{fn: fn, parts: map[partKey]*alloc.Watcher{}}
	p.mu.Lock()
	defer p.mu.Unlock()
	for key, x := range p.parts {
		if err := w.add(key, x); err != nil {
			return nil, fmt.Errorf("%s: %w", op, errors.Join(err, w.stop(p)))
		}
	}
	p.watch = append(p.watch, w)
	return sync.OnceValue(func() error {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.watch = slices.DeleteFunc(p.watch, func(o *watcher) bool { return o == w })
		return w.stop(p)
	}), nil
}

// add starts to watch a part of the pool. The pool is locked.
func (w *watcher) add(key partKey, x *alloc.Pool) error {
	a := &alloc.Watcher{Segment: func(addr, bytes uint64, taken bool) error { return w.fn(key.h.dev, addr, bytes, taken) }}
	err := x.Watch(a)
	if err == nil {
		w.parts[key] = a
	}
	return err
}

// stop stops watching. The pool is locked.
func (w *watcher) stop(p *Pool) error {
	var errs []error
	for key, a := range w.parts {
		errs = append(errs, p.parts[key].Unwatch(a))
	}
	clear(w.parts)
	return errors.Join(errs...)
}
