package gpu

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
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
	kept  handle.Map   // see Keep
}

// A StreamRef has a Stream. The public type embeds it.
type StreamRef struct{ s Stream }

func (r *StreamRef) stream() *Stream { return &r.s }

// HasStream is implemented by the public type that embeds a StreamRef.
type HasStream interface{ stream() *Stream }

// StreamOf returns the Stream behind a public one, which must not be nil.
func StreamOf(x HasStream) *Stream { return x.stream() }

// Create creates the driver's stream of s, which is not in use yet.
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

// Share tells drivers that detect races that operations on allocated memory are ordered by its contents, or by flags.
func (s *Stream) Share(p uint64, bytes int) error {
	a, ok := s.dev.Driver().(cudadrv.Auditor)
	if !ok {
		return nil
	}
	return s.dev.Do(func(cudadrv.Driver) cudadrv.Result { return a.MemShare(cudadrv.DevicePtr(p), uintptr(bytes), s.h) })
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

// Keep returns the value for the key, with which other packages store one value
// per stream. The first call creates it with open, the end of the stream closes
// it, and later calls take no lock.
func (s *Stream) Keep(key *handle.Key, open func() (value any, close func() error, err error)) (value any, err error) {
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
func (s *Stream) Kept(key *handle.Key) (value any, ok bool) {
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

// Wait orders work that is enqueued on s from now on after the latest record of
// the event.
func (s *Stream) Wait(e cudadrv.Event) error { return s.dev.WaitEvent(s.h, e) }

// The methods below are the driver's calls for raw streams and events.

// NewStream returns a stream that does not synchronize with the legacy default stream.
func (d *Device) NewStream(priority int32) (s cudadrv.Stream, err error) {
	s, err = ValueInTime(d, func(drv cudadrv.Driver) (cudadrv.Stream, cudadrv.Result) {
		return drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, priority)
	})
	if err == nil {
		d.streams.add(s)
	}
	return s, err
}

// DestroyStream destroys a stream, but operations that are enqueued on it still
// run.
func (d *Device) DestroyStream(s cudadrv.Stream) error {
	d.streams.remove(s)
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamDestroy(s) })
}

// SyncStream waits until everything enqueued on a stream so far has completed.
func (d *Device) SyncStream(s cudadrv.Stream) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(s) })
}

// WaitEvent orders work that is enqueued on a stream from now on after the latest
// record of the event.
func (d *Device) WaitEvent(s cudadrv.Stream, e cudadrv.Event) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamWaitEvent(s, e, 0) })
}

// NewEvent returns a new event.
func (d *Device) NewEvent(flags uint32) (e cudadrv.Event, err error) {
	err = d.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		e, r = drv.EventCreate(flags)
		return r
	})
	return e, err
}

// DestroyEvent destroys an event, but waits that were enqueued for it stay
// valid.
func (d *Device) DestroyEvent(e cudadrv.Event) error {
	marksOf(d.sys).destroyed(e)
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventDestroy(e) })
}

// RecordEvent records the event on a stream.
func (d *Device) RecordEvent(e cudadrv.Event, s cudadrv.Stream) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(e, s) })
}

// RecordExternal records the event in a capture: each launch of the graph records it.
func (d *Device) RecordExternal(e cudadrv.Event, s cudadrv.Stream) error {
	d.RecordedElsewhere(e)
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecordWithFlags(e, s, cudadrv.EventExternal) })
}

// RecordedElsewhere notes that a graph or another process records an event, too, so that a timeline
// does not know its time.
func (d *Device) RecordedElsewhere(e cudadrv.Event) { marksOf(d.sys).exclude(e) }

// WaitExternal adds a wait for the event to the capture of a stream: each launch of the graph waits for the
// latest record at that time.
func (d *Device) WaitExternal(s cudadrv.Stream, e cudadrv.Event) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamWaitEvent(s, e, cudadrv.EventExternal) })
}

// QueryEvent reports, without waiting, whether the stream has passed the event.
func (d *Device) QueryEvent(e cudadrv.Event) (bool, error) {
	return d.Ready(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(e) })
}

