package stream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
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
// their kernels start in launch order. A kernel that waits for a kernel of a stream
// that was launched later may then wait forever.
func New(dev *device.Device, cfg *Config) (*Stream, error) {
	const op = "stream: new"
	c := *cmp.Or(cfg, new(Config))
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

// create returns a stream without leak reporting.
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

// Handle returns the CUstream, for code that calls CUDA directly; the handle of
// the default stream is 0. The handle is valid until Close.
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

// Wait orders work that is enqueued on s from now on after the latest record of
// e (cuStreamWaitEvent). The host does not wait, and neither does s if e was
// never recorded. e may be on another device.
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
	err := g.Wait(gpu.EventOf(e))
	if e.captured.Load() && errors.Is(err, device.ErrorInvalidValue) { // the capture has ended
		return fmt.Errorf("%v: %w", gpu.DeviceOf(e.dev).RefuseCaptured("stream: wait", true), err)
	}
	return err
}

// WaitStream orders work that is enqueued on s from now on after everything
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

var defaultKey handle.Key

// Default returns the device's legacy default stream, the same one on every call
// (torch.cuda.default_stream, CUstream 0). It is for code that shares the device
// with other users of CUDA, such as PyTorch in the same process, whose work is
// on that stream.
//
// In CUDA the default stream and the blocking streams of the process wait for each other.
// Streams of Chorus are non-blocking, so only events order them with it. It cannot be
// closed or captured; a graph may be launched on it.
func Default(dev *device.Device) *Stream {
	if dev == nil {
		return nil // methods and functions report that no stream was given
	}
	return gpu.DeviceOf(dev).Local(&defaultKey, func() any {
		s := &Stream{dev: dev}
		gpu.StreamOf(s).Adopt(gpu.DeviceOf(dev), gpu.DefaultStream, 0)
		handle.InitForever(&gpu.StreamOf(s).Owner)
		return s
	}).(*Stream)
}

// The special values that cuda.h defines for a CUstream.
const (
	handleLegacy    = 1
	handlePerThread = 2
)

// External wraps a CUstream that other code has made on dev, such as a stream
// of PyTorch in the same process (torch.cuda.ExternalStream). Close closes only
// the wrapper. The CUstream, which Handle returns, must live until then and
// until the work on it has completed. For 0, External returns Default.
//
// The stream must belong to the device's primary context, as all streams of the CUDA
// runtime and of PyTorch do; External checks that. CUDA cannot check that cuStream is a
// stream at all: if it is not, the process may crash.
func External(dev *device.Device, cuStream uintptr) (*Stream, error) {
	const op = "stream: external"
	switch {
	case dev == nil:
		return nil, fmt.Errorf("%s: no device given", op)
	case cuStream == 0 || cuStream == handleLegacy:
		return Default(dev), nil
	case cuStream == handlePerThread:
		return nil, fmt.Errorf("%s: CU_STREAM_PER_THREAD is another stream on each OS thread, and goroutines change theirs: make a stream: %w",
			op, device.ErrorInvalidHandle)
	}
	own, err := gpu.DeviceOf(dev).Context()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	var of cudadrv.Context
	err = gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		of, r = drv.StreamGetCtx(cudadrv.Stream(cuStream))
		return r
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %#x: %w", op, cuStream, err)
	}
	if of != own {
		return nil, fmt.Errorf("%s: %#x belongs to another context than the primary one of %s: is it a stream of another device? %w",
			op, cuStream, dev, device.ErrorInvalidContext)
	}
	s := &Stream{dev: dev}
	gpu.StreamOf(s).Adopt(gpu.DeviceOf(dev), gpu.ExternalStream, cudadrv.Stream(cuStream))
	handle.Init(s, &gpu.StreamOf(s).Owner, handle.About{Kind: "external stream", On: dev})
	return s, nil
}

// poolStreams is the number of streams in the pool per priority and device, the same as in
// torch.
const poolStreams = 32

