package stream

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/captures"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/poll"
)

// Config are the options of New; nil means their zero values.
type Config struct {
	// Priority orders streams of one device: lower numbers go first. It is at
	// most 0, and clamped to the device's PriorityRange. Default 0.
	Priority int
}

// A Stream is a queue of work on one device (CUstream, torch.cuda.Stream). It
// does not synchronise with CUDA's legacy default stream.
type Stream struct {
	owner handle.Owner
	dev   *device.Device
	h     cudadrv.Stream
	kind  kind
	refs  atomic.Int32 // the Stream itself while open, and each Buffer that is freed on it

	kept kept.Map // see Keep

	called   atomic.Int64                  // how many callbacks have returned
	panicked atomic.Pointer[CallbackError] // the first of them that did, until it is reported
}

// kind says to whom the driver's stream belongs.
type kind uint8

const (
	owned    kind = iota // to the Stream
	pooled               // to the pool of FromPool
	legacy               // to the device: Default
	external             // to somebody else: External
)

// A companion is what another package keeps for the stream.
type companion struct {
	value any
	close func() error
}

// New creates a stream on dev, which no one else has (FromPool gives out shared
// ones).
func New(dev *device.Device, cfg *Config) (*Stream, error) {
	const op = "stream: new"
	var c Config
	if cfg != nil {
		c = *cfg
	}
	if err := checkPriority(op, dev, c.Priority); err != nil {
		return nil, err
	}
	s, err := create(op, dev, c.Priority)
	if err != nil {
		return nil, err
	}
	handle.Init(s, &s.owner, handle.About{Kind: "stream", On: dev})
	return s, nil
}

