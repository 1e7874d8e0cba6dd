package gemm

import (
	"github.com/gochorus/chorus/internal/cublasapi"
	"github.com/gochorus/chorus/stream"
)

// Replace lets the device of s use another cuBLASLt from now on.
func Replace(s *stream.Stream, with func(cublasapi.LtAPI) cublasapi.LtAPI) error {
	q, err := queueOf(s)
	if err == nil {
		_, err = q.site.openLt(q.dev)
	}
	if err == nil {
		q.site.lt = with(q.site.lt)
	}
	return err
}

// Locked reports whether a call that uses the products of s is in progress.
func Locked(s *stream.Stream) bool {
	q, err := queueOf(s)
	if err != nil || !q.mu.TryLock() {
		return err == nil
	}
	q.mu.Unlock()
	return false
}

// MaxPlans is the number of plans that a stream keeps.
const MaxPlans = maxPlans
