package comm

import (
	"context"
	"fmt"

	"github.com/gochorus/chorus/internal/fabric"
)

// A meeting is how a rank speaks with the others while a group opens what it has beside
// NCCL.
type meeting struct {
	// exchange gives each rank what all have said.
	exchange fabric.Exchange
	// alarmed runs what waits for all ranks within a library. Where it fails on one rank,
	// the context ends on the others, which get an error that names that rank.
	alarmed func(ctx context.Context, fn func(context.Context) error) error
}

// meetHere is for the ranks of one process, whose context ends when one of them fails.
func meetHere(ranks int) func(rank int) meeting {
	seat := fabric.NewTable(ranks).Seat
	return func(rank int) meeting {
		return meeting{seat(rank), func(ctx context.Context, fn func(context.Context) error) error { return fn(ctx) }}
	}
}

// meetBy is for the rank of a process, over a Rendezvous.
func meetBy(r Rendezvous, prefix string) meeting {
	return meeting{exchangeBy(r, prefix+"ways/"), alarmBy(r, prefix+"alarm")}
}

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

// alarmBy is the alarm of a process's rank over a Rendezvous. It is for one fn alone.
func alarmBy(r Rendezvous, key string) func(context.Context, func(context.Context) error) error {
	return func(ctx context.Context, fn func(context.Context) error) error {
		ctx, cancel := context.WithCancelCause(ctx)
		var heard error // before over is closed
		over := make(chan struct{})
		go func() {
			defer close(over)
			if text, err := r.Get(ctx, key); err == nil {
				heard = fmt.Errorf("%s", text)
				cancel(heard)
			}
		}()
		err := fn(ctx)
		if err != nil && ctx.Err() == nil {
			// That of another rank that has failed too does as well.
			_ = r.Set(ctx, key, fmt.Appendf(nil, "rank %d cannot: %v", r.Rank(), err))
			cancel(err)
			return err
		}
		cancel(nil)
		if <-over; err != nil && heard != nil {
			return heard
		}
		return err
	}
}

// leaveTogether returns when all ranks know why there is no group: the end of one before,
// or of its communicator, would be what the others hear of.
func leaveTogether(ctx context.Context, r Rendezvous, prefix string) {
	_ = r.Set(ctx, fmt.Sprint(prefix, "read/", r.Rank()), []byte("read")) // the cause is what to report
	awaitReaders(ctx, r, prefix)
}
