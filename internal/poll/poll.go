// Package poll waits for a condition that can only be polled. It spins for a moment,
// because most waits for a GPU are short, and then polls at growing intervals. When the
// context ends, no goroutine and no blocked OS thread remains.
package poll

import (
	"context"
	"fmt"
	"runtime"
	"time"
)

const (
	spin  = 50 * time.Microsecond
	first = 20 * time.Microsecond
	last  = time.Millisecond
)

// Until polls ready until it returns true or an error, or ctx ends; then it
// returns the cause of ctx.
func Until(ctx context.Context, ready func() (bool, error)) error {
	spinner := newSpinner()
	pause := first
	for {
		if ok, err := ready(); ok || err != nil {
			return err
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if spinner.spin() {
			continue
		}
		if err := sleep(ctx, pause); err != nil {
			return err
		}
		pause = min(pause*3/2, last)
	}
}

// A spinner limits how long a wait polls without a pause. It also ends when the clock stands still, as that of
// testing/synctest does while a goroutine of the test runs.
type spinner struct{ start, last time.Time }

func newSpinner() *spinner { return &spinner{start: time.Now()} }

// spin reports whether the wait polls again at once, after it has let other goroutines run.
func (s *spinner) spin() bool {
	runtime.Gosched()
	now := time.Now()
	moves := !now.Equal(s.last)
	s.last = now
	return moves && now.Sub(s.start) < spin
}

// UntilNoLaterThan is Until for waits without a context. It returns false after
// d.
func UntilNoLaterThan(d time.Duration, ready func() bool) bool {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	defer cancel()
	return Until(ctx, func() (bool, error) { return ready(), nil }) == nil
}

// Within calls fn on a new goroutine and waits at most d for it. After that it
// returns false, and fn continues alone. Use it for driver calls that may block,
// as CUDA's do while a launch waits for space on a full stream.
func Within[T any](d time.Duration, fn func() T) (v T, returned bool) {
	done := make(chan T, 1)
	go func() { done <- fn() }()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case v = <-done:
		return v, true
	case <-timer.C:
		return v, false
	}
}

// afterEnd is how long Guard waits for fn after the end of the context.
const afterEnd = 100 * time.Millisecond

// An UnansweredError reports a call of a driver or a library that did not return. It wraps the
// cause of the context that ended meanwhile.
type UnansweredError struct{ Cause error }

func (e *UnansweredError) Error() string {
	return fmt.Sprintf("the driver or NCCL does not answer: %v", e.Cause)
}

// Unwrap returns the cause.
func (e *UnansweredError) Unwrap() error { return e.Cause }

// Guard returns the result of fn, which waits until ctx ends. If fn is in a call of a driver or a library
// that does not return, Guard returns an *UnansweredError soon after the end of ctx, and fn continues alone. fn runs on another goroutine, unless ctx never ends. The first
// moment of the wait is spent polling, because most waits for a GPU are short and waking a goroutine
// takes longer.
func Guard(ctx context.Context, fn func() error) error {
	if ctx.Done() == nil {
		return fn()
	}
	result := make(chan error, 1)
	go func() { result <- fn() }()
	for spinner := newSpinner(); spinner.spin(); {
		select {
		case err := <-result:
			return err
		default:
		}
	}
	select {
	case err := <-result:
		return err
	case <-ctx.Done():
	}
	timer := time.NewTimer(afterEnd)
	defer timer.Stop()
	select {
	case err := <-result:
		return err
	case <-timer.C:
		return &UnansweredError{context.Cause(ctx)}
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
