package nccl

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/stream"
)

// A Communicator is one rank of a group of ranks, each on its own device
// (ncclComm_t).
type Communicator struct {
	owner      handle.Owner
	api        ncclapi.API
	dev        *device.Device
	rank, size int
	version    int32
	number     int64         // how many were made in this process before
	h          *ncclapi.Comm // NCCL writes the handle through it

	rec         *recorder
	marks       marks
	clique      *clique
	look        func()  // watch, made once
	settings    *Config // as they were given, for children
	onFailure   func(*Communicator, error) error
	recoverable bool
	forgiven    atomic.Bool // it has failed, and may still be a parent
	children    int         // guarded by mu

	mu      sync.Mutex   // held by the call that is in NCCL
	life    sync.RWMutex // held for reading while Err is in NCCL
	failed  atomic.Pointer[failure]
	leaving atomic.Bool             // an abort begins: failures of other ranks are no longer its own
	closing atomic.Pointer[closing] // how this process ends it
	flag    *abortFlag
	sources atomic.Pointer[[]*device.Device] // by rank, from which copy engines have fetched; nil if none have
	ending  chan struct{}                    // closed when the end begins
	ended   chan struct{}                    // and when it is done
	left    atomic.Pointer[leftAlone]
	holds   holds
	pools   pools
	sums    sync.Map // the memory.DType of each open PreMulSum, by Op

	substitute atomic.Pointer[substitution]

	spansMu sync.Mutex             // held while spans changes
	spans   atomic.Pointer[[]span] // of the symmetric windows
}

var made atomic.Int64

// NewCommunicator makes rank of size ranks (ncclCommInitRankScalable). It
// returns when all ranks have called it with the same id and size. When ctx
// ends first it returns the cause; the attempt cannot be called back from NCCL,
// so it goes on by itself and is aborted when it ends.
func NewCommunicator(ctx context.Context, dev *device.Device, id UniqueID, rank, size int, cfg *Config) (*Communicator, error) {
	return NewScalable(ctx, dev, []UniqueID{id}, rank, size, cfg)
}

// NewScalable is NewCommunicator with several ids, made by as many ranks, so that
// thousands of ranks do not all connect to one (ncclCommInitRankScalable). All
// ranks give the same list.
func NewScalable(ctx context.Context, dev *device.Device, ids []UniqueID, rank, size int, cfg *Config) (*Communicator, error) {
	if err := checkRank(dev, rank, size); err != nil {
		return nil, err
	}
	if len(ids) == 0 || len(ids) > size {
		return nil, fmt.Errorf("nccl: new communicator: %d ids for %d ranks: want 1 to %[2]d", len(ids), size)
	}
	c, raw, err := prepare(dev, rank, size, cfg)
	if err != nil {
		return nil, err
	}
	list := make([]ncclapi.UniqueID, len(ids))
	for i, id := range ids {
		list[i] = ncclapi.UniqueID(id)
	}
	return c.start(ctx, "ncclCommInitRankScalable", string(ids[0][:]), func() ncclapi.Result {
		return c.api.CommInitRankScalable(c.h, int32(size), int32(rank), list, raw)
	})
}

