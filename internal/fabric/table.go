package fabric

import (
	"context"
	"sync"
)

// A Table is the Exchange of ranks in one process.
type Table struct {
	mu     sync.Mutex
	ranks  int
	rounds []*round
}

// A round has the messages of all ranks in one exchange.
type round struct {
	said [][]byte
	left int
	over chan struct{}
}

// NewTable makes a table for the given number of ranks.
func NewTable(ranks int) *Table { return &Table{ranks: ranks} }

// Seat returns the Exchange of a rank.
func (t *Table) Seat(rank int) Exchange {
	next := 0
	return func(ctx context.Context, mine []byte) ([][]byte, error) {
		r := t.say(next, rank, mine)
		next++
		select {
		case <-r.over:
			return r.said, nil
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (t *Table) say(n, rank int, what []byte) *round {
	t.mu.Lock()
	defer t.mu.Unlock()
	if n == len(t.rounds) {
		t.rounds = append(t.rounds, &round{make([][]byte, t.ranks), t.ranks, make(chan struct{})})
	}
	r := t.rounds[n]
	r.said[rank] = what
	if r.left--; r.left == 0 {
		close(r.over)
	}
	return r
}
