package fabric

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// A Rank is a rank of a group that Open has made. Its operations may be enqueued by any
// goroutine; all ranks must issue them in the same order.
type Rank struct {
	owner       handle.Owner
	dev         *device.Device
	rank, ranks int
	slot, whole int    // bytes
	blocks      int    // the maximum for a kernel
	clusters    bool   // whether the device has clusters of thread blocks
	noLines     string // why TwoShotLines is not supported, the same on all ranks; "" if it is
	forced      grid   // for measurements

	peers   []*scratch // of the k-th rank after this one; the first is the rank's own
	control memory.Slice[uint64]
	host    *memory.Pinned[uint32] // the first word requests the abort, the second confirms it; 0 otherwise
	stop    atomic.Pointer[uint32] // the first word of host, until Close
	args    [signatureParam]kernel.Arg

	aborted atomic.Bool
	ending  sync.Mutex // held while host may be closed

	order gpu.Sequence // serializes the operations: one epoch after the other
}

// Rank returns the number of the rank in its group.
func (r *Rank) Rank() int { return r.rank }

// Ranks returns the number of ranks.
func (r *Rank) Ranks() int { return r.ranks }

// Device returns the rank's device.
func (r *Rank) Device() *device.Device { return r.dev }

// String returns the name of the rank in errors.
func (r *Rank) String() string { return fmt.Sprintf("rank %d of %d (%s)", r.rank, r.ranks, r.dev) }

// Abort ends the rank: operations that wait for other ranks end within milliseconds, and
// later ones are refused. The destinations of aborted operations are undefined. The other
// ranks are not informed, and wait until they are aborted too. Abort returns at once, may
// be called by any goroutine at any time, and is idempotent.
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

// Err returns why the rank accepts no more operations, or nil: the error matches
// ErrAborted or device.ErrClosed. It says whether an operation was aborted so far, which
// is known once its stream has passed it.
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
// memory. Close the ranks of a group after all ranks have completed their operations: a
// rank that still waits for a closed one waits until it is aborted. Close is idempotent
// and accepts nil. It fails, and the rank stays open, while a graph has captured its
// operations, and while a stream that had operations is captured.
func (r *Rank) Close() error {
	if r == nil || r.owner.Closed() {
		return nil
	}
	open := true
	err := r.order.Close("fabric: close "+r.String(), func(users []*gpu.Stream) error {
		if open = r.owner.Close(); !open {
			return nil
		}
		r.Abort()
		var errs []error
		for _, s := range users {
			errs = append(errs, r.syncStream(s))
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

// syncStream waits for a stream. A lost device uses no memory, so its error is ignored.
func (r *Rank) syncStream(s *gpu.Stream) error {
	err := gpu.DeviceOf(r.dev).SyncStream(s.Raw())
	if err != nil && r.dev.Err() == nil {
		return r.errorf("close", "%w", err)
	}
	return nil
}

// Hold records that a graph uses r. For Chorus's own packages.
func (r *Rank) Hold(g gpu.Holder) { r.order.Hold(g) }

// LetGo undoes Hold. For Chorus's own packages.
func (r *Rank) LetGo(g gpu.Holder) { r.order.LetGo(g) }

// Prepare records that a graph with operations of r is launched on s. For Chorus's own
// packages.
func (r *Rank) Prepare(s gpu.HasStream) error {
	if err := r.Err(); err != nil {
		return err
	}
	return r.order.Prepare(s)
}

// Launched ends what Prepare began. For Chorus's own packages.
func (r *Rank) Launched(s gpu.HasStream) { r.order.Launched(s) }
