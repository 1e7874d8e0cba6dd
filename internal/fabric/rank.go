package fabric

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Rank is this rank of a group that Open has made. Its operations may be enqueued
// by any goroutine; all ranks must have them in the same order.
type Rank struct {
	owner       handle.Owner
	dev         *device.Device
	rank, ranks int
	slot, whole int    // bytes
	blocks      int    // the most that a kernel may have
	noLines     string // why TwoShotLines cannot be had, alike on all ranks; "" where it can
	forced      grid   // in measurements

	peers   []*scratch // of the k-th rank after this one; the first is its own
	control memory.Slice[uint64]
	host    *memory.Pinned[uint32] // not 0 when the rank gives up, and when it has
	stop    atomic.Pointer[uint32] // the first of host, until Close
	args    [signatureParam]kernel.Arg

	aborted atomic.Bool
	ending  sync.Mutex // held while host may be closed

	order stream.Sequence // of the operations: one epoch after the other
}

// Rank returns the number of the rank in its group.
func (r *Rank) Rank() int { return r.rank }

// Ranks returns the number of ranks.
func (r *Rank) Ranks() int { return r.ranks }

// Device returns the rank's device.
func (r *Rank) Device() *device.Device { return r.dev }

// String names the rank in errors.
func (r *Rank) String() string { return fmt.Sprintf("rank %d of %d (%s)", r.rank, r.ranks, r.dev) }

// Abort ends the rank: its operations that wait for others give up within
// milliseconds, and those to come are refused. What was given up has left its
// destination undefined. The other ranks know nothing of it, and wait until they are
// aborted too. Abort returns at once, may be called by any goroutine at any time, and
// is idempotent.
func (r *Rank) Abort() {
	if r == nil {
		return
	}
	r.aborted.Store(true)
	r.ending.Lock()
	defer r.ending.Unlock()
	if stop := r.stop.Load(); stop != nil {
		atomic.StoreUint32(stop, 1)
	}
}

// Err returns why the rank can have no operations any more, or nil: the error matches
// ErrAborted or device.ErrClosed. It says whether an operation was given up by now,
// which is known once its stream is past it.
func (r *Rank) Err() error {
	if r.owner.Closed() {
		return r.errorf("use", "%w", device.ErrClosed)
	}
	if !r.aborted.Load() {
		return nil
	}
	r.ending.Lock()
	defer r.ending.Unlock()
	if host := r.host.Data(); host != nil && atomic.LoadUint32(&host[1]) != 0 {
		return r.errorf("use", "an operation was given up: %w", ErrAborted)
	}
	return r.errorf("use", "%w", ErrAborted)
}

// Close aborts the rank, waits for the streams that had its operations, and frees its
// memory. The ranks of a group close when all of them have completed their work: who
// still waits for one that has closed waits until it is aborted. Close is idempotent
// and safe on nil. It fails, and the rank stays open, while a graph has captured its
// operations, and while a stream that had some is captured.
func (r *Rank) Close() error {
	if r == nil || r.owner.Closed() {
		return nil
	}
	open := true
	err := r.order.Close("fabric: close "+r.String(), func(users []*stream.Stream) error {
		if open = r.owner.Close(); !open {
			return nil
		}
		r.Abort()
		var errs []error
		for _, s := range users {
			errs = append(errs, r.settle(s))
		}
		return errors.Join(errs...)
	})
	if !open || !r.owner.Closed() {
		return err
	}
	r.ending.Lock()
	defer r.ending.Unlock()
	r.stop.Store(nil)
	return errors.Join(err, r.free())
}

// settle waits for a stream. A device that is lost uses nothing.
func (r *Rank) settle(s *stream.Stream) error {
	err := r.dev.Do("cuStreamSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(s.Raw()) })
	if err != nil && r.dev.Err() == nil {
		return r.errorf("close", "%w", err)
	}
	return nil
}

// Hold notes that a graph uses r. For Chorus's own packages.
func (r *Rank) Hold(g stream.Holder) { r.order.Hold(g) }

// LetGo undoes Hold. For Chorus's own packages.
func (r *Rank) LetGo(g stream.Holder) { r.order.LetGo(g) }

// Prepare notes that a graph that has operations of r is launched on s. For Chorus's
// own packages.
func (r *Rank) Prepare(s *stream.Stream) error {
	if err := r.Err(); err != nil {
		return err
	}
	return r.order.Prepare(s)
}

// Launched ends what Prepare began. For Chorus's own packages.
func (r *Rank) Launched(s *stream.Stream) { r.order.Launched(s) }