// SyncEvent waits until the stream has passed the event.
func (d *Device) SyncEvent(e cudadrv.Event) error {
	return d.Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventSynchronize(e) })
}

// Capturing reports whether a stream is being captured into a graph.
func (d *Device) Capturing(s cudadrv.Stream) (bool, error) {
	status := cudadrv.CaptureNone
	err := d.Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		status, r = drv.StreamIsCapturing(s)
		return r
	})
	return status != cudadrv.CaptureNone, err
}

// Ready calls the driver to query progress, and returns false with a nil error
// for CUDA_ERROR_NOT_READY.
func (d *Device) Ready(query Call) (bool, error) { return d.ready(query, false) }

// ReadyBeside is Ready by DoBeside.
func (d *Device) ReadyBeside(query Call) (bool, error) { return d.ready(query, AnyCapture()) }

// ReadyRelaxed is Ready by DoRelaxed.
func (d *Device) ReadyRelaxed(query Call) (bool, error) { return d.ready(query, true) }

func (d *Device) ready(query Call, relaxed bool) (done bool, err error) {
	call := func(drv cudadrv.Driver) cudadrv.Result {
		r := query(drv)
		done = r == cudadrv.Success
		if r == cudadrv.ErrorNotReady {
			return cudadrv.Success
		}
		return r
	}
	if relaxed {
		err = d.DoRelaxed(call)
	} else {
		err = d.Do(call)
	}
	return done && err == nil, err
}

// joinOther is the advice for a call that would make the default stream wait for captured
// operations.
const joinOther = "the default stream takes part in no capture: let another stream wait"

// RefuseJoin returns an error if s is the default stream. It cannot take part in a
// capture, and so cannot wait for a captured object.
func (s *Stream) RefuseJoin(op, object string) error {
	if s.kind != DefaultStream {
		return nil
	}
	return s.dev.sys.errs.Captured(op, object, joinOther)
}

// WaitStream orders work that is enqueued on s from now on after everything
// enqueued on o so far.
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
	if err := o.CheckIdle(op, nil); err != nil {
		return err
	}
	if err := s.CheckIdle(op, nil); err != nil {
		return err
	}
	if err := s.CheckSystem(op, o.dev); err != nil {
		return err
	}
	if s.kind == DefaultStream {
		return o.RefuseCapture(op, joinOther)
	}
	return nil
}

// Follow is WaitStream without the check that the streams are open, for streams
// that Retain keeps alive.
func (s *Stream) Follow(o *Stream) error { return o.Mark(s.Wait) }

// A streamPointer is a pointer to a public stream.
type streamPointer interface {
	comparable
	HasStream
}

// checkGiven validates that the streams are not nil, except that s may be nil
// if others is empty, since nothing waits then.
func checkGiven[S streamPointer](s S, others []S) error {
	var none S
	if slices.Contains(others, none) || s == none && len(others) > 0 {
		return fmt.Errorf("stream: wait for a stream: no stream given")
	}
	return nil
}

// Join orders work that is enqueued on s from now on after everything enqueued
// on the others so far, like WaitStream for each of the others, which may
// contain s.
func Join[S streamPointer](s S, others []S) error {
	if err := checkGiven(s, others); err != nil {
		return err
	}
	for _, o := range others {
		if err := s.stream().WaitStream(o.stream()); err != nil {
			return err
		}
	}
	return nil
}

// Fork orders work that is enqueued on the others from now on after everything
// enqueued on s so far. It uses one event, whereas WaitStream would use one for
// each of the others, which may contain s. If Fork fails for one stream, the
// later ones do not wait.
func Fork[S streamPointer](s S, others []S) error {
	if err := checkGiven(s, others); err != nil || len(others) == 0 {
		return err
	}
	from, some := s.stream(), false
	for _, o := range others {
		if err := o.stream().mayFollow(from); err != nil {
			return err
		}
		some = some || o.stream() != from
	}
	if !some {
		return nil
	}
	return from.Mark(func(e cudadrv.Event) error {
		for _, o := range others {
			if o.stream() == from {
				continue
			}
			if err := o.stream().Wait(e); err != nil {
				return err
			}
		}
		return nil
	})
}

