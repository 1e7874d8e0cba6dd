package perf

import (
	"context"

	"github.com/gochorus/chorus/nccl"
)

// An ensemble is what the local ranks share where one of them acts for all.
type ensemble struct {
	calls [][]func() error // of each local rank
	err   error            // of what was done last
}

// together makes of this rank's calls such that issue those of all local ranks as one
// group, when all of them have come to the same one.
func (r *rank) together(ctx context.Context, calls []func() error) []func() error {
	r.all.calls[r.local] = calls
	list := make([]func() error, len(calls))
	for k := range calls {
		list[k] = func() error {
			return r.lead(ctx, func() error { return r.issueAll(k) })
		}
	}
	return list
}

// lead lets the first of the local ranks do its fn, when all have come, and gives its
// error to all.
func (r *rank) lead(ctx context.Context, fn func() error) error {
	n := r.group.Locals()
	r.line.wait(ctx, n)
	if r.local == 0 && ctx.Err() == nil {
		r.all.err = fn()
	}
	r.line.wait(ctx, n)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return r.all.err
}

// issueAll issues call k of all local ranks as one group.
func (r *rank) issueAll(k int) error {
	return nccl.Group(r.c, func() error {
		for _, calls := range r.all.calls {
			if err := calls[k](); err != nil {
				return err
			}
		}
		return nil
	})
}
