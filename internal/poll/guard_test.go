package poll

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// Guard returns the result of its function, and soon after the end of the context without it.
func TestGuard(t *testing.T) {
	failed := errors.New("failed")
	ctx, cancel := context.WithCancelCause(t.Context())
	require.NoError(t, Guard(context.Background(), func() error { return nil }))
	require.Equal(t, failed, Guard(ctx, func() error { return failed }))
	released := make(chan struct{})
	err := Guard(ctx, func() error {
		cancel(errors.New("late"))
		<-released
		return nil
	})
	require.EqualError(t, err, "the driver or NCCL does not answer: late")
	require.ErrorAs(t, err, new(*UnansweredError))
	close(released)
	require.Equal(t, failed, Guard(ctx, func() error { return failed }), "it answers although the context has ended")
}

// BenchmarkGuard is the cost of a wait that is over at once.
func BenchmarkGuard(b *testing.B) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	for name, ctx := range map[string]context.Context{"background": context.Background(), "guarded": ctx} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if err := Guard(ctx, func() error { return nil }); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
