package fabric

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The number of trials, the maximum number of elements, and a timeout, which only ends a
// hang.
const (
	lineTrials     = 8
	trialElements  = 16 << 10
	lineTrialLimit = time.Minute
)

// tryLines runs all-reduces by lines on all ranks, if nothing forbids it, and compares the
// results. If lines are torn on one rank, no rank uses them. A torn line has data of the
// operation before the last one, or zeros. Each group of eight threads handles at most one
// line of each part, as in all operations except the largest.
func (r *Rank) tryLines(ctx context.Context, s *stream.Stream, exchange Exchange) (err error) {
	if r.ranks == 1 || r.noLines != "" {
		return nil
	}
	x, failed := r.newTrial(s)
	defer func() { err = errors.Join(err, x.close()) }()
	if err := Confer(ctx, exchange, r.ranks, failed); err != nil {
		return err // a rank without memory would keep the others waiting
	}
	torn, failed := r.try(ctx, s, x)
	said, err := confer(ctx, exchange, r.ranks, torn, failed)
	if err != nil {
		return err
	}
	if r.noLines = firstOf(said); r.noLines != "" {
		slog.Warn("chorus: lines of 128 bytes arrive torn, so own all-reduces go without them", "rank", r.String(), "found", r.noLines)
	}
	return nil
}

// A trial is the memory of the all-reduces of tryLines. Its host memory is page-locked: with pageable
// memory, eight ranks of one process on one GPU wait for each other in the driver.
type trial struct {
	x       memory.Slice[float32]
	in, out *memory.Pinned[float32]
}

func (r *Rank) newTrial(s *stream.Stream) (x trial, err error) {
	n := min(r.Limits().TwoShotLines/4, trialElements)
	if x.x, err = memory.Make[float32](s, n); err != nil {
		return x, err
	}
	if x.in, err = memory.MakePinned[float32](r.dev, n); err != nil {
		return x, err
	}
	x.out, err = memory.MakePinned[float32](r.dev, n)
	return x, err
}

func (x *trial) close() error { return errors.Join(x.x.Close(), x.in.Close(), x.out.Close()) }

// try runs several all-reduces of x, each with different data, and describes wrong
// results. The end of the context aborts the rank.
func (r *Rank) try(ctx context.Context, s *stream.Stream, x trial) (torn string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lineTrialLimit, errors.New("the other ranks did not send their lines within a minute"))
	defer cancel()
	stop := context.AfterFunc(ctx, r.Abort)
	defer func() {
		if !stop() {
			err = errors.Join(context.Cause(ctx), err)
		}
	}()
	for k := range lineTrials {
		for i := range x.in.Data() {
			x.in.Data()[i] = trialValue(k, r.rank, i)
		}
		o := operation{kind: flight.AllReduce, algorithm: TwoShotLines, dtype: memory.Float32, format: formatOf[memory.Float32], bytes: x.x.Bytes(), dst: x.x.Ptr(), src: x.x.Ptr()}
		err := errors.Join(x.x.CopyFromPinned(s, x.in), r.enqueue(s, &o), x.x.CopyToPinned(s, x.out), s.Sync(context.WithoutCancel(ctx)))
		if err != nil {
			return "", err
		}
		if torn == "" {
			torn = r.tornIn(x.out.Data(), k)
		}
	}
	return torn, nil
}

// tornIn describes a wrong sum, or returns "".
func (r *Rank) tornIn(out []float32, trial int) string {
	for i, have := range out {
		want := float32(0)
		for rank := range r.ranks {
			want += trialValue(trial, rank, i)
		}
		if have != want {
			return fmt.Sprintf("lines that come torn: element %d of trial %d is %g on rank %d: want %g", i, trial, have, r.rank, want)
		}
	}
	return ""
}

// trialValue is the i-th number of a rank in a trial: an integer, so that sums are exact,
// and different in each trial.
func trialValue(trial, rank, i int) float32 { return float32(1 + (i*7+rank*13+trial*101)%1021) }
