package stream

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
)

// EventConfig are the options of NewEvent; nil means their zero values.
type EventConfig struct {
	// Timing enables Elapsed. Without it an event is cheaper. Default off, as in
	// torch.cuda.Event.
	Timing bool
	// Blocking lets Sync put its thread to sleep instead of spinning, if Sync's context
	// cannot end (if it can, Sync always sleeps). Default off.
	Blocking bool
	// Interprocess lets other processes open the event by its IPCHandle. It
	// excludes Timing. Default off.
	Interprocess bool
	// External turns captured records and waits into operations of the graph: each launch records
	// the event again, and waits for its latest record at that time, which may be outside of
	// the graph. The host may query an External event and, with Timing, measure parts of a
	// launch (torch.cuda.Event(external=True)). Without External, a captured record only
	// orders the streams of the capture. It excludes Interprocess. Default off.
	External bool
}

func (c *EventConfig) flags() (uint32, error) {
	flags := cudadrv.EventDisableTiming
	if c == nil {
		return flags, nil
	}
	if c.Timing {
		flags = cudadrv.EventDefault
	}
	if c.Blocking {
		flags |= cudadrv.EventBlockingSync
	}
	if c.Interprocess {
		flags |= cudadrv.EventInterprocess
	}
	if c.Timing && c.Interprocess {
		return 0, fmt.Errorf("stream: new event: an event of several processes cannot measure time: leave out Timing or Interprocess: %w",
			device.ErrorInvalidValue)
	}
	if c.External && c.Interprocess {
		return 0, fmt.Errorf("stream: new event: graphs do not record an event of several processes: leave out External or Interprocess: %w",
			device.ErrorInvalidValue)
	}
	return flags, nil
}

// An Event marks a point in a stream (CUevent, torch.cuda.Event).
type Event struct {
	eventRef
	owner    handle.Owner
	dev      *device.Device
	opened   bool        // made by another process
	borrowed bool        // of ExternalEvent: Close does not destroy it
	external bool        // of EventConfig.External
	recorded atomic.Bool // at least once
	captured atomic.Bool // its last Record was captured into a graph

	mu     sync.Mutex
	graphs int  // number of graphs that have an operation on the event
	closed bool // the last graph destroys the event
}

type eventRef = handle.Ref[gpu.Event]

// NewEvent creates an event on dev. Only streams of dev can record it, but
// streams of any device can wait for it.
func NewEvent(dev *device.Device, cfg *EventConfig) (*Event, error) {
	if dev == nil {
		return nil, fmt.Errorf("stream: new event: no device given")
	}
	flags, err := cfg.flags()
	if err != nil {
		return nil, err
	}
	e := &Event{dev: dev, external: cfg != nil && cfg.External}
	h, err := gpu.DeviceOf(dev).NewEvent(flags)
	e.eventRef = handle.NewRef(gpu.Event{Raw: h, Flags: flags})
	if err != nil {
		return nil, fmt.Errorf("stream: new event: %w", err)
	}
	handle.Init(e, &e.owner, handle.About{Kind: "event", On: dev, Frequent: true})
	return e, nil
}

// ExternalEvent wraps a CUevent that other code has made on dev, such as an
// event of PyTorch in the same process. Close closes only the wrapper. The
// CUevent, which Handle returns, must live until then, and as long as graphs
// whose operations are on it.
//
// The other code may have recorded the event before. Elapsed needs two events that are both
// made with Timing; ExternalEvent does not know that of others, so Elapsed refuses its events.
// CUDA cannot check that cuEvent is an event at all: if it is not, the process may crash.
func ExternalEvent(dev *device.Device, cuEvent uintptr) (*Event, error) {
	const op = "stream: external event"
	if dev == nil {
		return nil, fmt.Errorf("%s: no device given", op)
	}
	if cuEvent == 0 {
		return nil, fmt.Errorf("%s: 0 is no event: %w", op, device.ErrorInvalidHandle)
	}
	e := &Event{dev: dev, borrowed: true, eventRef: handle.NewRef(gpu.Event{Raw: cudadrv.Event(cuEvent), Flags: cudadrv.EventDisableTiming})}
	gpu.DeviceOf(dev).RecordedElsewhere(gpu.EventOf(e))
	if _, err := gpu.DeviceOf(dev).QueryEvent(gpu.EventOf(e)); err != nil {
		return nil, fmt.Errorf("%s: %#x on %s: %w", op, cuEvent, dev, err)
	}
	handle.Init(e, &e.owner, handle.About{Kind: "external event", On: dev, Frequent: true})
	return e, nil
}

// Handle returns the CUevent, for code that calls CUDA directly. It is valid
// until Close. Other code may wait for the event and record it on streams of
// its device.
func (e *Event) Handle() uintptr {
	gpu.DeviceOf(e.dev).RecordedElsewhere(gpu.EventOf(e))
	return uintptr(gpu.EventOf(e))
}

