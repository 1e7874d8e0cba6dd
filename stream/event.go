package stream

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/poll"
)

// EventConfig are the options of NewEvent; nil means their zero values.
type EventConfig struct {
	// Timing lets Elapsed measure with the event. Without it an event is
	// cheaper. Default off, as in torch.cuda.Event.
	Timing bool
}

// An Event marks a point in a stream (CUevent, torch.cuda.Event).
type Event struct {
	owner    handle.Owner
	dev      *device.Device
	h        cudadrv.Event
	captured atomic.Bool // its last Record was captured into a graph
}

// NewEvent creates an event on dev. Only streams of dev can record it; streams
// of any device can wait for it.
func NewEvent(dev *device.Device, cfg *EventConfig) (*Event, error) {
	if dev == nil {
		return nil, fmt.Errorf("stream: new event: no device given")
	}
	flags := cudadrv.EventDisableTiming
	if cfg != nil && cfg.Timing {
		flags = cudadrv.EventDefault
	}
	e := &Event{dev: dev}
	err := dev.Do("cuEventCreate", func(drv cudadrv.Driver) (r cudadrv.Result) {
		e.h, r = drv.EventCreate(flags)
		return r
	})
	if err != nil {
		return nil, fmt.Errorf("stream: new event: %w", err)
	}
	handle.Init(e, &e.owner, "event")
	return e, nil
}

// Device returns the event's device.
func (e *Event) Device() *device.Device { return e.dev }

// Record marks the point that s has reached: everything enqueued on s so far. A
// later Record moves the mark; waits enqueued before keep the earlier one.
func (e *Event) Record(s *Stream) error {
	if err := e.check("stream: record event"); err != nil {
		return err
	}
	if err := s.Check("stream: record event", e.dev); err != nil {
		return err
	}
	if err := e.note(s); err != nil {
		return err
	}
	return e.dev.Do("cuEventRecord", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventRecord(e.h, s.h) })
}

// Query reports, without waiting, whether the marked point has been passed. It
// is true of an event that was never recorded.
func (e *Event) Query() (bool, error) {
	if err := e.checkHost("stream: query event"); err != nil {
		return false, err
	}
	return ready(e.dev, "cuEventQuery", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventQuery(e.h) })
}

// Sync waits until the marked point has been passed. When ctx ends first, Sync
// returns its cause and no thread is left behind.
func (e *Event) Sync(ctx context.Context) error {
	if err := e.checkHost("stream: sync event"); err != nil {
		return err
	}
	if ctx.Done() == nil {
		return e.dev.Do("cuEventSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventSynchronize(e.h) })
	}
	start := time.Now()
	err := poll.Until(ctx, e.Query)
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("stream: sync event on %s: gave up after %v: %w", e.dev, time.Since(start).Round(time.Millisecond), err)
	}
	return err
}

// Elapsed returns the time on the device from start to e, with a resolution of
// about half a microsecond (cuEventElapsedTime). Both were made with Timing and
// both points have been passed.
func (e *Event) Elapsed(start *Event) (time.Duration, error) {
	if err := e.checkHost("stream: elapsed time"); err != nil {
		return 0, err
	}
	if err := start.checkHost("stream: elapsed time"); err != nil {
		return 0, err
	}
	var ms float32
	err := e.dev.Do("cuEventElapsedTime", func(drv cudadrv.Driver) (r cudadrv.Result) {
		ms, r = drv.EventElapsedTime(start.h, e.h)
		return r
	})
	return time.Duration(float64(ms) * float64(time.Millisecond)), err
}

// Close gives the event up. Waits that were enqueued for it still hold.
func (e *Event) Close() error {
	if e == nil || !e.owner.Close() {
		return nil
	}
	return e.dev.Do("cuEventDestroy", func(drv cudadrv.Driver) cudadrv.Result { return drv.EventDestroy(e.h) })
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