// NewCommunicators makes one rank on each of the devices, in their order
// (ncclCommInitAll). When ctx ends first, or one of them fails, there is none.
func NewCommunicators(ctx context.Context, devs []*device.Device, cfg *Config) ([]*Communicator, error) {
	if len(devs) == 0 || devs[0] == nil {
		return nil, fmt.Errorf("nccl: new communicators: no device given")
	}
	id, err := NewUniqueID(devs[0])
	if err != nil {
		return nil, err
	}
	// The first rank that fails ends the wait of the others for it.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	list, errs := make([]*Communicator, len(devs)), make([]error, len(devs))
	var wg sync.WaitGroup
	for i, dev := range devs {
		wg.Go(func() {
			if list[i], errs[i] = NewCommunicator(ctx, dev, id, i, len(devs), cfg); errs[i] != nil {
				cancel(errs[i])
			}
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		for _, c := range list {
			_ = c.Close()
		}
		return nil, err
	}
	return list, nil
}

func checkRank(dev *device.Device, rank, size int) error {
	if dev == nil {
		return fmt.Errorf("nccl: new communicator: no device given")
	}
	if size < 1 || rank < 0 || rank >= size {
		return fmt.Errorf("nccl: new communicator: rank %d of %d: want 0 <= rank < size", rank, size)
	}
	return nil
}

// prepare makes a communicator without a handle, and what NCCL is told of cfg.
func prepare(dev *device.Device, rank, size int, cfg *Config) (*Communicator, *ncclapi.Config, error) {
	api, err := dev.System().NCCL()
	if err != nil {
		return nil, nil, err
	}
	v, r := api.GetVersion()
	if r != ncclapi.Success {
		return nil, nil, &Error{Op: "ncclGetVersion", Rank: -1, Err: Result(r)}
	}
	raw, err := cfg.raw(v)
	if err != nil {
		return nil, nil, err
	}
	c := &Communicator{
		api: api, dev: dev, rank: rank, size: size, version: v, number: made.Add(1), h: new(ncclapi.Comm),
		ending: make(chan struct{}), ended: make(chan struct{}), flag: new(abortFlag),
	}
	c.look, c.marks.dev = c.watch, dev
	setClock()
	return c, raw, cfg.apply(c)
}

// start runs an initialisation, which blocks until all ranks have come, on a
// goroutine of its own, so that ctx can end the wait for it. The ranks of a
// communicator have the same key. One that NCCL made without this rank is nil.
func (c *Communicator) start(ctx context.Context, op, key string, init func() ncclapi.Result) (*Communicator, error) {
	begun := time.Now()
	done := make(chan error, 1)
	go func() {
		done <- relaxed(c.dev, func() error { return c.fail(op, init()) })
	}()
	select {
	case err := <-done:
		if err != nil || *c.h == 0 {
			return nil, err
		}
		if err := c.join(key); err != nil {
			c.api.CommAbort(*c.h)
			return nil, err
		}
		return c, nil
	case <-ctx.Done():
		go func() {
			if <-done == nil && *c.h != 0 {
				c.api.CommAbort(*c.h)
			}
		}()
		return nil, fmt.Errorf("nccl: %s: rank %d of %d (%s): gave up after %v, other ranks have not come or have failed: %w",
			op, c.rank, c.size, c.dev, time.Since(begun).Round(time.Millisecond), context.Cause(ctx))
	}
}

// Rank returns this rank, from 0.
func (c *Communicator) Rank() int { return c.rank }

// Size returns the number of ranks.
func (c *Communicator) Size() int { return c.size }

// Device returns the rank's device.
func (c *Communicator) Device() *device.Device { return c.dev }

// Version returns the version of the loaded NCCL, such as "2.28.3".
func (c *Communicator) Version() string { return ncclapi.VersionText(c.version) }

// Wait waits until everything enqueued on s has completed, like s.Sync. nil means that
// the operations of c on s have completed: not only that s has passed them, which
// it also does when they are aborted. Wait ends early with the
// error when the communicator fails, and when this process aborts or closes it while
// operations are not known to have completed; the latter error matches device.ErrClosed. When
// ctx ends it returns the cause; the operations go on, until Close.
func (c *Communicator) Wait(ctx context.Context, s *stream.Stream) error {
	if c == nil {
		return c.closed("wait")
	}
	if err := RefuseGroup("nccl: wait"); err != nil {
		return err
	}
	if err := s.Check("nccl: wait", c.dev); err != nil {
		return err
	}
	begun := time.Now()
	last := c.Point(s)
	err := poll.Until(ctx, func() (bool, error) {
		done, err := s.Query()
		if err != nil || done {
			return done, err
		}
		return false, last.Hopeless()
	})
	if err != nil && ctx.Err() != nil {
		if why := last.Hopeless(); why != nil {
			return why
		}
		return fmt.Errorf("nccl: wait on rank %d of %d (%s): gave up after %v: %w",
			c.rank, c.size, c.dev, time.Since(begun).Round(time.Millisecond), err)
	}
	if err == nil {
		err = last.Passed()
	}
	return cmp.Or(err, c.Err())
}

// Abort ends the communicator and everything that is in flight on it, on this
// rank only (ncclCommAbort); outputs of unfinished operations are undefined. It
// may be called by any goroutine, also while another one is blocked in an
// operation, and is idempotent. NCCL waits for what is enqueued, each operation of which
// takes some milliseconds to give up: seconds where a stream is full. Abort ends, whatever
// becomes of NCCL: after ten seconds it returns an error and leaves NCCL alone. Graphs that captured
// operations of c are closed with it; if one is being captured, all this happens
// when the capture ends, which then fails, unless an operation is blocked in it. Where NCCL
// was left alone later calls return that error too.
func (c *Communicator) Abort() error { return c.abortAs("aborted the communicator") }

// abortAs is Abort, and notes what this process calls it.
func (c *Communicator) abortAs(how string) error {
	if c == nil || !c.closeGraphs() && !c.blocked() {
		return nil
	}
	if !c.over() {
		c.leaving.Store(true)
		c.lastLook()
		c.endNow(how, true)
	}
	if !c.owner.Close() {
		c.awaitEnd()
		if e := c.left.Load(); e != nil {
			return e
		}
		return nil
	}
	close(c.ending)
	defer close(c.ended)
	defer c.rest()
	c.abortSubstitute()
	done := make(chan ncclapi.Result, 1)
	go func() {
		r, called := ncclapi.Success, false
		_ = c.dev.Relaxed(func() error { r, called = c.abort(), true; return nil })
		if !called { // a device that is lost keeps nobody from aborting
			r = c.abort()
		}
		done <- r
	}()
	patience := time.NewTimer(abortPatience())
	defer patience.Stop()
	select {
	case r := <-done:
		return c.fail("ncclCommAbort", r)
	case <-patience.C:
		e := &leftAlone{fmt.Sprintf("nccl: ncclCommAbort on rank %d of %d (%s): it has not returned after %v and is left alone: end the process",
			c.rank, c.size, c.dev, abortPatience())}
		c.left.Store(e)
		return e
	}
}

// abort lets NCCL end what is in flight and free the communicator, which no call may be in
// then: NCCL waits for what was launched before, not for what a call launches that waited for
// room in its stream or for a lost peer, and frees the communicator under it. A call that
// stays inside returns by NCCL's flag only, which ncclCommAbort raises at once in a group,
// whose end is what frees.
func (c *Communicator) abort() ncclapi.Result {
	if poll.UntilNoLaterThan(callPatience, c.mu.TryLock) {
		defer c.mu.Unlock()
		c.life.Lock()
		defer c.life.Unlock()
		return c.api.CommAbort(*c.h)
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if r := c.api.GroupStart(); r != ncclapi.Success {
		return r
	}
	r := c.api.CommAbort(*c.h)
	if poll.UntilNoLaterThan(abortPatience()/2, c.mu.TryLock) {
		defer c.mu.Unlock()
	}
	c.life.Lock()
	defer c.life.Unlock()
	return cmp.Or(r, c.api.GroupEnd())
}

// rest gives up what the communicator has beside NCCL's. The trace of a failure stays
// until Close.
func (c *Communicator) rest() {
	c.marks.close()
	c.rec.end()
	if c.failed.Load() == nil {
		c.leaveClique()
	}
}

// LeftAlone reports whether NCCL has not ended what was in flight when the communicator
// was aborted: it may use its memory, and keep its stream busy, for as long as the process
// lives. For Chorus's own packages.
func (c *Communicator) LeftAlone() bool { return c.left.Load() != nil }

// A leftAlone is the error of an abort that NCCL has not carried out.
type leftAlone struct{ text string }

func (e *leftAlone) Error() string { return e.text }

// callPatience is how long a call of NCCL may take that does not wait for other ranks.
const callPatience = 100 * time.Millisecond

// blocked reports whether a call is in NCCL and stays there.
func (c *Communicator) blocked() bool {
	left := func() bool {
		if !c.mu.TryLock() {
			return false
		}
		c.mu.Unlock()
		return true
	}
	return c.rec.inside() && !poll.UntilNoLaterThan(callPatience, left)
}

// abortPatience is how long an abort may take. Tests have less, or more.
func abortPatience() time.Duration { return time.Duration(abortNanos.Load()) }

var abortNanos = newNanos(10 * time.Second)

func newNanos(d time.Duration) *atomic.Int64 {
	n := new(atomic.Int64)
	n.Store(int64(d))
	return n
}

// awaitEnd waits for an end that another goroutine has begun.
func (c *Communicator) awaitEnd() {
	if c.ended == nil {
		return
	}
	patience := time.NewTimer(abortPatience())
	defer patience.Stop()
	select {
	case <-c.ended:
	case <-patience.C:
	}
}

// Close is Abort, but an *InUseError while a graph uses the communicator, and a
// *GroupError within a Group that has operations of it.
func (c *Communicator) Close() error {
	if err := c.InUse("close"); err != nil {
		return err
	}
	if c != nil {
		defer c.leaveClique()
	}
	return c.abortAs("closed the communicator")
}

// Shutdown waits until all operations have completed and leaves the group
// together with the other ranks, which call it too (ncclCommFinalize,
// ncclCommDestroy). When ctx ends first, or an operation failed, it aborts.
// While a graph uses the communicator it does nothing but return an
// *InUseError.
func (c *Communicator) Shutdown(ctx context.Context) error {
	if c == nil || c.owner.Closed() {
		return nil
	}
	if err := c.InUse("shut down"); err != nil {
		return err
	}
	if err := c.Err(); err != nil {
		_ = c.Close()
		return err
	}
	done := make(chan error, 1)
	go func() {
		done <- relaxed(c.dev, func() error { return c.fail("ncclCommFinalize", c.api.CommFinalize(*c.h)) })
	}()
	select {
	case err := <-done:
		if err == nil {
			c.lastLook()
			// NCCL has completed its operations, and goes on with nothing that it aborts.
			c.endNow("shut the communicator down", c.substitute.Load() != nil)
		}
		if err != nil || !c.owner.Close() {
			_ = c.Close()
			return err
		}
		close(c.ending)
		defer close(c.ended)
		defer c.rest()
		defer c.leaveClique()
		c.life.Lock()
		defer c.life.Unlock()
		return relaxed(c.dev, func() error { return c.fail("ncclCommDestroy", c.api.CommDestroy(*c.h)) })
	case <-ctx.Done():
		_ = c.Close()
		return fmt.Errorf("nccl: shut down rank %d of %d (%s): aborted: %w", c.rank, c.size, c.dev, context.Cause(ctx))
	}
}

// alive reports whether something can be issued, without a lock.
func (c *Communicator) alive() bool { return c != nil && c.failed.Load() == nil && !c.owner.Closed() }

// usable says why nothing can be issued.
func (c *Communicator) usable(op string) error {
	if c.alive() {
		return nil
	}
	return c.unusable(op)
}

// unusable is the error of a communicator that is not alive, which none becomes again.
func (c *Communicator) unusable(op string) error {
	if c != nil {
		if f := c.failed.Load(); f != nil {
			return f.cause()
		}
	}
	return c.closed(op)
}

// enter locks c for a call into NCCL. The check must come after the lock: Abort
// frees the communicator once no call is inside.
func (c *Communicator) enter(op string) error {
	c.mu.Lock()
	if c.alive() {
		return nil
	}
	c.mu.Unlock()
	return c.unusable(op)
}

// over reports whether the communicator has ended.
func (c *Communicator) over() bool { return c.owner.Closed() }

// fail turns a result into an error.
func (c *Communicator) fail(op string, r ncclapi.Result) error {
	switch r {
	case ncclapi.Success, ncclapi.InProgress:
		return nil
	case ncclapi.MissingSymbol:
		return &device.UnsupportedError{Feature: op, Need: "a newer NCCL", Have: "NCCL " + ncclapi.VersionText(c.version)}
	}
	return c.dev.Because(c.error(op, r))
}

func (c *Communicator) error(op string, r ncclapi.Result) *Error {
	return &Error{Op: op, Rank: c.rank, Size: c.size, Device: c.dev.String(), Err: Result(r), Detail: c.api.GetLastError(*c.h)}
}
