package nccl

import (
	"testing"
	"time"
)

// SetAbortPatience shortens for a test how long an abort may take.
func SetAbortPatience(t *testing.T, d time.Duration) {
	old := abortPatience
	abortPatience = d
	t.Cleanup(func() { abortPatience = old })
}
