package fabric

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// How often lines are tried, with how many elements at most, and how long they may take,
// which only ends a hang.
const (
	lineTrials     = 8
	trialElements  = 16 << 10
	lineTrialLimit = time.Minute
)

// tryLines lets all ranks reduce by lines, where nothing speaks against it, and compares
// what comes: where lines are torn on one rank, none has them. Torn ones have something
// of the last operation but one, or zeros. There is a line of each share for eight threads
// at most, as in all operations but the largest.
func (r *Rank) tryLines(ctx context.Context, s *stream.Stream, exchange Exchange) (err error) {
	if r.ranks == 1 || r.noLines != "" {
		return nil
	}
	x, failed := memory.Make[float32](s, min(r.Limits().TwoShotLines/4, trialElements))
	defer func() { err = errors.Join(err, x.Close()) }()
	if err := Confer(ctx, exchange, r.ranks, failed); err != nil {
		return err // and nobody waits for who has no memory
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

// trial has some all-reduces of x, each of other data, and returns what is wrong with
// them. The end of the context aborts the rank.
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
		o := operation{kind: AllReduces, algorithm: TwoShotLines, dtype: memory.Float32, format: formatOf[memory.Float32], bytes: x.Bytes(), dst: x.Ptr(), src: x.Ptr()}
		if err := errors.Join(x.CopyFrom(s, in), r.enqueue(s, &o), x.CopyTo(s, out)); err != nil {
			return "", err
		}
		if torn == "" {
			torn = r.tornIn(out, trial)
		}
	}
	return torn, nil
}

// tornIn says what is wrong with a sum, or nothing.
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

// trialValue is the i-th number of a rank in a trial: whole, so that sums are exact, and
// another one than in the other trials.
func trialValue(trial, rank, i int) float32 { return float32(1 + (i*7+rank*13+trial*101)%1021) }