// liveStreams are the streams that Chorus has created on a device.
type liveStreams struct {
	mu   sync.RWMutex // held for reading while a stream is queried, so that none is destroyed then
	list map[cudadrv.Stream]struct{}
}

func (l *liveStreams) add(s cudadrv.Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.list == nil {
		l.list = map[cudadrv.Stream]struct{}{}
	}
	l.list[s] = struct{}{}
}

func (l *liveStreams) remove(s cudadrv.Stream) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.list, s)
}

// Quiet reports whether all streams that Chorus has created on the devices of the System are
// idle, so that a call of the driver that waits for devices does not block. It returns false while
// the process captures a graph, because captured streams cannot be queried.
func (s *System) Quiet() bool {
	if AnyCapture() {
		return false
	}
	if s.Machine != nil {
		return s.Machine.Quiet()
	}
	for _, d := range s.devs {
		if !d.quiet() {
			return false
		}
	}
	return true
}

func (d *Device) quiet() bool {
	if d.ctx.Load() == 0 || d.Err() != nil {
		return true
	}
	d.streams.mu.RLock()
	defer d.streams.mu.RUnlock()
	for s := range d.streams.list {
		if done, err := d.ReadyRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamQuery(s) }); err == nil && !done {
			return false
		}
	}
	return true
}

// Settle waits until the streams of all devices have done the work that is
// enqueued on them now, but at most for limit. It polls: some calls of the
// driver wait for the same work and meanwhile block other calls, also the one
// that enqueues what the work waits for. It ignores streams that are being
// captured.
func (s *System) Settle(limit time.Duration) error {
	if s.Quiet() {
		return nil
	}
	deadline := time.Now().Add(limit)
	busy := ""
	if s.Machine != nil {
		pending := s.Machine.Pending()
		busy = pollUntil(deadline, pending)
	} else {
		for _, d := range s.devs {
			if busy = d.settle(deadline); busy != "" {
				break
			}
		}
	}
	if busy != "" {
		return fmt.Errorf("%s has been busy for %v: enqueue what its work waits for, and try again", busy, limit)
	}
	return nil
}

// pollUntil calls pending until it returns "" or the deadline has passed, and returns its last result.
func pollUntil(deadline time.Time, pending func() string) (last string) {
	for pause := 10 * time.Microsecond; ; pause = min(2*pause, time.Millisecond) {
		if last = pending(); last == "" || time.Now().After(deadline) {
			return last
		}
		time.Sleep(pause)
	}
}

// settle waits for the streams of one device, and returns the name of a stream
// that is busy at the deadline, or "".
func (d *Device) settle(deadline time.Time) string {
	if d.ctx.Load() == 0 || d.Err() != nil {
		return ""
	}
	type mark struct {
		s cudadrv.Stream
		e cudadrv.Event
	}
	var marks []mark
	pool := d.sys.Events()
	d.streams.mu.RLock()
	for _, s := range slices.Sorted(maps.Keys(d.streams.list)) {
		if captured, err := d.Capturing(s); err != nil || captured {
			continue
		}
		e, err := pool.Take(d)
		if err != nil {
			break
		}
		if d.RecordEvent(e, s) == nil {
			marks = append(marks, mark{s, e})
		}
	}
	d.streams.mu.RUnlock()
	defer func() {
		for _, k := range marks {
			pool.Give(d, k.e)
		}
	}()
	return pollUntil(deadline, func() string {
		for len(marks) > 0 {
			k := marks[len(marks)-1]
			if done, err := d.ReadyRelaxed(func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(k.e) }); err == nil && !done {
				return fmt.Sprintf("stream %#x on %s", uintptr(k.s), d)
			}
			pool.Give(d, k.e)
			marks = marks[:len(marks)-1]
		}
		return ""
	})
}
