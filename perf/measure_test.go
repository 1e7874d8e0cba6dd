package perf

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestBarrier checks that nobody starts before all have come, and that those who wait for
// one who has failed go on when ctx ends.
func TestBarrier(t *testing.T) {
	const ranks, rounds = 3, 50
	var b barrier
	var come [rounds]atomic.Int32
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	var all sync.WaitGroup
	for i := range ranks {
		all.Go(func() {
			for k := range rounds {
				if come[k].Add(1); i == 0 && k == rounds-1 {
					cancel(errors.New("it comes no more"))
					return
				}
				b.wait(ctx, ranks)
				if n := come[k].Load(); n != ranks && k < rounds-1 {
					t.Errorf("one of %d started round %d when %d had come", ranks, k, n)
				}
			}
		})
	}
	all.Wait()
	require.Error(t, ctx.Err())
}
