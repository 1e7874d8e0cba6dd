package fabric

import (
	"errors"
	"fmt"
	"slices"
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
	slot, whole int  // bytes
	blocks      int  // the most that a kernel may have
	forced      grid // in measurements

	peers   []*scratch // of the k-th rank after this one; the first is its own
	control memory.Slice[uint64]
	host    *memory.Pinned[uint32] // not 0 when the rank gives up, and when it has
	stop    atomic.Pointer[uint32] // the first of host, until Close
	args    [signatureParam]kernel.Arg

	aborted atomic.Bool
	ending  sync.Mutex // held while host may be closed

	mu     sync.Mutex       // held while an operation is enqueued; guards what follows
	users  []*stream.Stream // that had operations; each is retained
	last   *stream.Stream   // that had the last one, in a graph or not
	behind *stream.Event    // behind it, where that was in a graph
	graphs []stream.Holder  // that captured some
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
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.graphs) > 0 {
		return r.errorf("close", "%s uses it: close the graph first", r.graphs[0])
	}
	for _, s := range r.users {
		if err := s.RefuseCapture("fabric: close "+r.String(), "its operations cannot be waited for"); err != nil {
			return err
		}
	}
	if !r.owner.Close() {
		return nil
	}
	r.Abort()
	var errs []error
	for _, s := range r.users {
		errs = append(errs, r.settle(s), s.Release())
	}
	r.users = nil
	r.ending.Lock()
	defer r.ending.Unlock()
	r.stop.Store(nil)
	return errors.Join(append(errs, r.free())...)
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
func (r *Rank) Hold(g stream.Holder) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.graphs = append(r.graphs, g)
}

// LetGo undoes Hold. For Chorus's own packages.
func (r *Rank) LetGo(g stream.Holder) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.graphs, g); i >= 0 {
		r.graphs = slices.Delete(r.graphs, i, i+1)
	}
}

// Prepare notes that a graph that has operations of r is launched on s. For Chorus's
// own packages.
func (r *Rank) Prepare(s *stream.Stream) error {
	if err := r.Err(); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if err := r.use(s); err != nil {
		return err
	}
	return r.follow(s)
}

// Launched ends what Prepare began: what comes on other streams is to wait for the graph,
// and for nothing that follows it on s. For Chorus's own packages.
func (r *Rank) Launched(s *stream.Stream) {
	r.mu.Lock()
	defer r.mu.Unlock()
	behind, err := s.Record(nil)
	if err != nil {
		return // the stream itself is to be waited for then
	}
	_ = r.behind.Close() // nobody needs it any more
	r.behind = behind
}

// follow lets s wait for the rank's operations so far, where the last of them is on
// another stream: one epoch after the other. r.mu is held.
func (r *Rank) follow(s *stream.Stream) error {
	last, behind := r.last, r.behind
	r.last, r.behind = s, nil
	defer behind.Close()
	switch {
	case last == nil || last == s:
		return nil
	case behind != nil:
		return s.Wait(behind)
	}
	return s.WaitStream(last)
}

// use notes that s gets operations. r.mu is held.
func (r *Rank) use(s *stream.Stream) error {
	if slices.Contains(r.users, s) {
		return nil
	}
	if !s.Retain() {
		return s.Check("fabric", nil)
	}
	r.users = append(r.users, s)
	return nil
}
