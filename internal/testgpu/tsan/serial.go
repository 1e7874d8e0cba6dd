package tsan

import "testing"

// Serial skips a long test of one goroutine if the race detector watches it. make test runs the
// package a second time without the detector; internal/archtest checks that.
func Serial(t testing.TB) {
	t.Helper()
	if On {
		t.Skip("the test runs in one goroutine: make test runs it without the race detector")
	}
}
