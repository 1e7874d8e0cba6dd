package comm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A Work is operations that were enqueued on a group's streams and may not be done
// (torch.distributed.Work). Its methods may be called by any goroutine.
type Work struct {
	owner handle.Owner
	g     *Group
	tails []tail // one for each local rank

	mu    sync.Mutex // held while events are used
	owned []io.Closer

	ended  bool // it is known how the operations ended: with this
	result error
}

// A tail is the place behind the operations of a local rank.
type tail struct {
	event *stream.Event
	point nccl.Point
}

// Start runs fn, which enqueues operations of g, and returns a Work that is done when
// they are. The Work owns what is given to it, such as the slices that the operations
// use: it closes them when the operations are done or the group is broken, and also
// if fn fails or panics; nil is nothing to own. It must be closed, or waited for.
//
//	w, err := comm.Start(g, func() error { return comm.AllReduce(g, comm.Sum, xs...) }, xs)
//	...
//	err = w.WaitOn(s) // the stream waits; the host goes on
//	err = w.Wait(ctx) // the host waits
func Start(g *Group, fn func() error, owned ...io.Closer) (_ *Work, err error) {
	w := &Work{g: g, owned: owned}
	started := false
	defer func() { // also when fn panics
		if !started {
			err = errors.Join(err, w.release())
		}
	}()
	if err := w.start(fn); err != nil {
		return nil, err
	}
	handle.Init(w, &w.owner, handle.About{Kind: "work", On: g.Device(0), Frequent: true})
	started = true
	return w, nil
}

func (w *Work) start(fn func() error) error {
	if err := w.g.checkWait("start"); err != nil {
		return err
	}
	if fn == nil {
		return refuse("start", "no function given")
	}
	if err := fn(); err != nil {
		return err
	}
	for i := range w.g.members {
		m := &w.g.members[i]
		point := m.comm.Point(m.stream)
		e, err := m.stream.Record(nil)
		if err != nil {
			return err
		}
		w.tails = append(w.tails, tail{e, point})
	}
	return nil
}

// Done reports whether the group's streams have passed the operations. The error is nil if the
// operations completed, or may still complete. It is not nil if the group was broken or
// closed before the operations were known to have completed.
func (w *Work) Done() (bool, error) { return w.look("done") }

// look reports whether the streams have passed the operations, and how these ended. That is
// kept: what completed before the end of the group has completed after it.
func (w *Work) look(op string) (passed bool, err error) {
	ended, passed, err := w.query(op)
	if ended || err != nil {
		return passed, err
	}
	if !passed {
		return false, cmp.Or(w.hopeless(), w.g.Err())
	}
	for i := range w.tails {
		if err := w.tails[i].point.Passed(); err != nil {
			return true, w.end(w.g.undone(w.name(), err))
		}
	}
	return true, w.end(nil)
}

// hopeless returns the error of operations that will not be known to complete, or nil.
func (w *Work) hopeless() error {
	for i := range w.tails {
		if err := w.tails[i].point.Hopeless(); err != nil {
			return w.g.undone(w.name(), err)
		}
	}
	return nil
}

// query asks the events, unless it is known how the operations ended.
func (w *Work) query(op string) (ended, passed bool, err error) {
	if w == nil {
		return false, false, w.check(op)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return true, true, w.result
	}
	if err := w.check(op); err != nil {
		return false, false, err
	}
	for i := range w.tails {
		if passed, err = w.tails[i].event.Query(); err != nil {
			return false, false, fmt.Errorf("comm: %s: %w", w.name(), errors.Join(err, w.g.Err()))
		}
		if !passed {
			return false, false, nil
		}
	}
	return false, true, nil
}

// name is what errors call the Work.
func (w *Work) name() string { return fmt.Sprintf("work of rank %d of %d", w.g.Rank(), w.g.size) }

// Wait waits until the operations have completed and closes the Work. nil means that they
// completed: not only that the streams have passed them, which they also do when the group
// ends. Wait ends early when a rank fails or is lost, or this process closes the group. When
// ctx ends Wait returns the cause, and the Work stays open. Otherwise the result is kept: later
// calls of Wait, Done and WaitOn return it again.
func (w *Work) Wait(ctx context.Context) error {
	switch ended, _, err := w.query("wait"); {
	case ended:
		return w.close(err)
	case err != nil && w.closed():
		return err
	}
	if err := nccl.RefuseGroup("comm: wait for work"); err != nil {
		return err
	}
	for i := range w.g.members {
		if err := w.g.members[i].stream.RefuseWait("comm: wait for work"); err != nil {
			return err
		}
	}
	err := poll.Until(ctx, func() (bool, error) { return w.look("wait") })
	if err != nil && ctx.Err() != nil && w.g.broken.Load() == nil && w.g.closing.Load() == nil {
		return fmt.Errorf("comm: wait for %s: %w", w.name(), err)
	}
	return w.close(w.end(err)) // in this order: a closed Work always has its result
}

// close closes the Work that has ended with err.
func (w *Work) close(err error) error {
	if failed := w.Close(); failed != nil {
		return errors.Join(err, failed)
	}
	return err
}

// end keeps how the operations ended, unless that is known already, and returns it.
func (w *Work) end(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.ended, w.result = true, err
	}
	return w.result
}

// WaitOn lets work that is enqueued on s from now on wait until the group's streams have
// passed the operations (torch's wait of a Work); the host goes on. nil does not mean that
// the operations complete: if the group ends before they do, s goes on too, with outputs
// that are undefined. Wait and Done tell, before or after that. WaitOn returns the error if it is
// known already that the operations have not completed and will not, and s waits for nothing.
func (w *Work) WaitOn(s *stream.Stream) error {
	const op = "wait on a stream"
	if w == nil {
		return w.check(op)
	}
	unknown := w.hopeless() // which asks no event: a capture forbids that
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended {
		return w.result
	}
	if err := cmp.Or(w.check(op), unknown); err != nil {
		return err
	}
	for i := range w.tails {
		if err := s.Wait(w.tails[i].event); err != nil {
			return fmt.Errorf("comm: wait for %s on %s: %w", w.name(), s, err)
		}
	}
	return nil
}

// Close gives the Work up, and what it owns. The operations go on: memory stays
// theirs until they are done. It is idempotent.
func (w *Work) Close() error {
	if w == nil || !w.owner.Close() {
		return nil
	}
	return w.release()
}

func (w *Work) release() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	var errs []error
	for i := range w.tails {
		errs = append(errs, w.tails[i].event.Close())
	}
	for _, x := range w.owned {
		if x != nil {
			errs = append(errs, x.Close())
		}
	}
	w.owned = nil
	return errors.Join(errs...)
}

func (w *Work) closed() bool { return w == nil || w.owner.Closed() }

func (w *Work) check(op string) error {
	if w.closed() {
		return fmt.Errorf("comm: %s: the work was closed: %w", op, device.ErrClosed)
	}
	return nil
}
