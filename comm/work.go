package comm

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A Work represents operations that were enqueued on a group's streams
// (torch.distributed.Work). Its methods may be called by any goroutine.
type Work struct {
	owner handle.Owner
	g     *Group
	tails []tail // one for each local rank

	mu    sync.Mutex // held while events are used
	owned []io.Closer

	ended  bool // the result is known
	result error
}

// A tail is the position after the operations of a local rank.
type tail struct {
	event *stream.Event
	point collective.Point
}

// Start runs fn, which enqueues operations of g, and returns a Work that is
// done when they are. The Work owns the given closers, such as the slices that
// the operations use: it closes them when the operations are done or the group
// is broken, and also if fn fails or panics. The caller must close the Work or
// wait for it; owned may contain nil.
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
	if err := w.g.check("start"); err != nil {
		return err
	}
	if fn == nil {
		return badArgument("start", "no function given")
	}
	if err := fn(); err != nil {
		return err
	}
	for i := range w.g.members {
		m := &w.g.members[i]
		point := collective.Of(m.comm).Point(m.stream)
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
func (w *Work) Done() (bool, error) { return w.status("done") }

// status reports whether the streams have passed the operations, and how these ended. It
// stores the result, because operations that completed before the end of the group stay
// completed after it.
func (w *Work) status(op string) (passed bool, err error) {
	ended, passed, err := w.query(op)
	if ended || err != nil {
		return passed, err
	}
	if !passed {
		return false, cmp.Or(w.cannotComplete(), w.g.err())
	}
	for i := range w.tails {
		if err := collective.Of(w.g.members[i].comm).Completed(w.tails[i].point); err != nil {
			return true, w.setResult(w.g.errIncomplete(w.name(), err))
		}
	}
	return true, w.setResult(nil)
}

// cannotComplete returns the error of operations that can no longer be known to complete, or
// nil.
func (w *Work) cannotComplete() error {
	for i := range w.tails {
		if err := collective.Of(w.g.members[i].comm).CannotComplete(w.tails[i].point); err != nil {
			return w.g.errIncomplete(w.name(), err)
		}
	}
	return nil
}

// query queries the events, unless the result is already known.
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
			return false, false, fmt.Errorf("comm: %s: %w", w.name(), errors.Join(err, w.g.err()))
		}
		if !passed {
			return false, false, nil
		}
	}
	return false, true, nil
}

// name returns the name of the Work in errors.
func (w *Work) name() string { return fmt.Sprintf("work of rank %d of %d", w.g.Rank(), w.g.size) }

// Wait waits until the operations have completed and closes the Work. nil means that they
// completed: not only that the streams have passed them, which they also do when the group
// ends. Wait ends early when a rank fails or is lost, or this process closes the group. When
// ctx ends Wait returns the cause, and the Work stays open. Otherwise the result is kept: later
// calls of Wait, Done and WaitOn return it again.
func (w *Work) Wait(ctx context.Context) error {
	if w == nil || w.g == nil {
		return w.check("wait")
	}
	for i := range w.g.members {
		if err := gpu.StreamOf(w.g.members[i].stream).RefuseWait("comm: wait for work"); err != nil {
			if ended, _, err := w.query("wait"); ended {
				return w.close(err)
			} else if err != nil && w.isClosed() {
				return err
			}
			return err
		}
	}
	return unanswered("comm: wait for "+w.name(), gpu.Guard(ctx, func() error { return w.wait(ctx) }))
}

// wait is Wait without the checks.
func (w *Work) wait(ctx context.Context) error {
	switch ended, _, err := w.query("wait"); {
	case ended:
		return w.close(err)
	case err != nil && w.isClosed():
		return err
	}
	err := gpu.DeviceOf(w.g.members[0].stream.Device()).Until(ctx, "comm.Work.Wait", func() (bool, error) { return w.status("wait") })
	if err != nil && ctx.Err() != nil && w.g.broken.Load() == nil && w.g.closing.Load() == nil {
		return fmt.Errorf("comm: wait for %s: %w", w.name(), err)
	}
	return w.close(w.setResult(err)) // in this order: a closed Work always has its result
}

