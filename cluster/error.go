package cluster

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/internal/job"
)

// ErrDismissed is returned by Run if the host of this process leaves the job because its
// launcher received SIGTERM. The process should exit.
var ErrDismissed = errors.New("cluster: this host leaves the job")

// Errors of store calls.
var (
	// ErrStoreFull matches a store call that would exceed the size of the whole store (see Store).
	ErrStoreFull = errors.New("the store is full")

	errNotNumber = errors.New("not a number of 64 bits")            // of an Add
	errBusy      = errors.New("this rank is already waiting there") // in a Barrier
	errNoKey     = errors.New("a key must not be empty")
	errStale     = errors.New("the epoch of this call has ended")
)

// A ChangeError is the cause of the end of an epoch that no loss has ended: hosts or
// processes join, or a host leaves.
type ChangeError struct {
	Epoch  int // that ends
	Reason string
}

func (e *ChangeError) Error() string {
	return fmt.Sprintf("cluster: epoch %d ends: %s", e.Epoch, e.Reason)
}

// A StoreError describes a failed store call. It matches ErrTooLarge and similar errors, the context's error, or the
// *MemberLostError that ended the job.
type StoreError struct {
	Op   string // "get", "set", …
	Key  string
	Rank int // rank of the caller
	Note string
	Err  error
}

func (e *StoreError) Error() string {
	note := ""
	if e.Note != "" {
		note = e.Note + ": "
	}
	return fmt.Sprintf("cluster: %s %q on rank %d: %s%v", e.Op, clip(e.Key), e.Rank, note, e.Err)
}

func (e *StoreError) Unwrap() error { return e.Err }

// A BarrierError names the ranks that were missing from a barrier. Missing is nil
// if the coordinator did not answer.
type BarrierError struct {
	Name    string
	Rank    int   // rank of the caller
	Missing []int // ranks that had not reached the barrier
	Left    []int // ranks of Missing that left the job
	Err     error // the context's error, or nil if a rank left
}

func (e *BarrierError) Error() string {
	head := fmt.Sprintf("cluster: barrier %q on rank %d: ", clip(e.Name), e.Rank)
	if len(e.Left) > 0 {
		return fmt.Sprintf("%s%s left the job without reaching it", head, job.RankList(e.Left))
	}
	if len(e.Missing) > 0 {
		return fmt.Sprintf("%s%s missing: %v", head, job.RankList(e.Missing), e.Err)
	}
	return fmt.Sprintf("%s%v", head, e.Err)
}

func (e *BarrierError) Unwrap() error { return e.Err }

// clip shortens a key for an error message.
func clip(s string) string {
	if len(s) > 80 {
		return s[:77] + "..."
	}
	return s
}
