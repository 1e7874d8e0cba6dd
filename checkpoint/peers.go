package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// peers are the ranks that move a checkpoint together: the ranks of a group, or one
// device alone.
type peers struct {
	group  *comm.Group // nil for a device alone
	ranks  int
	locals []*local
}

// A local is a rank of this process.
type local struct {
	rank   int
	stream *stream.Stream     // in whose order its memory is
	comm   *nccl.Communicator // nil for a device alone
	files  *stream.Stream     // between files and memory, beside stream
}

func (l *local) device() *device.Device { return l.stream.Device() }

func peersOf(g *comm.Group) (*peers, error) {
	if g == nil {
		return nil, errors.New("no group given")
	}
	if err := g.Err(); err != nil {
		return nil, err
	}
	w := &peers{group: g, ranks: g.Size()}
	for i := range g.Locals() {
		c := g.Communicator(i)
		w.locals = append(w.locals, &local{rank: c.Rank(), stream: g.Stream(i), comm: c})
	}
	return w, nil
}

func peersOn(s *stream.Stream) *peers { return &peers{ranks: 1, locals: []*local{{stream: s}}} }

// prepare creates the streams.
func (w *peers) prepare() error {
	for _, l := range w.locals {
		err := gpu.CheckStream("checkpoint", l.stream, nil)
		if err == nil {
			err = gpu.StreamOf(l.stream).RefuseWait("checkpoint")
		}
		if err == nil {
			l.files, err = stream.New(l.device(), nil)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *peers) close() error {
	var errs []error
	for _, l := range w.locals {
		errs = append(errs, l.files.Close())
	}
	return errors.Join(errs...)
}

// remote reports whether some of the ranks are other processes'.
func (w *peers) remote() bool { return len(w.locals) < w.ranks }

// devices is how many devices of the host bytes may go to and from at the same time.
func (w *peers) devices() int {
	if !w.remote() {
		return len(w.locals)
	}
	return min(w.ranks, len(w.locals[0].device().System().Devices()))
}

// messageTimeout is how long a rank whose ctx has ended still waits for the messages of the
// other ranks. Tests change it.
var messageTimeout = time.Minute

// messageContext returns a context for messages between the ranks. The other ranks wait for
// the message of a rank whose ctx has ended, so the context ends only messageTimeout later.
func messageContext(ctx context.Context) (context.Context, context.CancelFunc) {
	long, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		time.AfterFunc(messageTimeout, func() { cancel(context.Cause(ctx)) })
	})
	return long, func() { stop(); cancel(nil) }
}

// agree exchanges a value of each rank, or why the rank cannot go on, and
// returns on all ranks what judge returns. The lists mine and errs are by local
// rank.
func agree[T any](ctx context.Context, w *peers, op string, mine []T, errs []error, judge func(all []collective.Said[T]) error) error {
	if !w.remote() {
		all := make([]collective.Said[T], len(mine))
		for i := range mine {
			all[i] = collective.SaidOf(mine[i], errs[i])
		}
		return judge(all)
	}
	ctx, cancel := messageContext(ctx)
	defer cancel()
	return route.Agree(ctx, w.group, op, mine, errs, judge)
}

// agree exchanges the failures of all processes. It returns the error of the
// first rank that failed, or an error if the processes have different plans.
// The errors are by local rank.
func (w *peers) agree(ctx context.Context, op, path string, errs []error, plan string) error {
	return agree(ctx, w, fmt.Sprintf("checkpoint: %s %s", op, path), slices.Repeat([]string{plan}, len(errs)), errs, func(all []collective.Said[string]) error {
		if err := firstFailed(w, op, all, errs); err != nil {
			return err
		}
		return samePlans(op, path, all, func(plan string) string { return plan })
	})
}

// samePlans returns an error if a rank has another plan than rank 0.
func samePlans[T any](op, path string, all []collective.Said[T], plan func(T) string) error {
	for rank, said := range all {
		if plan(said.Value) != plan(all[0].Value) {
			return fmt.Errorf("checkpoint: %s %s: rank %d has another plan, other files or other options: they must be the same on all ranks", op, path, rank)
		}
	}
	return nil
}

// firstFailed returns the error of the first rank that failed, or nil.
func firstFailed[T any](w *peers, op string, all []collective.Said[T], errs []error) error {
	for rank, said := range all {
		if said.Failed != "" {
			return w.rankError(op, rank, said.Failed, errs)
		}
	}
	return nil
}

func (w *peers) rankError(op string, rank int, reason string, errs []error) error {
	for _, known := range []string{"checkpoint: ", "gds: ", op + ": "} { // the text has them already
		reason = strings.TrimPrefix(reason, known)
	}
	e := &RankError{Op: op, Rank: rank, Reason: reason}
	for i, l := range w.locals {
		if l.rank == rank {
			e.Err = errs[i]
		}
	}
	if w.ranks == 1 {
		return e.Err
	}
	return e
}

// view returns bytes of a slab or staging buffer.
func view(mem tensor.Tensor, at, n int) (memory.Slice[byte], error) {
	return memory.View[byte](mem.Buffer(), at, n)
}