// close closes the Work, whose result is err.
func (w *Work) close(err error) error {
	if failed := w.Close(); failed != nil {
		return errors.Join(err, failed)
	}
	return err
}

// setResult stores the result, unless it is already known, and returns it.
func (w *Work) setResult(err error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.ended {
		w.ended, w.result = true, err
	}
	return w.result
}

// WaitOn orders operations that are enqueued on s from now on after the group's
// streams have passed the Work's operations (torch's wait of a Work). The host
// does not wait. A nil error does not mean that the operations complete: if the
// group ends before they do, s continues too, and the outputs are undefined,
// which Wait and Done report, before or after. If it is already known that the
// operations will not complete, WaitOn returns the error and s does not wait.
func (w *Work) WaitOn(s *stream.Stream) error {
	const op = "wait on a stream"
	if w == nil {
		return w.check(op)
	}
	unknown := w.cannotComplete() // must come first: it queries no event, which a capture forbids
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

// Close closes the Work and the closers that it owns, while the operations
// continue and keep their memory until they are done. Close is idempotent.
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

func (w *Work) isClosed() bool { return w == nil || w.owner.Closed() }

func (w *Work) check(op string) error {
	if w.isClosed() {
		return fmt.Errorf("comm: %s: the work was closed: %w", op, device.ErrClosed)
	}
	return nil
}

// AllToAll enqueues the exchange of parts between all ranks: part i of src goes to rank i,
// and part i of dst comes from rank i. src and dst have one part for each rank, all of the
// same length (ncclAlltoAll, torch.distributed.all_to_all_single). Collective.
func AllToAll[T memory.Element](on Issuer, dst, src Shards[T]) error {
	g, b := groupOf(on)
	if err := checkPair(g, "all-to-all", dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.AllToAll(m.on, m.stream, dst[i], src[i])
	})
}

// AllToAllV is AllToAll for parts of different lengths. sends and recvs have,
// for each local rank, the number of elements to send to each rank and to
// receive from each rank. Both ranks of a pair must agree on the number.
// Collective.
func AllToAllV[T memory.Element](on Issuer, dst Shards[T], recvs [][]int, src Shards[T], sends [][]int) error {
	g, b := groupOf(on)
	const op = "all-to-all"
	if err := g.check(op); err != nil {
		return b.markRefused(err)
	}
	if len(recvs) != len(g.members) || len(sends) != len(g.members) {
		return b.markRefused(fmt.Errorf("comm: %s: counts of %d receiving and %d sending ranks for %d local ranks: %w", op, len(recvs), len(sends), len(g.members), ErrMismatch))
	}
	if err := checkShards(g, op, dst, false); err != nil {
		return b.markRefused(err)
	}
	if err := checkShards(g, op, src, false); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.AllToAllV(m.on, m.stream, dst[i], recvs[i], src[i], sends[i])
	})
}

// AllGatherV is AllGather for sources of different lengths: counts has the length of each
// rank's source, and each dst has the total length. Collective.
func AllGatherV[T memory.Element](on Issuer, dst, src Shards[T], counts []int) error {
	g, b := groupOf(on)
	if err := checkUneven(g, "all-gather", dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.AllGatherV(m.on, m.stream, dst[i], src[i], counts)
	})
}

// ReduceScatterV is ReduceScatter for destinations of different lengths: counts has the
// length of each rank's destination, and each src has the total length. Collective.
func ReduceScatterV[T memory.Element](on Issuer, op Op, dst, src Shards[T], counts []int) error {
	g, b := groupOf(on)
	if err := checkUneven(g, "reduce-scatter", dst, src); err != nil {
		return b.markRefused(err)
	}
	return g.issue(b, func(i int, m *member) error {
		return nccl.ReduceScatterV(m.on, m.stream, dst[i], src[i], counts, op)
	})
}

func checkUneven[T memory.Element](g *Group, op string, dst, src Shards[T]) error {
	if err := checkShards(g, op, dst, false); err != nil {
		return err
	}
	return checkShards(g, op, src, false)
}
