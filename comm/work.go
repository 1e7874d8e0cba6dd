package comm

import (
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
	owner  handle.Owner
	g      *Group
	events []*stream.Event // one for each local rank, behind the operations

	mu    sync.Mutex // held while events are used
	owned []io.Closer
	over  bool // the operations are done

	waited bool // Wait has ended with this
	result error
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
		e, err := w.g.members[i].stream.Record(nil)
		if err != nil {
			return err
		}
		w.events = append(w.events, e)
	}
	return nil
}

// Done reports whether the operations are done, or the error that broke the group.
func (w *Work) Done() (bool, error) {
	if waited, err := w.outcome(); waited {
		return true, err
	}
	if err := w.check("done"); err != nil {
		return false, err
	}
	return w.done()
}

// outcome is what Wait has ended with, if it has.
func (w *Work) outcome() (waited bool, err error) {
	if w == nil {
		return false, nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.waited, w.result
}

// done is Done, also when another goroutine has closed what it found done.
func (w *Work) done() (bool, error) {
	over, err := w.query()
	if err != nil {
		err = fmt.Errorf("comm: work of rank %d of %d: %w", w.g.Rank(), w.g.size, err)
	}
	return over, errors.Join(err, w.g.Err())
}

func (w *Work) query() (over bool, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return true, nil
	}
	if err := w.check("done"); err != nil {
		return false, err
	}
	for _, e := range w.events {
		if over, err := e.Query(); err != nil || !over {
			return false, err
		}
	}
	w.over = true
	return true, nil
}

// Wait waits until the operations are done and closes the Work. It ends early when a
// rank fails or is lost. When ctx ends it returns the cause, and the Work stays open. What
// it has returned otherwise it returns again, and so do Done and WaitOn.
func (w *Work) Wait(ctx context.Context) error {
	if waited, err := w.outcome(); waited {
		return err
	}
	if err := w.check("wait"); err != nil {
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
	err := poll.Until(ctx, w.done)
	if err != nil && w.g.broken.Load() == nil && ctx.Err() != nil {
		return fmt.Errorf("comm: wait for work of rank %d of %d: %w", w.g.Rank(), w.g.size, err)
	}
	w.settle(err) // before it is closed: nobody finds it closed and without an end
	return errors.Join(err, w.Close())
}

// settle keeps what Wait has ended with first.
func (w *Work) settle(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.waited {
		w.waited, w.result = true, err
	}
}

// WaitOn lets work that is enqueued on s from now on wait for the operations
// (torch's wait of a Work); the host goes on.
func (w *Work) WaitOn(s *stream.Stream) error {
	if w == nil {
		return w.check("wait on a stream")
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waited {
		return w.result
	}
	if err := w.check("wait on a stream"); err != nil {
		return err
	}
	for _, e := range w.events {
		if err := s.Wait(e); err != nil {
			return fmt.Errorf("comm: wait for work of rank %d of %d on %s: %w", w.g.Rank(), w.g.size, s, err)
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
	for _, e := range w.events {
		errs = append(errs, e.Close())
	}
	for _, x := range w.owned {
		if x != nil {
			errs = append(errs, x.Close())
		}
	}
	w.owned, w.events = nil, nil
	return errors.Join(errs...)
}

func (w *Work) check(op string) error {
	if w == nil || w.owner.Closed() {
		return fmt.Errorf("comm: %s: the work was closed: %w", op, device.ErrClosed)
	}
	return nil
}
