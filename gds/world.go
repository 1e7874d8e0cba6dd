package gds

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A world is the ranks that move a checkpoint together: those of a group, or one
// device alone.
type world struct {
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

func worldOf(g *comm.Group) (*world, error) {
	if g == nil {
		return nil, errors.New("no group given")
	}
	if err := g.Err(); err != nil {
		return nil, err
	}
	w := &world{group: g, ranks: g.Size()}
	for i := range g.Locals() {
		c := g.Communicator(i)
		w.locals = append(w.locals, &local{rank: c.Rank(), stream: g.Stream(i), comm: c})
	}
	return w, nil
}

func worldOn(s *stream.Stream) *world { return &world{ranks: 1, locals: []*local{{stream: s}}} }

// prepare makes the streams.
func (w *world) prepare() error {
	for _, l := range w.locals {
		err := l.stream.Check("gds", nil)
		if err == nil {
			err = l.stream.RefuseWait("gds")
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

func (w *world) close() error {
	var errs []error
	for _, l := range w.locals {
		errs = append(errs, l.files.Close())
	}
	return errors.Join(errs...)
}

// spread reports whether some of the ranks are other processes'.
func (w *world) spread() bool { return len(w.locals) < w.ranks }

// devices is how many devices of the host bytes may go to and from at the same time.
func (w *world) devices() int {
	if !w.spread() {
		return len(w.locals)
	}
	return min(w.ranks, len(w.locals[0].device().System().Devices()))
}

// A RankError says which rank could not move its part. All ranks get one, those of
// other processes too; the rank's own wraps the cause.
type RankError struct {
	Op     string // "load" or "save"
	Rank   int
	Reason string
	Err    error // nil where the rank is another process's
}

func (e *RankError) Error() string {
	return fmt.Sprintf("gds: %s: rank %d: %s", e.Op, e.Rank, e.Reason)
}

func (e *RankError) Unwrap() error { return e.Err }

// farewell is how long a rank whose ctx has ended still waits for the word of the
// others. Tests change it.
var farewell = time.Minute

// parting returns a context for what the ranks say to each other: they wait for a
// rank's word also when its ctx has ended, so it ends only a while later. Until then a
// rank waits as long as the others take.
func parting(ctx context.Context) (context.Context, context.CancelFunc) {
	talk, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		time.AfterFunc(farewell, func() { cancel(context.Cause(ctx)) })
	})
	return talk, func() { stop(); cancel(nil) }
}

// A word is what a rank says before it begins, and when one has failed.
type word struct {
	Reason string // why it cannot go on
	Print  uint64 // of what it is about to do
}

// agree tells all processes of what failed in one of them, and returns the first such
// rank's error, or one if a process is about to do something else. errs are by local
// rank.
func (w *world) agree(ctx context.Context, op, path string, errs []error, print uint64) error {
	words := make([]word, len(errs))
	for i, err := range errs {
		words[i].Print = print
		if err != nil {
			words[i].Reason = err.Error()
		}
	}
	first := 0 // the rank that words[0] is of
	if w.spread() {
		ctx, cancel := parting(ctx)
		defer cancel()
		all, err := comm.GatherValues(ctx, w.group, nil, words...)
		if err != nil {
			return fmt.Errorf("gds: %s %s: %w", op, path, errors.Join(errors.Join(errs...), err))
		}
		words = all
		if slices.ContainsFunc(words, func(x word) bool { return x.Reason != "" || x.Print != print }) {
			// Whoever ends now must not take the word of it from those that do not have it
			// yet. Who does not come has it, or is gone.
			_ = w.group.Barrier(ctx)
		}
	} else {
		first = w.locals[0].rank
	}
	for i, said := range words {
		if said.Reason != "" {
			return w.rankError(op, first+i, said.Reason, errs)
		}
	}
	for rank, said := range words {
		if said.Print != print {
			return fmt.Errorf("gds: %s %s: rank %d has another plan, other files or other options: they must be the same on all ranks", op, path, rank)
		}
	}
	return nil
}

func (w *world) rankError(op string, rank int, reason string, errs []error) error {
	e := &RankError{Op: op, Rank: rank, Reason: strings.TrimPrefix(reason, "gds: ")}
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
