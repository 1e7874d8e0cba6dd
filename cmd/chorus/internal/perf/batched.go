package perf

import (
	"context"

	"github.com/gochorus/chorus/internal/route"
)

// A localState is the state that the ranks of this process share.
type localState struct {
	barrier    barrier
	localCalls [][]issue    // the calls of each local rank, if one rank issues for all
	batch      *route.Batch // for these calls
	batchErr   error        // of the last operation that one rank issued for all
}

// batched returns calls that issue the corresponding calls of all local ranks in one batch,
// once all local ranks have reached them.
func (r *rank) batched(ctx context.Context, calls []issue) []func() error {
	r.localCalls[r.local] = calls
	list := make([]func() error, len(calls))
	for k := range calls {
		list[k] = func() error {
			return r.onFirst(ctx, func() error { return r.issueAll(k) })
		}
	}
	return list
}

// unbatched returns calls that issue the calls of this rank only.
func unbatched(calls []issue) []func() error {
	list := make([]func() error, len(calls))
	for k, call := range calls {
		list[k] = func() error { return call(nil) }
	}
	return list
}

// onFirst runs fn on the first local rank when all local ranks have called onFirst, and
// returns its error to all callers.
func (r *rank) onFirst(ctx context.Context, fn func() error) error {
	n := r.group.Locals()
	r.barrier.wait(ctx, n)
	if r.local == 0 && ctx.Err() == nil {
		r.batchErr = fn()
	}
	r.barrier.wait(ctx, n)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return r.batchErr
}

// issueAll issues call k of all local ranks in one batch.
func (r *rank) issueAll(k int) error {
	b := r.batch
	defer b.Reset()
	for _, calls := range r.localCalls {
		if err := calls[k](b.Batch); err != nil {
			return err
		}
	}
	return b.Enqueue()
}
