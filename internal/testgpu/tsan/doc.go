// Package tsan tells a test whether the race detector watches it. The detector slows a
// program down by ten and lets every sync.Pool drop objects at random, so tests that
// count allocations, or that draw many programs, ask for it.
package tsan
