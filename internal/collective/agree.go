package collective

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/safe"
)

// A Said is what a rank tells all ranks about its part of a collective call: a value, or why it cannot go on. The ranks
// exchange it before they do something that waits for the others, so that a rank that cannot go on keeps no other waiting, and
// every rank knows why.
//
// Ranks that have no group yet exchange it with [Agree]. The ranks of a group do so with route.Agree.
type Said[T any] struct {
	Failed              string `json:",omitempty"` // why the rank cannot go on, in one line, or ""
	Feature, Need, Have string `json:",omitempty"` // of a *device.UnsupportedError
	Value               T
}

// SaidOf returns what a rank with a value tells the others. failed is why it cannot go on, or nil.
func SaidOf[T any](value T, failed error) Said[T] {
	s := Said[T]{Value: value}
	if failed == nil {
		return s
	}
	s.Failed = strings.ReplaceAll(failed.Error(), "\n", "; ")
	if x, ok := errors.AsType[*device.UnsupportedError](failed); ok {
		s.Feature, s.Need, s.Have = x.Feature, x.Need, x.Have
	}
	return s
}

// err returns the error that the failure of a rank is for the others, or nil.
func (s *Said[T]) err(rank int) error {
	switch {
	case s.Failed == "":
		return nil
	case s.Need != "":
		return &ToldError{rank, &device.UnsupportedError{Feature: s.Feature, Need: s.Need, Have: s.Have}}
	}
	return &ToldError{rank, errors.New(s.Failed)}
}

// A ToldError is the error of another rank; all ranks get it.
type ToldError struct {
	Rank int
	Err  error
}

func (e *ToldError) Error() string { return fmt.Sprintf("rank %d cannot: %v", e.Rank, e.Err) }

// Unwrap returns the other rank's error.
func (e *ToldError) Unwrap() error { return e.Err }

// An Exchange sends each rank's message to all ranks and returns all messages, by rank. All ranks call it equally often.
type Exchange func(ctx context.Context, mine []byte) ([][]byte, error)

// Agree exchanges values. If a rank has failed, all ranks return an error: that
// rank its own, and the others one that names the first rank that failed. If
// their own context has ended, the error has its cause, too. All ranks agree on
// whether it matches errors.ErrUnsupported.
func Agree[T any](ctx context.Context, exchange Exchange, ranks int, mine T, failed error) ([]T, error) {
	text, err := json.Marshal(SaidOf(mine, failed))
	if err != nil {
		return nil, err
	}
	all, err := exchange(ctx, text)
	switch {
	case err != nil:
		return nil, errors.Join(failed, fmt.Errorf("exchange: %w", err))
	case failed != nil:
		return nil, failed
	case len(all) != ranks:
		return nil, fmt.Errorf("exchange: it gave what %d ranks have said: want %d", len(all), ranks)
	}
	values := make([]T, ranks)
	for i := range values {
		var said Said[T]
		if err := json.Unmarshal(all[i], &said); err != nil {
			return nil, fmt.Errorf("exchange: what rank %d has said: %w", i, err)
		}
		safe.Record(&said)
		if err := said.err(i); err != nil {
			if ctx.Err() != nil { // one context may have ended for several ranks
				err = errors.Join(err, context.Cause(ctx))
			}
			return nil, err
		}
		values[i] = said.Value
	}
	return values, nil
}
