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
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/stream"
)

// A Communicator is one rank of a group of ranks, each on its own device
// (ncclComm_t).
type Communicator struct {
	ref
	owner      handle.Owner
	api        ncclapi.API
	dev        *device.Device
	rank, size int
	version    int32
	number     int64         // number of communicators made in this process before
	h          *ncclapi.Comm // NCCL writes the handle through it

	rec                *collective.Recorder
	marks              *collective.Marks
	localRanks         *localRanks
	watch              *collective.Watch
	runWatch           func()  // watch.Run, made once
	settings           *Config // as given, for children
	onFailure          func(*Communicator, error) error
	recoverable        bool
	checksNaN          bool        // Config.NaNCheck
	places             bool        // errors about batches have the lines that added the operations
	nan                *nanChecker // nil unless checksNaN
	parentAfterFailure atomic.Bool // it has failed but may still be a parent
	children           int         // guarded by mu

	mu           sync.Mutex   // held during a call of NCCL
	leaving      atomic.Bool  // a call of leave waits for mu or holds it
	life         sync.RWMutex // held for reading while Err is in NCCL
	room         room         // bounds the launches in flight
	failed       atomic.Pointer[failure]
	aborting     atomic.Bool             // an abort has begun: it causes errors of the other ranks
	closing      atomic.Pointer[closing] // how this process closed it
	left         atomic.Bool             // by a Shutdown without an error
	flag         *abortFlag
	sources      atomic.Pointer[[]*device.Device] // by rank: source devices of copy engines; nil if none
	ending       chan struct{}                    // closed when the abort or shutdown begins
	ended        chan struct{}                    // closed when it is complete
	abortFailure atomic.Pointer[abortError]
	holds        holds
	pools        pools
	traces       sync.Once // writes the trace of a failure
	unaccount    func()    // ends account; nil without
	sums         sync.Map  // the factor of each open PreMulSum, by Op

	abortOthers atomic.Pointer[func()] // ends the operations of other backends; nil if there are none

	registered registered
	spansMu    sync.Mutex             // held while spans changes
	spans      atomic.Pointer[[]span] // of the symmetric windows
}

var made atomic.Int64

// NewCommunicator creates the communicator of one rank of size (ncclCommInitRankScalable). It returns when all
// ranks have called it with the same id and size. If ctx ends first it returns the cause;
// NCCL cannot cancel the attempt, so it continues in the background and its result is
// aborted. The first communicator on a device loads NCCL's kernels, and the driver may wait for all work of the
// device then.
func NewCommunicator(ctx context.Context, dev *device.Device, id UniqueID, rank, size int, cfg *Config) (*Communicator, error) {
	return NewScalable(ctx, dev, []UniqueID{id}, rank, size, cfg)
}

// NewScalable is NewCommunicator with several ids, made by as many ranks, so that
// thousands of ranks do not all connect to a single one (ncclCommInitRankScalable). All
// ranks must pass the same list.
func NewScalable(ctx context.Context, dev *device.Device, ids []UniqueID, rank, size int, cfg *Config) (*Communicator, error) {
	if err := checkRank(dev, rank, size); err != nil {
		return nil, err
	}
	if len(ids) == 0 || len(ids) > size {
		return nil, fmt.Errorf("nccl: new communicator: %d ids for %d ranks: want 1 to %[2]d", len(ids), size)
	}
	c, raw, err := newUnconnected(dev, rank, size, cfg)
	if err != nil {
		return nil, err
	}
	list := make([]ncclapi.UniqueID, len(ids))
	for i, id := range ids {
		list[i] = ncclapi.UniqueID(id)
	}
	return c.connect(ctx, "ncclCommInitRankScalable", string(ids[0][:]), func() ncclapi.Result {
		return c.api.CommInitRankScalable(c.h, int32(size), int32(rank), list, raw)
	})
}

