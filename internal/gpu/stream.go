package gpu

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/kept"
)

// A StreamKind says who owns the driver's stream.
type StreamKind uint8

// The kinds.
const (
	OwnedStream    StreamKind = iota // the Stream
	PooledStream                     // the pool that the process shares
	DefaultStream                    // the device
	ExternalStream                   // other code
)

// A Stream is a queue of operations on one device.
type Stream struct {
	Owner handle.Owner // of the public type
	dev   *Device
	h     cudadrv.Stream
	kind  StreamKind
	refs  atomic.Int32 // one for the open public type, and one for each call of Retain
	kept  kept.Map     // see Keep
}

// A StreamRef has a Stream. The public type embeds it.
type StreamRef struct{ s Stream }

func (r *StreamRef) stream() *Stream { return &r.s }

// HasStream is implemented by the public type that embeds a StreamRef.
type HasStream interface{ stream() *Stream }

// StreamOf returns the Stream behind a public one, which must not be nil.
func StreamOf(x HasStream) *Stream { return x.stream() }

// Create makes a stream in the driver for s, which is not in use yet.
func (s *Stream) Create(dev *Device, kind StreamKind, priority int32) error {
	h, err := dev.NewStream(priority)
	if err == nil {
		s.Adopt(dev, kind, h)
	}
	return err
}

// Adopt is Create for an existing stream of the driver.
func (s *Stream) Adopt(dev *Device, kind StreamKind, h cudadrv.Stream) {
	s.dev, s.kind, s.h = dev, kind, h
	s.refs.Store(1)
	if kind == DefaultStream || kind == ExternalStream {
		s.Expose()
	}
}

// Expose returns the driver's handle for other libraries, whose operations Chorus does not see.
func (s *Stream) Expose() cudadrv.Stream {
	if !s.dev.othersUse(s.h) {
		s.dev.exposed.Store(s.h, true)
	}
	return s.h
}

// othersUse reports whether other libraries may enqueue operations on a stream.
func (d *Device) othersUse(s cudadrv.Stream) bool {
	_, yes := d.exposed.Load(s)
	return yes
}

// Device returns the stream's device.
func (s *Stream) Device() *Device { return s.dev }

// Kind returns the owner of the driver's stream.
func (s *Stream) Kind() StreamKind { return s.kind }

// Raw returns the driver's handle.
func (s *Stream) Raw() cudadrv.Stream { return s.h }

// String names the stream in errors, such as "stream 0x55d0 on cuda:0".
func (s *Stream) String() string {
	if s.kind == DefaultStream {
		return fmt.Sprintf("the default stream on %s", s.dev)
	}
	return fmt.Sprintf("stream %#x on %s", uintptr(s.h), s.dev)
}

// Open reports whether operations can be enqueued on the stream; Check explains why not.
func (s *Stream) Open() bool { return !s.Owner.Closed() }

// Check returns an error if operations of op cannot be enqueued on the stream: it is
// closed, or dev is not nil and not its device. It also records the stream for the capture
// of the calling goroutine.
func (s *Stream) Check(op string, dev *Device) error {
	if !s.Owner.Closed() && (dev == nil || dev == s.dev) && !AnyCapture() {
		return nil
	}
	err := s.CheckIdle(op, dev)
	if err == nil {
		s.use()
	}
	return err
}

// A StreamPointer is a pointer to a public stream, which may be nil.
type StreamPointer interface {
	comparable
	HasStream
}

// CheckStream is Stream.Check for a public stream.
func CheckStream[P StreamPointer](op string, x P, dev *Device) error {
	var none P
	if x == none {
		return fmt.Errorf("%s: no stream given", op)
	}
	return x.stream().Check(op, dev)
}

// CheckIdle is Check for calls that enqueue nothing.
func (s *Stream) CheckIdle(op string, dev *Device) error {
	switch {
	case s.Owner.Closed():
		return fmt.Errorf("%s: %s: %w", op, s, ErrClosed)
	case dev != nil && dev.sys != s.dev.sys:
		return s.CheckSystem(op, dev)
	case dev != nil && s.dev != dev:
		return fmt.Errorf("%s: %s cannot order work of %s: use a stream of that device", op, s, dev)
	}
	return nil
}

// CheckSystem returns an error if dev belongs to another System than the stream's device,
// so that their handles are unrelated.
func (s *Stream) CheckSystem(op string, dev *Device) error {
	if dev.sys != s.dev.sys {
		return fmt.Errorf("%s: %s belongs to another system than %s", op, s, dev)
	}
	return nil
}

// Retain keeps the driver's stream alive after Close until Release, for objects that are
// still freed on it. It returns false, and retains nothing, if the driver's stream is
// destroyed or about to be destroyed; Check then returns the error.
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
	if s.kind == ExternalStream {
		return errors.Join(errs...)
	}
	s.dev.exposed.Delete(s.h) // the driver may reuse the handle
	return errors.Join(append(errs, s.dev.DestroyStream(s.h))...)
}

// A companion is a value that another package keeps for the stream.
type companion struct {
	value any
	close func() error
}

// Keep returns the value for the key. The first call makes it with open, and the end of
// the stream closes it. Other packages store one value per stream with it. Later calls
// take no lock.
func (s *Stream) Keep(key *kept.Key, open func() (value any, close func() error, err error)) (value any, err error) {
	if v, ok := s.Kept(key); ok {
		return v, nil
	}
	if !s.Retain() { // the value would never be closed
		return nil, s.CheckIdle("stream: keep", nil)
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

// Kept returns the value of Keep for the key, if it exists.
func (s *Stream) Kept(key *kept.Key) (value any, ok bool) {
	c, ok := s.kept.Load(key)
	if !ok {
		return nil, false
	}
	return c.(*companion).value, true
}

// Query reports, without waiting, whether everything enqueued on s so far has completed.
func (s *Stream) Query() (bool, error) {
	return s.dev.Ready(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(s.h) })
}

// Sync waits until everything enqueued on s so far has completed.
func (s *Stream) Sync() error { return s.dev.SyncStream(s.h) }

// Wait makes operations that are enqueued on s from now on wait for the latest record of
// the event.
func (s *Stream) Wait(e cudadrv.Event) error { return s.dev.WaitEvent(s.h, e) }
