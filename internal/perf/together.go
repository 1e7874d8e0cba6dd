package perf

import (
	"context"

	"github.com/gochorus/chorus/nccl"
)

// An ensemble has the calls of the local ranks where one of them issues those of all.
type ensemble struct {
	calls [][]func() error // of each local rank
	err   error            // of the last that were issued
}

// together makes of this rank's calls such that issue those of all local ranks as one
// group, when all of them have come to the same one.
func (r *rank) together(ctx context.Context, calls []func() error) []func() error {
	e := r.all
	e.calls[r.local] = calls
	list := make([]func() error, len(calls))
	for k := range calls {
		list[k] = func() error {
			r.line.wait(ctx, len(e.calls))
			if r.local == 0 && ctx.Err() == nil {
				e.err = nccl.Group(r.c, func() error { return e.issue(k) })
			}
			r.line.wait(ctx, len(e.calls))
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return e.err
		}
	}
	return list
}

func (e *ensemble) issue(k int) error {
	for _, calls := range e.calls {
		if err := calls[k](); err != nil {
			return err
		}
	}
	return nil
}
