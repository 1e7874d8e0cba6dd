//go:build !race

package testhost

// On reports whether the race detector watches this test binary.
const On = false