// NewCommunicators creates one rank on each of the devices, in their order
// (ncclCommInitAll). If ctx ends first, or one rank fails, it returns none.
func NewCommunicators(ctx context.Context, devs []*device.Device, cfg *Config) ([]*Communicator, error) {
	if len(devs) == 0 || devs[0] == nil {
		return nil, fmt.Errorf("nccl: new communicators: no device given")
	}
	id, err := NewUniqueID(devs[0])
	if err != nil {
		return nil, err
	}
	// If one rank fails, the other ranks stop waiting for it.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	list := make([]*Communicator, len(devs))
	var wg sync.WaitGroup
	var once sync.Once
	for i, dev := range devs {
		wg.Go(func() {
			c, failed := NewCommunicator(ctx, dev, id, i, len(devs), cfg)
			if list[i] = c; failed != nil {
				once.Do(func() { err = failed; cancel(failed) })
			}
		})
	}
	wg.Wait()
	if err != nil {
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

// newUnconnected returns a communicator without a handle, and NCCL's form of cfg.
func newUnconnected(dev *device.Device, rank, size int, cfg *Config) (*Communicator, *ncclapi.Config, error) {
	api, err := gpu.DeviceOf(dev).System().NCCL()
	if err != nil {
		return nil, nil, err
	}
	var v int32
	var r ncclapi.Result
	err = gpu.DeviceOf(dev).InTime(func() string { return "ncclGetVersion" }, func() error {
		v, r = api.GetVersion()
		return nil
	})
	if err != nil {
		return nil, nil, err
	}
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
		places: dev.System().Backend() == "virtual",
	}
	c.ref = handle.NewRef[collective.Inside](internals{c})
	collective.SetClock()
	if err := cfg.apply(c); err != nil {
		return c, raw, err
	}
	c.marks = collective.NewMarks(dev)
	c.watch = collective.NewWatch(dev, c.rec, c.marks, watched{c})
	c.runWatch = func() { c.watch.Run(c.ending) }
	return c, raw, nil
}

// connect runs an initialization on its own goroutine, so that ctx can end the
// wait: the initialization blocks until all ranks, which have the same key,
// have joined. If NCCL made a communicator without this rank, connect returns
// nil.
func (c *Communicator) connect(ctx context.Context, op, key string, init func() ncclapi.Result) (*Communicator, error) {
	begun := time.Now()
	if err := poll.Guard(ctx, func() error { return startNetworking(c.dev) }); err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	go func() {
		done <- relaxed(c.dev, func() error { return c.check(op, init()) })
	}()
	select {
	case err := <-done:
		if err != nil || *c.h == 0 {
			return nil, explainEncryption(c.dev, err)
		}
		rank, size := c.rank, c.size // finishInit may go on after Guard has returned
		if err := poll.Guard(ctx, func() error { return c.finishInit(key) }); err != nil {
			if _, hangs := err.(*poll.UnansweredError); hangs {
				return nil, fmt.Errorf("nccl: %s: rank %d of %d (%s): %w", op, rank, size, c.dev, err)
			}
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

// Wait waits until all operations that are enqueued on s have completed, like s.Sync. It
// returns nil only if the operations of c on s have completed; s also passes operations
// that were aborted. Wait ends early if the communicator fails, with the error of the failure.
// It also ends early if this process aborts or closes the communicator while operations are
// not known to have completed: then the error matches device.ErrClosed. If ctx ends first, Wait returns the cause, and
// the operations continue until Close.
func (c *Communicator) Wait(ctx context.Context, s *stream.Stream) error {
	if c == nil || c.dev == nil {
		return c.errClosed("wait")
	}
	if err := gpu.CheckStream("nccl: wait", s, gpu.DeviceOf(c.dev)); err != nil {
		return err
	}
	err := gpu.Guard(ctx, func() error { return c.wait(ctx, s) })
	if e, ok := err.(*poll.UnansweredError); ok {
		return fmt.Errorf("nccl: wait on rank %d of %d (%s): %w", c.rank, c.size, c.dev, e)
	}
	return err
}

// wait is Wait without the checks.
func (c *Communicator) wait(ctx context.Context, s *stream.Stream) error {
	begun := time.Now()
	last := c.point(s)
	err := gpu.DeviceOf(c.dev).Until(ctx, "nccl.Communicator.Wait", func() (bool, error) {
		done, err := s.Query()
		if err != nil || done {
			return done, err
		}
		return false, c.cannotComplete(last)
	})
	if err != nil && ctx.Err() != nil {
		if why := c.cannotComplete(last); why != nil {
			return why
		}
		return fmt.Errorf("nccl: wait on rank %d of %d (%s): gave up after %v: %w",
			c.rank, c.size, c.dev, time.Since(begun).Round(time.Millisecond), err)
	}
	if err == nil {
		err = c.completed(last)
	}
	return cmp.Or(err, c.Err())
}

// Abort ends the communicator and all its pending operations on this rank only
// (ncclCommAbort); outputs of unfinished operations are undefined. It may be
// called by any goroutine, also while another one is blocked in an operation,
// and is idempotent. NCCL waits for the enqueued operations, each of which
// takes some milliseconds to abort, so Abort takes seconds if
// CHORUS_NCCL_IN_FLIGHT does not bound their number. Abort returns after ten
// seconds at the latest; if NCCL is still busy, it returns an error and leaks
// NCCL's communicator, and later calls return that error too. Graphs that
// captured operations of c are closed with it. During a capture of such a
// graph, the abort happens at the end of the capture, which then fails, unless
// an operation is blocked in the capture.
func (c *Communicator) Abort() error { return c.abortAs("aborted the communicator") }

// abortAs is Abort; how describes the call in errors.
func (c *Communicator) abortAs(how string) error {
	if c == nil || !c.closeGraphs() && !c.blocked() {
		return nil
	}
	if !c.isClosed() {
		c.aborting.Store(true)
		c.observeBeforeAbort()
		c.recordClosing(how, true)
	}
	if !c.owner.Close() {
		c.awaitClosed()
		if e := c.abortFailure.Load(); e != nil {
			return e
		}
		return nil
	}
	close(c.ending)
	defer close(c.ended)
	defer c.releaseResources()
	c.abortBackends()
	return c.abortInTime()
}

// abortInTime calls abort, but does not wait for it longer than abortTimeout.
func (c *Communicator) abortInTime() error {
	done := make(chan ncclapi.Result, 1)
	go func() {
		r, called := ncclapi.Success, false
		_ = gpu.DeviceOf(c.dev).Relaxed(func() error { r, called = c.abort(), true; return nil })
		if !called { // the device is lost: abort nevertheless
			r = c.abort()
		}
		done <- r
	}()
	timer := time.NewTimer(abortTimeout())
	defer timer.Stop()
	select {
	case r := <-done:
		return c.check("ncclCommAbort", r)
	case <-timer.C:
		e := &abortError{fmt.Sprintf("nccl: ncclCommAbort on rank %d of %d (%s): it has not returned after %v and is left alone: end the process",
			c.rank, c.size, c.dev, abortTimeout())}
		c.abortFailure.Store(e)
		return e
	}
}

// abort has NCCL abort the pending operations and free the communicator. At that time no
// other call must be in NCCL. NCCL waits for kernels that were launched before. It does not
// wait for a call that still waits for space in its stream or for a lost peer, and frees the
// communicator that the call uses. Only NCCL's abort flag makes such a call return. In an NCCL
// group, ncclCommAbort sets the flag at once, and the end of the group frees the communicator.
func (c *Communicator) abort() ncclapi.Result {
	poll.UntilNoLaterThan(time.Second, c.noGraphs) // longer if a launch waits for a lost peer, which the abort ends
	if poll.UntilNoLaterThan(callTimeout, c.mu.TryLock) {
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
	locked := poll.UntilNoLaterThan(abortTimeout()/2, c.mu.TryLock)
	for !locked && c.leaving.Load() {
		locked = poll.UntilNoLaterThan(abortTimeout(), c.mu.TryLock)
	}
	if locked {
		defer c.mu.Unlock()
	}
	c.life.Lock()
	defer c.life.Unlock()
	return cmp.Or(r, c.api.GroupEnd())
}

// releaseResources releases the resources of the communicator outside of NCCL,
// except the trace of a failure, which stays until Close.
func (c *Communicator) releaseResources() {
	c.marks.Close()
	c.rec.Close()
	if c.unaccount != nil {
		c.unaccount()
	}
	if c.abortFailure.Load() == nil { // NCCL no longer uses the memory
		c.letGoAllMemory()
	}
	if c.nan != nil {
		_ = c.nan.Close() // the memory is the communicator's, so there is nothing to report
	}
	if c.failed.Load() == nil {
		c.leaveLocalRanks()
	}
}

// An abortError is the error of an abort that NCCL has not completed.
type abortError struct{ text string }

func (e *abortError) Error() string { return e.text }

// callTimeout is the maximum time of a call of NCCL that does not wait for other ranks.
const callTimeout = 100 * time.Millisecond

// blocked reports whether a call blocks in NCCL.
func (c *Communicator) blocked() bool {
	left := func() bool {
		if !c.mu.TryLock() {
			return false
		}
		c.mu.Unlock()
		return true
	}
	return c.rec.InCall() && !poll.UntilNoLaterThan(callTimeout, left)
}

// abortTimeout is the maximum time of an abort. Tests change it.
func abortTimeout() time.Duration { return time.Duration(abortTimeoutNanos.Load()) }

var abortTimeoutNanos = newNanos(10 * time.Second)

func newNanos(d time.Duration) *atomic.Int64 {
	n := new(atomic.Int64)
	n.Store(int64(d))
	return n
}

// awaitClosed waits for an abort or shutdown that another goroutine has begun.
func (c *Communicator) awaitClosed() {
	if c.ended == nil {
		return
	}
	timer := time.NewTimer(abortTimeout())
	defer timer.Stop()
	select {
	case <-c.ended:
	case <-timer.C:
	}
}

// Close is Abort, but returns an *InUseError while a graph uses the communicator. A Batch
// with operations of c can then no longer be enqueued. If the driver or NCCL does not answer, Close
// returns an error after at most twelve seconds.
func (c *Communicator) Close() error {
	if err := c.inUse("close"); err != nil {
		return err
	}
	if c == nil {
		return nil
	}
	limit := abortTimeout() + closeReserve
	err, ended := poll.Within(limit, func() error {
		if c.failed.Load() != nil {
			c.writeTraces()
		}
		defer c.leaveLocalRanks()
		defer c.traces.Do(func() {}) // waits for a trace that is being written, and none begins afterwards
		return c.abortAs("closed the communicator")
	})
	if !ended {
		return fmt.Errorf("nccl: close on rank %d of %d (%s): not ended after %v: the device still runs, or the driver or NCCL does not answer", c.rank, c.size, c.dev, limit)
	}
	return err
}

// closeReserve is the time of Close beside that of the abort.
const closeReserve = 2 * time.Second

// Shutdown waits until all operations have completed and leaves the communicator together
// with the other ranks, which must call it too (ncclCommFinalize, ncclCommDestroy). If ctx
// ends first, or an operation failed, it aborts. While a graph uses the communicator, it
// does nothing and returns an *InUseError. After Abort or Close, and after a Shutdown that has
// failed, it returns the failure or an error that matches device.ErrClosed. After a Shutdown
// that returned nil, another one does nothing.
func (c *Communicator) Shutdown(ctx context.Context) error {
	if c == nil {
		return nil
	}
	if c.isClosed() {
		if c.left.Load() {
			return nil
		}
		return c.errUnusable("shut down")
	}
	if err := c.inUse("shut down"); err != nil {
		return err
	}
	if err := poll.Guard(ctx, c.Err); err != nil {
		_ = c.Close()
		return err
	}
	done := make(chan error, 1)
	if ctx.Err() == nil {
		go func() { done <- c.leave() }()
	}
	select {
	case err := <-done:
		if err != nil {
			_ = c.Close()
		}
		return err
	case <-ctx.Done():
		failed := c.Close()
		return errors.Join(fmt.Errorf("nccl: shut down rank %d of %d (%s): aborted: %w", c.rank, c.size, c.dev, context.Cause(ctx)), failed)
	}
}

// leave lets NCCL complete all operations, together with the other ranks, and
// frees the communicator. It holds the lock all the time, because NCCL would
// end the process if another call freed the communicator during
// ncclCommFinalize. After it, NCCL permits no operation.
func (c *Communicator) leave() error {
	c.leaving.Store(true)
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.leaving.Store(false)
	switch {
	case c.left.Load(): // another call of Shutdown was first
		return nil
	case c.isClosed():
		return c.errClosed("shut down")
	}
	err := relaxed(c.dev, func() error { return c.check("ncclCommFinalize", c.api.CommFinalize(*c.h)) })
	if f := c.failed.Load(); f != nil {
		return f.cause() // its abort has ended the operations
	}
	if err != nil {
		return err
	}
	c.observeBeforeAbort()
	// NCCL has completed its operations, so the end aborts nothing.
	c.recordClosing("shut the communicator down", c.abortOthers.Load() != nil)
	if !c.owner.Close() {
		return c.errClosed("shut down")
	}
	c.left.Store(true)
	close(c.ending)
	defer close(c.ended)
	defer c.releaseResources()
	defer c.leaveLocalRanks()
	c.life.Lock()
	defer c.life.Unlock()
	err = relaxed(c.dev, func() error { return c.check("ncclCommDestroy", c.api.CommDestroy(*c.h)) })
	c.left.Store(err == nil)
	return err
}

// alive reports whether operations can be issued, without a lock.
func (c *Communicator) alive() bool { return c != nil && c.failed.Load() == nil && !c.owner.Closed() }

// checkUsable returns an error if operations cannot be issued.
func (c *Communicator) checkUsable(op string) error {
	if c.alive() {
		return nil
	}
	return c.errUnusable(op)
}

// errUnusable returns the error of a communicator that has failed or was
// closed, and so never becomes alive again.
func (c *Communicator) errUnusable(op string) error {
	if c != nil {
		if f := c.failed.Load(); f != nil {
			return f.cause()
		}
	}
	return c.errClosed(op)
}

// enter locks c for a call into NCCL. The check must come after the lock: Abort
// frees the communicator once no call is inside.
func (c *Communicator) enter(op string) error {
	if !c.alive() {
		return c.errUnusable(op) // the lock may be held until an abort ends
	}
	c.mu.Lock()
	if c.alive() {
		return nil
	}
	c.mu.Unlock()
	return c.errUnusable(op)
}

// isClosed reports whether the communicator was closed.
func (c *Communicator) isClosed() bool { return c.owner.Closed() }

// check turns a result into an error.
func (c *Communicator) check(op string, r ncclapi.Result) error {
	switch r {
	case ncclapi.Success, ncclapi.InProgress:
		return nil
	case ncclapi.MissingSymbol:
		return &device.UnsupportedError{Feature: op, Need: "a newer NCCL", Have: "NCCL " + ncclapi.VersionText(c.version)}
	}
	return gpu.DeviceOf(c.dev).Because(c.newError(op, r))
}

func (c *Communicator) newError(op string, r ncclapi.Result) *Error {
	return &Error{Op: op, Rank: c.rank, Size: c.size, Device: c.dev.String(), Err: Result(r), Detail: c.api.GetLastError(*c.h)}
}

func (c *Communicator) errClosed(op string) error {
	if c == nil {
		return fmt.Errorf("nccl: %s: no communicator given", op)
	}
	what := fmt.Sprintf("%s on rank %d of %d (%s)", op, c.rank, c.size, c.dev)
	if e := c.closing.Load(); e != nil {
		return &closedError{what, e}
	}
	return fmt.Errorf("nccl: %s: %w", what, device.ErrClosed)
}
