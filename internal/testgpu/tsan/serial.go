package tsan

import "testing"

// Serial skips a long test of one goroutine if the race detector watches it.
func Serial(t testing.TB) {
	t.Helper()
	skip(t, "the test runs in one goroutine")
}

// Timed skips a test of processes with time limits of seconds if the race detector watches it: it slows them down so
// much that a busy machine exceeds their limits.
func Timed(t testing.TB) {
	t.Helper()
	skip(t, "the test has time limits of seconds")
}

func skip(t testing.TB, why string) {
	t.Helper()
	if On {
		t.Skip(why + ": it runs without the race detector")
	}
}