// create makes a stream whose owner is not armed yet.
func create(op string, dev *device.Device, priority int) (*Stream, error) {
	s := &Stream{dev: dev}
	err := dev.Do("cuStreamCreateWithPriority", func(drv cudadrv.Driver) (r cudadrv.Result) {
		s.h, r = drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, int32(max(priority, math.MinInt32)))
		return r
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	s.refs.Store(1)
	return s, nil
}

// Device returns the stream's device.
func (s *Stream) Device() *device.Device { return s.dev }

// String names the stream in errors, such as "stream 0x55d0 on cuda:0".
func (s *Stream) String() string {
	if s.kind == legacy {
		return fmt.Sprintf("the default stream on %s", s.dev)
	}
	return fmt.Sprintf("stream %#x on %s", uintptr(s.h), s.dev)
}

// Equal reports whether s and o are the same queue of work, as two of External
// may be (== in torch.cuda.Stream).
func (s *Stream) Equal(o *Stream) bool {
	return s == o || s != nil && o != nil && s.dev == o.dev && s.h == o.h
}

// Handle returns the CUstream, for code that calls CUDA by other means; that of
// the default stream is 0. It is valid until Close.
func (s *Stream) Handle() uintptr { return uintptr(s.h) }

// Raw returns the driver's handle, for Chorus's own packages.
func (s *Stream) Raw() cudadrv.Stream { return s.h }

// Check returns an error if the stream cannot take work: it is nil, closed, or
// of another device than dev, when dev is not nil. Without one, op is taken to
// enqueue work on the stream.
func (s *Stream) Check(op string, dev *device.Device) error {
	if s != nil && !s.owner.Closed() && (dev == nil || dev == s.dev) && !captures.Any() {
		return nil
	}
	err := s.check(op, dev)
	if err == nil {
		s.use()
	}
	return err
}

// check is Check for calls that enqueue nothing.
func (s *Stream) check(op string, dev *device.Device) error {
	switch {
	case s == nil:
		return fmt.Errorf("%s: no stream given", op)
	case s.owner.Closed():
		return fmt.Errorf("%s: %s: %w", op, s, device.ErrClosed)
	case dev != nil && dev.System() != s.dev.System():
		return s.sameSystem(op, dev)
	case dev != nil && s.dev != dev:
		return fmt.Errorf("%s: %s cannot order work of %s: use a stream of that device", op, s, dev)
	}
	return nil
}

// Open reports whether the stream can take work. For Chorus's own packages: Check
// says why not.
func (s *Stream) Open() bool { return s != nil && !s.owner.Closed() }

// Sync waits until everything enqueued on s so far has completed, and returns
// the error of the device if that work failed (torch.cuda.Stream.synchronize).
// When ctx ends first, Sync returns its cause, the work goes on, and no thread
// is left behind. A Callback that panicked is a *CallbackError here, once.
func (s *Stream) Sync(ctx context.Context) error {
	if err := s.check("stream: sync", nil); err != nil {
		return err
	}
	if err := s.RefuseWait("stream: sync"); err != nil {
		return err
	}
	if err := s.dev.Blocking("stream: sync"); err != nil {
		return err
	}
	if ctx.Done() == nil {
		err := s.dev.Do("cuStreamSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(s.h) })
		return s.seeCallbacks(err)
	}
	start := time.Now()
	err := poll.Until(ctx, s.Query)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("stream: sync %s: gave up after %v: %w", s, time.Since(start).Round(time.Millisecond), err)
	}
	return err
}

// Query reports, without waiting, whether everything enqueued on s so far has
// completed.
func (s *Stream) Query() (bool, error) {
	if err := s.check("stream: query", nil); err != nil {
		return false, err
	}
	if err := s.RefuseWait("stream: query"); err != nil {
		return false, err
	}
	done, err := ready(s.dev, "cuStreamQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(s.h) })
	if done {
		err = s.seeCallbacks(err)
	}
	return done && err == nil, err
}

// Wait makes work that is enqueued on s from now on wait for what e recorded
// last (cuStreamWaitEvent). The host does not wait. An event that was never
// recorded is no wait at all. e may be of another device.
func (s *Stream) Wait(e *Event) error {
	if err := s.check("stream: wait", nil); err != nil {
		return err
	}
	if err := e.check("stream: wait"); err != nil {
		return err
	}
	if err := s.sameSystem("stream: wait", e.dev); err != nil {
		return err
	}
	if s.kind == legacy && e.captured.Load() {
		return &CaptureError{Op: "stream: wait", Object: "what the event recorded on " + e.dev.String(), Advice: joinOther}
	}
	return s.dev.Do("cuStreamWaitEvent", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.StreamWaitEvent(s.h, e.h, 0)
	})
}

// WaitStream makes work that is enqueued on s from now on wait for everything
// enqueued on o so far (torch.cuda.Stream.wait_stream).
func (s *Stream) WaitStream(o *Stream) error {
	if s == o {
		return s.Check("stream: wait for a stream", nil)
	}
	if err := s.mayFollow(o); err != nil {
		return err
	}
	return s.Follow(o)
}

// mayFollow checks that s can wait for o.
func (s *Stream) mayFollow(o *Stream) error {
	const op = "stream: wait for a stream"
	if err := o.check(op, nil); err != nil {
		return err
	}
	if err := s.check(op, nil); err != nil {
		return err
	}
	if err := s.sameSystem(op, o.dev); err != nil {
		return err
	}
	if s.kind == legacy {
		return o.RefuseCapture(op, joinOther)
	}
	return nil
}

// joinOther says what to do instead of letting the default stream wait for what
// is captured.
const joinOther = "the default stream takes part in no capture: let another stream wait"

// sameSystem returns an error where dev's handles mean something else than those
// of the stream's device.
func (s *Stream) sameSystem(op string, dev *device.Device) error {
	if dev.System() != s.dev.System() {
		return fmt.Errorf("%s: %s belongs to another system than %s", op, s, dev)
	}
	return nil
}

// Follow is WaitStream without the check that the streams are open, for streams
// that Retain keeps alive. For Chorus's own packages.
func (s *Stream) Follow(o *Stream) error { return o.marked(s.wait) }

// Close gives the stream up. It returns at once; enqueued work still runs, and
// memory that is to be freed on s is still freed there. A stream that is being
// captured stays open: Close returns a *CaptureError. A stream of FromPool stays
// open for those who share it; the default stream refuses.
func (s *Stream) Close() error {
	if s == nil || s.kind == pooled || s.owner.Closed() {
		return nil
	}
	if s.kind == legacy {
		return fmt.Errorf("stream: close: %s belongs to its device and cannot be closed", s)
	}
	if err := s.RefuseCapture("stream: close", "close it after the capture"); err != nil {
		return err
	}
	if !s.owner.Close() {
		return nil
	}
	return s.Release()
}

// Retain keeps the driver's stream alive after Close until Release, for what
// will still be freed on it. It reports false, and retains nothing, where the
// driver's stream is gone or about to go, of which Check then tells. For Chorus's
// own packages.
func (s *Stream) Retain() bool {
	for n := s.refs.Load(); n > 0; n = s.refs.Load() {
		if s.refs.CompareAndSwap(n, n+1) {
			return true
		}
	}
	return false
}

// Release undoes Retain.
func (s *Stream) Release() error {
	if s.refs.Add(-1) > 0 {
		return nil
	}
	var errs []error
	for _, c := range s.kept.Clear() {
		errs = append(errs, c.(*companion).close())
	}
	if s.kind == external {
		return errors.Join(errs...)
	}
	return errors.Join(append(errs, s.dev.Do("cuStreamDestroy", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.StreamDestroy(s.h)
	}))...)
}

// Keep returns what open made for the key, calling it on first use, and closes
// that with the stream: other packages keep one thing for each stream this way.
// Later uses take no lock. For Chorus's own packages.
func (s *Stream) Keep(key *kept.Key, open func() (value any, close func() error, err error)) (value any, err error) {
	if v, ok := s.Kept(key); ok {
		return v, nil
	}
	if !s.Retain() { // what is kept now, nobody would close
		return nil, s.check("stream: keep", nil)
	}
	defer func() { err = errors.Join(err, s.Release()) }()
	c, err := s.kept.LoadOrMake(key, func() (any, error) {
		v, c, err := open()
		return &companion{v, c}, err
	})
	if err != nil {
		return nil, err
	}
	return c.(*companion).value, nil
}

// Kept returns what Keep has for the key, if anything. For Chorus's own packages.
func (s *Stream) Kept(key *kept.Key) (value any, ok bool) {
	c, ok := s.kept.Load(key)
	if !ok {
		return nil, false
	}
	return c.(*companion).value, true
}

// ready turns NOT_READY into false.
func ready(dev *device.Device, op string, query func(cudadrv.Driver) cudadrv.Result) (bool, error) {
	done := true
	err := dev.Do(op, func(drv cudadrv.Driver) cudadrv.Result {
		r := query(drv)
		if r == cudadrv.ErrorNotReady {
			done = false
			return cudadrv.Success
		}
		return r
	})
	return done && err == nil, err
}
