package stream

import (
	"context"
	"fmt"
	"math"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
)

// Config are the options of New; nil means their zero values.
type Config struct {
	// Priority orders streams of one device: streams with lower numbers run first. It is
	// at most 0, and clamped to the device's PriorityRange. Default 0.
	Priority int
}

// A Stream is a queue of operations on one device (CUstream, torch.cuda.Stream). It does
// not synchronize with CUDA's legacy default stream.
type Stream struct {
	//lint:ignore U1000 internal/gpu finds the field by the method that it promotes
	ref
	dev *device.Device

	called   atomic.Int64                  // number of callbacks that have returned
	panicked atomic.Pointer[CallbackError] // the first panic that was not reported yet
}

//lint:ignore U1000 the field above is of this type
type ref = gpu.StreamRef

// New creates a stream on dev, which nothing else uses (FromPool returns shared streams). If a device
// has more streams than hardware queues (CUDA_DEVICE_MAX_CONNECTIONS, 8 by default), some share one, and
// their kernels start in the order of their launches. A kernel that waits for a kernel of a stream
// that was launched later may then wait forever.
func New(dev *device.Device, cfg *Config) (*Stream, error) {
	const op = "stream: new"
	var c Config
	if cfg != nil {
		c = *cfg
	}
	if err := checkPriority(op, dev, c.Priority); err != nil {
		return nil, err
	}
	s, err := create(op, dev, gpu.OwnedStream, c.Priority)
	if err != nil {
		return nil, err
	}
	handle.Init(s, &gpu.StreamOf(s).Owner, handle.About{Kind: "stream", On: dev})
	return s, nil
}

// create makes a stream without leak reporting.
func create(op string, dev *device.Device, kind gpu.StreamKind, priority int) (*Stream, error) {
	s := &Stream{dev: dev}
	if err := gpu.StreamOf(s).Create(gpu.DeviceOf(dev), kind, int32(max(priority, math.MinInt32))); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return s, nil
}

// Device returns the stream's device.
func (s *Stream) Device() *device.Device { return s.dev }

// String returns the name of the stream in errors, such as "stream 0x55d0 on cuda:0".
func (s *Stream) String() string { return gpu.StreamOf(s).String() }

// Equal reports whether s and o are the same driver stream, as two results of External may
// be (== in torch.cuda.Stream).
func (s *Stream) Equal(o *Stream) bool {
	return s == o || s != nil && o != nil && s.dev == o.dev && gpu.StreamOf(s).Raw() == gpu.StreamOf(o).Raw()
}

// Handle returns the CUstream, for code that calls CUDA directly; the handle of the
// default stream is 0. It is valid until Close.
func (s *Stream) Handle() uintptr { return uintptr(gpu.StreamOf(s).Expose()) }

// check returns an error if the stream is nil or closed, for calls that enqueue nothing.
func (s *Stream) check(op string) error {
	if s == nil {
		return fmt.Errorf("%s: no stream given", op)
	}
	return gpu.StreamOf(s).CheckIdle(op, nil)
}

// Sync waits until everything enqueued on s so far has completed, and returns the error of
// the device if an operation failed (torch.cuda.Stream.synchronize). If ctx ends first,
// Sync returns its cause, the operations continue, and no thread stays blocked. If a
// Callback panicked, Sync returns a *CallbackError, once.
func (s *Stream) Sync(ctx context.Context) error {
	if err := s.check("stream: sync"); err != nil {
		return err
	}
	if err := gpu.StreamOf(s).RefuseWait("stream: sync"); err != nil {
		return err
	}
	if err := gpu.DeviceOf(s.dev).Blocking("stream: sync"); err != nil {
		return err
	}
	if ctx.Done() == nil {
		return s.seeCallbacks(gpu.StreamOf(s).Sync())
	}
	start := time.Now()
	err := gpu.Guard(ctx, func() error { return gpu.DeviceOf(s.dev).Until(ctx, "stream.Stream.Sync", s.Query) })
	if err != nil && ctx.Err() != nil {
		return fmt.Errorf("stream: sync %s: gave up after %v: %w", s, time.Since(start).Round(time.Millisecond), err)
	}
	return err
}

// Query reports, without waiting, whether everything enqueued on s so far has
// completed.
func (s *Stream) Query() (bool, error) {
	if err := s.check("stream: query"); err != nil {
		return false, err
	}
	if err := gpu.StreamOf(s).RefuseWait("stream: query"); err != nil {
		return false, err
	}
	done, err := gpu.StreamOf(s).Query()
	if done {
		err = s.seeCallbacks(err)
	}
	return done && err == nil, err
}

// Wait makes operations that are enqueued on s from now on wait for the latest record of e
// (cuStreamWaitEvent). The host does not wait. If e was never recorded, s does not wait. e
// may be on another device.
func (s *Stream) Wait(e *Event) error {
	if err := s.check("stream: wait"); err != nil {
		return err
	}
	if err := e.check("stream: wait"); err != nil {
		return err
	}
	g := gpu.StreamOf(s)
	if err := g.CheckSystem("stream: wait", gpu.DeviceOf(e.dev)); err != nil {
		return err
	}
	if e.external && gpu.AnyCapture() {
		captured, err := g.Capturing()
		if err != nil {
			return err
		}
		if captured {
			return s.waitExternal(e)
		}
	}
	if e.captured.Load() {
		if err := g.RefuseJoin("stream: wait", "what the event recorded on "+e.dev.String()); err != nil {
			return err
		}
	}
	return g.Wait(gpu.EventOf(e))
}

// WaitStream makes operations that are enqueued on s from now on wait for everything
// enqueued on o so far (torch.cuda.Stream.wait_stream).
func (s *Stream) WaitStream(o *Stream) error {
	const op = "stream: wait for a stream"
	for _, x := range []*Stream{o, s} {
		if x == nil {
			return x.check(op)
		}
	}
	return gpu.StreamOf(s).WaitStream(gpu.StreamOf(o))
}

// Close closes the stream and returns at once. Enqueued operations still run, and memory
// whose free is ordered by s is still freed. A stream that is being captured stays open:
// Close returns a *device.CaptureError. A stream of FromPool stays open for its other
// users; the default stream cannot be closed.
func (s *Stream) Close() error {
	if s == nil {
		return nil
	}
	g := gpu.StreamOf(s)
	if g.Kind() == gpu.PooledStream || !g.Open() {
		return nil
	}
	if g.Kind() == gpu.DefaultStream {
		return fmt.Errorf("stream: close: %s belongs to its device and cannot be closed", s)
	}
	return gpu.DeviceOf(s.dev).InTime(func() string { return "stream: close " + s.String() }, func() error {
		if err := g.RefuseCapture("stream: close", "close it after the capture"); err != nil {
			return err
		}
		if !g.Owner.Close() {
			return nil
		}
		return g.Release()
	})
}
