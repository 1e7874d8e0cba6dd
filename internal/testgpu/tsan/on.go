//go:build race

package tsan

// On reports whether the race detector watches this test binary.
const On = true
