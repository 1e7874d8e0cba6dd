package comm

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/gochorus/chorus/internal/fabric"
)

// exchangeBy returns the exchange of this process's rank over a Rendezvous.
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

// withAlarm runs fn, which waits for the other ranks of a Rendezvous, possibly inside a
// library. If fn fails on one rank, or the context ends there, the context ends on the
// other ranks with an error that names that rank. withAlarm returns after all ranks have
// read that error.
func withAlarm(parent context.Context, r Rendezvous, prefix string, fn func(context.Context) error) error {
	ctx, cancel := context.WithCancelCause(parent)
	var received error // written before done is closed
	done := make(chan struct{})
	go func() {
		defer close(done)
		if text, err := r.Get(ctx, prefix+"alarm"); err == nil {
			received = fmt.Errorf("%s", text)
			cancel(received)
		}
	}()
	err := fn(ctx)
	late := ctx.Err() != nil
	cancel(nil)
	<-done
	switch {
	case err == nil:
		return nil
	case late && received != nil:
		err = received
	case r.Context().Err() != nil:
		return err // the session ends on all ranks
	}
	raiseAlarm(parent, r, prefix, err, !late && !knownToAll(err))
	return err
}

// knownToAll reports whether all ranks have the same error.
func knownToAll(err error) bool {
	_, known := errors.AsType[*fabric.ToldError](err)
	return known || errors.Is(err, ErrMismatch)
}

// alarmReadTime is the maximum time that a rank waits for the others to read its alarm.
const alarmReadTime = 5 * time.Second

// raiseAlarm raises the alarm if the error is the rank's own or its context has ended. It then
// waits until the other ranks have read it. It does not wait if the context has ended. The
// wait matters because this rank may host the store: without it, the other ranks would
// only see that the store is gone.
func raiseAlarm(parent context.Context, r Rendezvous, prefix string, cause error, own bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(parent), alarmReadTime)
	defer cancel()
	if own || parent.Err() != nil {
		// If another rank has also failed and raised the alarm, its text is equally good.
		_ = r.Set(ctx, prefix+"alarm", fmt.Appendf(nil, "rank %d cannot: %v", r.Rank(), cause))
	}
	_ = r.Set(ctx, fmt.Sprint(prefix, "read/", r.Rank()), []byte("read")) // report the cause, not this error
	for i := 0; i < r.Size() && parent.Err() == nil; i++ {
		if _, err := r.Get(ctx, fmt.Sprint(prefix, "read/", i)); err != nil {
			return
		}
	}
}