// Device returns the event's device.
func (e *Event) Device() *device.Device { return e.dev }

// Record records the event on s, after everything enqueued on s so far. A later Record
// replaces it; waits enqueued before keep the earlier one.
func (e *Event) Record(s *Stream) error {
	if err := e.check("stream: record event"); err != nil {
		return err
	}
	if err := gpu.CheckStream("stream: record event", s, gpu.DeviceOf(e.dev)); err != nil {
		return err
	}
	captured, err := e.note(s)
	if err != nil {
		return err
	}
	if captured && e.external {
		return e.recordExternal(s)
	}
	err = gpu.DeviceOf(e.dev).RecordEvent(gpu.EventOf(e), gpu.StreamOf(s).Raw())
	if err == nil {
		e.captured.Store(captured)
		e.recorded.Store(true)
	}
	return err
}

// Record records a new event of the stream's device and returns it
// (torch.cuda.Stream.record_event).
func (s *Stream) Record(cfg *EventConfig) (*Event, error) {
	if err := gpu.CheckStream("stream: record event", s, nil); err != nil {
		return nil, err
	}
	e, err := NewEvent(s.dev, cfg)
	if err != nil {
		return nil, err
	}
	if err := e.Record(s); err != nil {
		return nil, errors.Join(err, e.Close())
	}
	return e, nil
}

// Query reports, without waiting, whether the stream has passed the event. It returns true
// for an event that was never recorded.
func (e *Event) Query() (bool, error) {
	if err := e.checkHost("stream: query event"); err != nil {
		return false, err
	}
	return gpu.DeviceOf(e.dev).QueryEvent(gpu.EventOf(e))
}

// Sync waits until the stream has passed the event. If ctx ends first, Sync returns its
// cause and no thread stays blocked.
func (e *Event) Sync(ctx context.Context) error {
	if err := e.checkHost("stream: sync event"); err != nil {
		return err
	}
	if ctx.Done() == nil {
		return gpu.DeviceOf(e.dev).SyncEvent(gpu.EventOf(e))
	}
	start := time.Now()
	err := gpu.Guard(ctx, func() error { return gpu.DeviceOf(e.dev).Until(ctx, "stream.Event.Sync", e.Query) })
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("stream: sync event on %s: gave up after %v: %w", e.dev, time.Since(start).Round(time.Millisecond), err)
	}
	return err
}

// Elapsed returns the time on the device from start to e, with a resolution of about half
// a microsecond (cuEventElapsedTime, torch.cuda.Event.elapsed_time). Both events must be
// made with Timing, on one device, and must be recorded: if not, the error matches
// device.ErrorInvalidHandle. If a stream has not passed one of them yet, the error matches
// device.ErrorNotReady. The time is negative if start was passed after e.
func (e *Event) Elapsed(start *Event) (time.Duration, error) {
	const op = "stream: elapsed time"
	for _, x := range []*Event{start, e} {
		if err := x.checkHost(op); err != nil {
			return 0, err
		}
	}
	switch {
	case (handle.Of(start).Flags|handle.Of(e).Flags)&cudadrv.EventDisableTiming != 0:
		return 0, fmt.Errorf("%s: both events must be made with EventConfig.Timing: %w", op, device.ErrorInvalidHandle)
	case !start.recorded.Load() || !e.recorded.Load():
		return 0, fmt.Errorf("%s: both events must be recorded before, outside of a capture or by the launch of a graph: %w", op, device.ErrorInvalidHandle)
	case start.dev != e.dev:
		return 0, fmt.Errorf("%s: from an event of %s to one of %s: clocks of two devices do not compare: %w",
			op, start.dev, e.dev, device.ErrorInvalidHandle)
	}
	for _, x := range []*Event{start, e} {
		if done, err := x.Query(); err != nil {
			return 0, err
		} else if !done {
			return 0, fmt.Errorf("%s: both events must be completed before: call Sync: %w", op, device.ErrorNotReady)
		}
	}
	var ms float32
	err := gpu.DeviceOf(e.dev).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		ms, r = drv.EventElapsedTime(gpu.EventOf(start), gpu.EventOf(e))
		return r
	})
	return time.Duration(float64(ms) * float64(time.Millisecond)), err
}

// Close destroys the event, but waits that were enqueued for it stay valid. If
// graphs record it or wait for it (External), it is destroyed when they are
// closed.
func (e *Event) Close() error {
	if e == nil || !e.owner.Close() {
		return nil
	}
	e.mu.Lock()
	e.closed = true
	held := e.graphs > 0
	e.mu.Unlock()
	if held || e.borrowed {
		return nil
	}
	return gpu.DeviceOf(e.dev).DestroyEvent(gpu.EventOf(e))
}

