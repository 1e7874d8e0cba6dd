package gds

import (
	"errors"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

// A worker moves windows one after the other, while the copies of earlier windows are in
// progress. It belongs to one goroutine.
type worker struct {
	t    *transfer
	lane *lane
	held []held
	turn int
}

// held is a slot of a worker.
type held struct {
	slot   *slot // nil if it has none
	flying bool  // copies from or to it are pending
	w      window
	bytes  int64 // bytes being copied
}

func newWorker(t *transfer) (*worker, error) {
	l, err := takeLane(gpu.DeviceOf(t.dev))
	if err != nil {
		return nil, err
	}
	return &worker{t: t, lane: l, held: make([]held, min(t.f.depth, maxDepth))}, nil
}

// freeSlot returns the index of a slot without pending copies, after finish has handled its
// contents. If other workers wait for slots, it returns its slot and waits in turn.
func (w *worker) freeSlot(finish func(i int) error) (int, error) {
	i := w.turn
	w.turn = (w.turn + 1) % len(w.held)
	if err := finish(i); err != nil {
		return 0, err
	}
	h := &w.held[i]
	if h.slot != nil && !w.t.ring.pressed() {
		return i, nil
	}
	if err := w.drop(h); err != nil {
		return 0, err
	}
	if h.slot = w.more(); h.slot != nil {
		return i, nil
	}
	for j := range w.held { // the oldest first
		if k := (w.turn + j) % len(w.held); w.held[k].slot != nil {
			w.turn = (k + 1) % len(w.held)
			return k, finish(k)
		}
	}
	return i, w.wait(h)
}

// more returns a slot if one is available at once, or nil.
func (w *worker) more() *slot {
	t := w.t
	if t.scarce() != nil {
		return nil
	}
	x, err := t.ring.tryAcquire(t.dev, t.slot)
	if err != nil {
		t.lack(err)
	}
	return x
}

// wait waits for a slot for a worker without slots. If no memory can be pinned the worker
// ends; other workers may have slots and do the work.
func (w *worker) wait(h *held) (err error) {
	t := w.t
	h.slot, err = t.ring.acquire(t.ctx, t.over, t.dev, t.slot)
	if err == nil || t.ctx.Err() != nil || errors.Is(err, errNoMore) {
		return err
	}
	t.lack(err)
	return errNoMore
}

// drop returns a slot to the ring.
func (w *worker) drop(h *held) error {
	if h.slot == nil {
		return nil
	}
	x := h.slot
	h.slot = nil
	return w.t.ring.release(x)
}

// release releases everything, when no copies are pending.
func (w *worker) release() error {
	errs := []error{w.lane.drain()}
	for i := range w.held {
		errs = append(errs, w.drop(&w.held[i]))
	}
	giveLane(w.lane)
	return errors.Join(errs...)
}

// copy enqueues the copies between a slot and the pieces of a window.
func (w *worker) copy(i int, win window, move func(ptr cudadrv.DevicePtr, host unsafe.Pointer, bytes int64) error) error {
	h := &w.held[i]
	h.w, h.bytes = win, 0
	for j := win.first; j < win.last; {
		x, next := win.part(w.t.pieces, j)
		if err := move(x.ptr, h.slot.at(x.off-win.off), x.bytes); err != nil {
			return err
		}
		h.bytes += x.bytes
		j = next
	}
	h.flying = true
	return w.lane.mark(i)
}

// land waits for the copies of a slot, and reports whether there were any.
func (w *worker) land(i int) (bool, error) {
	h := &w.held[i]
	if !h.flying {
		return false, nil
	}
	h.flying = false
	if err := w.lane.await(i); err != nil {
		return false, err
	}
	return true, nil
}

// all finishes all slots, in their order.
func (w *worker) all(finish func(i int) error) error {
	for range w.held {
		if err := finish(w.turn); err != nil {
			return err
		}
		w.turn = (w.turn + 1) % len(w.held)
	}
	return nil
}
