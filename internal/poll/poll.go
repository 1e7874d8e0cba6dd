// Package poll waits for something that can only be asked: it spins for a
// moment, because most waits for a GPU are short, and then asks ever more
// rarely. No goroutine and no blocked OS thread is left behind when the context
// ends.
package poll

import (
	"context"
	"runtime"
	"time"
)

const (
	spin  = 50 * time.Microsecond
	first = 20 * time.Microsecond
	last  = time.Millisecond
)

// Until asks until ready reports true or an error, or ctx ends; then it returns
// the cause of ctx.
func Until(ctx context.Context, ready func() (bool, error)) error {
	start := time.Now()
	pause := first
	for {
		if ok, err := ready(); ok || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if time.Since(start) < spin {
			runtime.Gosched()
			continue
		}
		if err := sleep(ctx, pause); err != nil {
			return err
		}
		pause = min(pause*3/2, last)
	}
}

// UntilNoLaterThan is Until for a wait that no caller bounds: it reports false
// when the time is over.
func UntilNoLaterThan(d time.Duration, ready func() bool) bool {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return Until(ctx, func() (bool, error) { return ready(), nil }) == nil
}

// Within calls fn on a goroutine of its own and waits for it no longer than d: then it
// reports false, and fn goes on alone. It is for calls of a driver that may not answer, as
// CUDA's does not while a launch waits for room on a stream that is full.
func Within[T any](d time.Duration, fn func() T) (v T, returned bool) {
	done := make(chan T, 1)
	go func() { done <- fn() }()
	patience := time.NewTimer(d)
	defer patience.Stop()
	select {
	case v = <-done:
		return v, true
	case <-patience.C:
		return v, false
	}
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