// pool has a device's shared streams by priority, from 0 downwards.
type pool struct {
	mu     sync.Mutex
	levels []poolLevel
}

type poolLevel struct {
	streams [poolStreams]*Stream // each created when it is first returned
	next    int
}

var poolKey handle.Key

// FromPool returns a stream of the pool that the process shares; most calls do not create
// one (torch.cuda.Stream). Each priority of a device has 32 streams, which are returned in
// turn: the 33rd call returns the first one again, and its users then wait for each other.
// The streams live as long as the device; Close does nothing. For an exclusive stream use
// New.
//
// priority is at most 0. Streams with a lower number run first. A number below the
// device's PriorityRange means its greatest priority.
func FromPool(dev *device.Device, priority int) (*Stream, error) {
	const op = "stream: from pool"
	if err := checkPriority(op, dev, priority); err != nil {
		return nil, err
	}
	p := gpu.DeviceOf(dev).Local(&poolKey, func() any { return new(pool) }).(*pool)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.levels == nil {
		_, greatest, err := PriorityRange(dev)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", op, err)
		}
		p.levels = make([]poolLevel, 1-greatest)
	}
	priority = max(priority, 1-len(p.levels))
	l := &p.levels[-priority]
	s := l.streams[l.next]
	if s == nil {
		var err error
		if s, err = create(op, dev, gpu.PooledStream, priority); err != nil {
			return nil, err
		}
		handle.InitForever(&gpu.StreamOf(s).Owner)
		l.streams[l.next] = s
	}
	l.next = (l.next + 1) % poolStreams
	return s, nil
}

// PriorityRange returns the numbers of the lowest and of the highest priority of streams
// on dev: 0 and -5 on an H200 (cuCtxGetStreamPriorityRange,
// torch.cuda.Stream.priority_range).
func PriorityRange(dev *device.Device) (least, greatest int, err error) {
	if dev == nil {
		return 0, 0, fmt.Errorf("stream: priority range: no device given")
	}
	err = gpu.DeviceOf(dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		l, g, r := drv.CtxGetStreamPriorityRange()
		least, greatest = int(l), int(g)
		return r
	})
	return least, greatest, err
}

// Priority returns the stream's priority within its device's range
// (cuStreamGetPriority).
func (s *Stream) Priority() (int, error) {
	if err := s.check("stream: priority"); err != nil {
		return 0, err
	}
	var p int32
	err := gpu.DeviceOf(s.dev).Do(func(drv cudadrv.Driver) (r cudadrv.Result) {
		p, r = drv.StreamGetPriority(gpu.StreamOf(s).Raw())
		return r
	})
	return int(p), err
}

// checkPriority validates the arguments of calls that make a stream.
func checkPriority(op string, dev *device.Device, priority int) error {
	if dev == nil {
		return fmt.Errorf("%s: no device given", op)
	}
	if priority > 0 {
		return fmt.Errorf("%s on %s: priority %d: want 0, or less for a greater priority: %w", op, dev, priority, device.ErrorInvalidValue)
	}
	return nil
}

type currentKey struct{ dev *device.Device }

// NewContext returns a context with s as the current stream of its device, and with this
// device as the current device (device.Current), for code that uses torch's current stream
// (torch.cuda.stream). The current streams of other devices, and the parent context, do
// not change. If s is nil, NewContext returns ctx.
func NewContext(ctx context.Context, s *Stream) context.Context {
	if s == nil {
		return ctx
	}
	return context.WithValue(device.NewContext(ctx, s.dev), currentKey{s.dev}, s)
}

// Current returns the stream that NewContext made current for dev, or else its
// Default (torch.cuda.current_stream).
func Current(ctx context.Context, dev *device.Device) *Stream {
	if s, ok := ctx.Value(currentKey{dev}).(*Stream); ok {
		return s
	}
	return Default(dev)
}