func (e *Event) check(op string) error {
	if e == nil {
		return fmt.Errorf("%s: no event given", op)
	}
	if e.owner.Closed() {
		return fmt.Errorf("%s: event on %s: %w", op, e.dev, device.ErrClosed)
	}
	return nil
}

// An EventHandle identifies an interprocess event for other processes of the host
// (CUipcEventHandle). It is plain data that can be sent by any means.
type EventHandle [64]byte

// IPCHandle returns a handle that OpenEvent of another process opens
// (cuIpcGetEventHandle, torch.cuda.Event.ipc_handle). The event must have been
// created with EventConfig.Interprocess.
func (e *Event) IPCHandle() (EventHandle, error) {
	const op = "stream: handle of an event"
	if err := e.check(op); err != nil {
		return EventHandle{}, err
	}
	if handle.Of(e).Flags&cudadrv.EventInterprocess == 0 || e.opened {
		return EventHandle{}, fmt.Errorf("%s on %s: the event must be made here, with EventConfig.Interprocess: %w",
			op, e.dev, device.ErrorInvalidHandle)
	}
	gpu.DeviceOf(e.dev).RecordedElsewhere(gpu.EventOf(e))
	var h cudadrv.IpcEventHandle
	err := gpu.DeviceOf(e.dev).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		h, r = drv.IpcGetEventHandle(gpu.EventOf(e))
		return r
	})
	return EventHandle(h), err
}

// OpenEvent opens an event of another process (cuIpcOpenEventHandle,
// torch.cuda.Event.from_ipc_handle). dev must be the GPU that the event was created
// on. Either process may record it and wait for it. The process that created the event
// must close it last.
//
// The process that created the event cannot open it. Virtual devices share events between
// two Systems of one process, which simulate two processes, and not between real
// processes: then the error matches device.ErrorNotSupported.
func OpenEvent(dev *device.Device, h EventHandle) (*Event, error) {
	const op = "stream: open event"
	if dev == nil {
		return nil, fmt.Errorf("%s: no device given", op)
	}
	const flags = cudadrv.EventInterprocess | cudadrv.EventDisableTiming
	e := &Event{dev: dev, opened: true}
	err := gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		raw, r := drv.IpcOpenEventHandle(cudadrv.IpcEventHandle(h))
		e.eventRef = handle.NewRef(gpu.Event{Raw: raw, Flags: flags})
		return r
	})
	if err != nil && gpu.DeviceOf(dev).System().Machine != nil && errors.Is(err, device.ErrorNotSupported) {
		err = fmt.Errorf("virtual devices share no events between processes: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	gpu.DeviceOf(dev).RecordedElsewhere(gpu.EventOf(e))
	handle.Init(e, &e.owner, handle.About{Kind: "event", On: dev, Frequent: true})
	return e, nil
}

// recordExternal records the event on a captured stream, for each launch of the graph.
func (e *Event) recordExternal(s *Stream) error {
	if err := gpu.StreamOf(s).Captured((*recordedEvent)(e)); err != nil {
		return err
	}
	return gpu.DeviceOf(e.dev).RecordExternal(gpu.EventOf(e), gpu.StreamOf(s).Raw())
}

// waitExternal adds a wait to a captured stream: each launch of the graph waits for the event.
func (s *Stream) waitExternal(e *Event) error {
	g := gpu.StreamOf(s)
	if err := g.Captured((*awaitedEvent)(e)); err != nil {
		return err
	}
	return gpu.DeviceOf(s.dev).WaitExternal(g.Raw(), gpu.EventOf(e))
}

// hold keeps the event in the driver for a graph.
func (e *Event) hold() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.graphs++
}

// letGo destroys the event if it is closed and no graph has it any more.
func (e *Event) letGo() {
	e.mu.Lock()
	e.graphs--
	last := e.graphs == 0 && e.closed && !e.borrowed
	e.mu.Unlock()
	if last {
		_ = gpu.DeviceOf(e.dev).DestroyEvent(gpu.EventOf(e)) // a lost device has reported its error
	}
}

// An awaitedEvent is an event that graphs wait for.
type awaitedEvent Event

func (e *awaitedEvent) Hold(gpu.Holder)  { (*Event)(e).hold() }
func (e *awaitedEvent) LetGo(gpu.Holder) { (*Event)(e).letGo() }

// A recordedEvent is an event that graphs record.
type recordedEvent Event

func (e *recordedEvent) Hold(gpu.Holder)  { (*Event)(e).hold() }
func (e *recordedEvent) LetGo(gpu.Holder) { (*Event)(e).letGo() }

// Prepare does nothing before a launch.
func (e *recordedEvent) Prepare(gpu.HasStream) error { return nil }

// Launched notes that a launch has recorded the event.
func (e *recordedEvent) Launched(gpu.HasStream, error) { e.recorded.Store(true) }

var _ gpu.Preparer = (*recordedEvent)(nil)
