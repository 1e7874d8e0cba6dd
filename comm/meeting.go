package comm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gochorus/chorus/internal/fabric"
)

// exchangeBy is the exchange of a process's rank over a Rendezvous.
func exchangeBy(r Rendezvous, prefix string) fabric.Exchange {
	round := 0
	return func(ctx context.Context, mine []byte) ([][]byte, error) {
		key := func(rank int) string { return fmt.Sprintf("%s%d/%d", prefix, round, rank) }
		if err := r.Set(ctx, key(r.Rank()), mine); err != nil {
			return nil, err
		}
		all := make([][]byte, r.Size())
		for i := range all {
			var err error
			if all[i], err = r.Get(ctx, key(i)); err != nil {
				return nil, fmt.Errorf("wait for rank %d: %w", i, err)
			}
		}
		round++
		return all, nil
	}
}

// alarmed runs what waits for the other ranks of a Rendezvous, within libraries too. Where
// it fails on one rank, or the context ends there, the context ends on the others, which
// get an error that names that rank; it returns when they know.
func alarmed(parent context.Context, r Rendezvous, prefix string, fn func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(parent)
	var heard error // before over is closed
	over := make(chan struct{})
	go func() {
		defer close(over)
		if text, err := r.Get(ctx, prefix+"alarm"); err == nil {
			heard = fmt.Errorf("%s", text)
			cancel(heard)
		}
	}()
	err := fn(ctx)
	late := ctx.Err() != nil
	cancel(nil)
	<-over
	switch {
	case err == nil:
		return nil
	case late && heard != nil:
		err = heard
	case r.Context().Err() != nil:
		return err // the others know too
	}
	tell(parent, r, prefix, err, !late && !learnt(err))
	return err
}

// learnt reports whether an error is one that all ranks have alike.
func learnt(err error) bool {
	_, told := errors.AsType[*fabric.ToldError](err)
	return told || errors.Is(err, ErrMismatch)
}

// readTime bounds how long a rank waits until the others know what it does.
const readTime = 5 * time.Second

// tell gives the alarm where the error is the rank's own, or its context has ended, and
// waits until the others have their errors, but not where the context has ended. It may
// hold the store, and they would only learn that it is gone.
func tell(parent context.Context, r Rendezvous, prefix string, cause error, own bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(parent), readTime)
	defer cancel()
	if own || parent.Err() != nil {
		// That of another rank that has failed too does as well.
		_ = r.Set(ctx, prefix+"alarm", fmt.Appendf(nil, "rank %d cannot: %v", r.Rank(), cause))
	}
	_ = r.Set(ctx, fmt.Sprint(prefix, "read/", r.Rank()), []byte("read")) // the cause is what to report
	for i := 0; i < r.Size() && parent.Err() == nil; i++ {
		if _, err := r.Get(ctx, fmt.Sprint(prefix, "read/", i)); err != nil {
			return
		}
	}
}
