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
	x, failed := memory.Make[float32](s, min(r.Limits().TwoShotLines/4, trialElements))
	defer func() { err = errors.Join(err, x.Close()) }()
	if err := Confer(ctx, exchange, r.ranks, failed); err != nil {
		return err // a rank without memory would keep the others waiting
	}
	torn, failed := r.trial(ctx, s, x)
	said, err := confer(ctx, exchange, r.ranks, torn, failed)
	if err != nil {
		return err
	}
	if r.noLines = firstOf(said); r.noLines != "" {
		slog.Warn("chorus: lines of 128 bytes arrive torn, so own all-reduces go without them", "rank", r.String(), "found", r.noLines)
	}
	return nil
}

// trial runs several all-reduces of x, each with different data, and describes wrong
// results. The end of the context aborts the rank.
func (r *Rank) trial(ctx context.Context, s *stream.Stream, x memory.Slice[float32]) (torn string, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, lineTrialLimit, errors.New("the other ranks did not send their lines within a minute"))
	defer cancel()
	stop := context.AfterFunc(ctx, r.Abort)
	defer func() {
		if !stop() {
			err = errors.Join(context.Cause(ctx), err)
		}
	}()
	in, out := make([]float32, x.Len()), make([]float32, x.Len())
	for trial := range lineTrials {
		for i := range in {
			in[i] = trialValue(trial, r.rank, i)
		}
		o := operation{kind: flight.AllReduce, algorithm: TwoShotLines, dtype: memory.Float32, format: formatOf[memory.Float32], bytes: x.Bytes(), dst: x.Ptr(), src: x.Ptr()}
		if err := errors.Join(x.CopyFrom(s, in), r.enqueue(s, &o), x.CopyTo(s, out)); err != nil {
			return "", err
		}
		if torn == "" {
			torn = r.tornIn(out, trial)
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
