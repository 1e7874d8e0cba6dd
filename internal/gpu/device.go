// Package gpu has the mechanisms that Chorus's packages share and that users do not see:
// contexts, raw streams and events, the captures that have begun, and host callbacks. Each
// of these mechanisms is implemented only here.
//
// The public types of packages device and stream are façades: each embeds a reference to
// its type in this package, and functions such as [DeviceOf] and [SystemOf] return that
// type. The methods behind these functions are unexported, so users of the public types
// neither see nor call them.
//
// [OpenBackend] selects CUDA or the virtual devices at run time, and provides their libraries through the
// same interfaces.
package gpu

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/timeline"
)

// A Call calls one function of the driver and returns its result.
type Call = func(drv cudadrv.Driver) cudadrv.Result

// A Device is one device of a System with its primary context. There is one for each
// ordinal.
type Device struct {
	sys     *System
	ordinal int
	name    string // such as "cuda:0"
	handle  cudadrv.Device

	mu      sync.Mutex // guards the first use
	ctx     atomic.Uintptr
	binding atomic.Pointer[cudadrv.Driver] // binds ctx with each call; nil if the driver cannot
	local   handle.Map                     // see Local
	watcher cudadrv.Watcher                // see Watcher
	timing  atomic.Pointer[timing]         // nil until a timeline is recorded
	kernels sync.Map                       // names, by cudadrv.Function
	exposed sync.Map                       // streams that other libraries may use, by cudadrv.Stream
	streams liveStreams
}

// A DeviceRef refers to a Device. The public type embeds it.
type DeviceRef struct{ d *Device }

func (r DeviceRef) device() *Device { return r.d }

// HasDevice is implemented by the public type that embeds a DeviceRef.
type HasDevice interface{ device() *Device }

// DeviceOf returns the Device behind a public one.
func DeviceOf(x HasDevice) *Device { return x.device() }

// System returns the set of devices that d belongs to.
func (d *Device) System() *System { return d.sys }

// Ordinal returns the device's number, from 0.
func (d *Device) Ordinal() int { return d.ordinal }

// String returns "cuda:0" or "virtual:0".
func (d *Device) String() string { return d.name }

// UUID returns the device's identity across processes and reboots, as nvidia-smi prints it.
func (d *Device) UUID() (string, error) {
	var u cudadrv.UUID
	err := d.Ask(func(drv cudadrv.Driver) (r cudadrv.Result) {
		u, r = drv.DeviceGetUUID(d.handle)
		return r
	})
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]), err
}

// Driver returns the driver, for calls that need no context and cannot fail.
func (d *Device) Driver() cudadrv.Driver { return d.sys.Driver }

// Watcher returns the driver as a Watcher, or nil if nothing watches which memory operations use.
func (d *Device) Watcher() cudadrv.Watcher { return d.watcher }

// Handle returns the driver's handle.
func (d *Device) Handle() cudadrv.Device { return d.handle }

// Do calls the driver once with the device's context bound to the calling OS
// thread. Only Do binds contexts. call must make exactly one driver call that needs a
// context: virtual devices consume the binding. If the call fails, the error has the C
// name of the function; cudadrv.NameOf determines it by running call again without effect.
func (d *Device) Do(call Call) error { return d.do(call, call) }

// do is Do with an error that names the function that named calls.
func (d *Device) do(call, named Call) error { return d.doWith(call, named, timeline.Current()) }

// doWith is do with a timeline that records the call, or nil.
func (d *Device) doWith(call, named Call, t *timeline.Recorder) error {
	runtime.LockOSThread()
	drv, bound := d.driver()
	r := bound
	if bound == cudadrv.Success {
		if t != nil {
			drv = d.timed(t, drv)
		}
		r = call(drv)
	}
	runtime.UnlockOSThread()
	switch {
	case r == cudadrv.Success:
		return nil
	case bound != cudadrv.Success:
		return d.fail("cuCtxSetCurrent", bound)
	}
	return d.fail(cudadrv.NameOf(named), r)
}

// driver returns the driver for one call on this thread: with the context bound, or a
// driver that binds it with the call.
func (d *Device) driver() (cudadrv.Driver, cudadrv.Result) {
	if drv := d.binding.Load(); drv != nil {
		return *drv, cudadrv.Success
	}
	if r := d.bind(); r != cudadrv.Success {
		return nil, r
	}
	return d.sys.Driver, cudadrv.Success
}

// DoRelaxed is Do for a call that CUDA forbids to threads that capture a graph, although
// it does not affect the graph (cuThreadExchangeStreamCaptureMode).
func (d *Device) DoRelaxed(call Call) error {
	return d.do(inRelaxedMode(call), call)
}

// DoInTime is DoRelaxed for a rare call that may block. It fails if the call has not returned within
// CHORUS_DRIVER_TIMEOUT; the call then goes on by itself.
func (d *Device) DoInTime(call Call) error {
	return d.InTime(func() string { return cudadrv.NameOf(call) }, func() error { return d.DoRelaxed(call) })
}

// ValueInTime is DoInTime for a call that returns a value. A caller that captured a variable instead would race with a call
// that goes on by itself.
func ValueInTime[T any](d *Device, call func(cudadrv.Driver) (T, cudadrv.Result)) (v T, err error) {
	var got T
	err = d.DoInTime(func(drv cudadrv.Driver) (r cudadrv.Result) {
		got, r = call(drv)
		return r
	})
	if err != nil {
		return v, err
	}
	return got, nil
}

// InTime calls fn, which makes rare calls of the driver or of a library, on
// another goroutine. It fails if fn has not returned within
// CHORUS_DRIVER_TIMEOUT; fn then goes on by itself. op names the call for the
// error.
func (d *Device) InTime(op func() string, fn func() error) error {
	err, returned := poll.Within(d.sys.callTimeout, fn)
	if !returned {
		return &HangError{Op: op(), On: d.name, Limit: d.sys.callTimeout}
	}
	return err
}

// Guard is poll.Guard, except while the process captures a graph: CUDA's answers to a capturing thread, such as that
// it must not wait, belong to the thread that asks. The wait then ends with ctx only if the driver answers.
func Guard(ctx context.Context, fn func() error) error {
	if AnyCapture() {
		return fn()
	}
	return poll.Guard(ctx, fn)
}

// A HangError reports a call of the driver that has not returned within CHORUS_DRIVER_TIMEOUT.
type HangError struct {
	Op, On string // On may be ""
	Limit  time.Duration
}

func (e *HangError) Error() string {
	text := e.Op
	if e.On != "" {
		text += " on " + e.On
	}
	return fmt.Sprintf("%s has not returned after %v (CHORUS_DRIVER_TIMEOUT): the driver hangs, or the call waits for work on the device that does not end: end the process", text, e.Limit)
}

// Timeout reports true, as net.Error does.
func (e *HangError) Timeout() bool { return true }

func inRelaxedMode(call Call) Call {
	return func(drv cudadrv.Driver) cudadrv.Result {
		mode, r := drv.ThreadExchangeStreamCaptureMode(cudadrv.CaptureRelaxed)
		if r != cudadrv.Success {
			return r
		}
		defer drv.ThreadExchangeStreamCaptureMode(mode)
		return call(drv)
	}
}

// DoBeside is Do for a call that may happen during a capture of the same thread without
// affecting it: it is DoRelaxed while the process captures a graph.
func (d *Device) DoBeside(call Call) error {
	if AnyCapture() {
		return d.DoRelaxed(call)
	}
	return d.Do(call)
}

// Relaxed calls fn in the relaxed capture mode (cuThreadExchangeStreamCaptureMode).
// Some calls of the driver, and of libraries above it, allocate, load or free resources.
// They do not affect a capture, but CUDA forbids them to threads that capture, and in the
// mode global to all threads.
func (d *Device) Relaxed(call func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	mode := cudadrv.CaptureRelaxed
	exchange := func(drv cudadrv.Driver) (r cudadrv.Result) {
		mode, r = drv.ThreadExchangeStreamCaptureMode(mode)
		return r
	}
	if r := exchange(d.sys.Driver); r != cudadrv.Success {
		return d.fail("cuThreadExchangeStreamCaptureMode", r)
	}
	defer exchange(d.sys.Driver)
	return call()
}

// Bound runs call on a locked OS thread with the device's context bound, for
// libraries above the driver that read the current context.
func (d *Device) Bound(call func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if r := d.bind(); r != cudadrv.Success {
		return d.fail("cuCtxSetCurrent", r)
	}
	return d.Because(call())
}

// Ask is Do for a call that needs no context.
func (d *Device) Ask(call Call) error {
	name := func() string { return cudadrv.NameOf(call) }
	return d.InTime(name, func() error {
		if r := call(d.sys.Driver); r != cudadrv.Success {
			return d.fail(name(), r)
		}
		return nil
	})
}

func (d *Device) fail(op string, r cudadrv.Result) error { return d.sys.errs.Failed(op, d.ordinal, r) }

// Err returns the sticky error that made the device unusable for the process, or nil.
func (d *Device) Err() error { return d.sys.errs.Lost(d.ordinal) }

// answerTimeout is the maximum time to wait for the driver's answer about a lost device.
const answerTimeout = 100 * time.Millisecond

// Because adds the sticky error of a lost device to an error of a library above the
// driver. Such a library reports only that CUDA failed, and may be the first to notice the
// loss, so Because queries the driver.
func (d *Device) Because(err error) error {
	if err == nil || d.sys.errs.Known(err) {
		return err
	}
	if d.Err() == nil && d.ctx.Load() != 0 {
		// On a lost device this call fails with the sticky error. If the driver does not
		// answer because of a launch, the device is not lost.
		poll.Within(answerTimeout, func() error {
			return d.Do(func(drv cudadrv.Driver) cudadrv.Result {
				_, _, r := drv.MemGetInfo()
				return r
			})
		})
	}
	if first := d.Err(); first != nil {
		return fmt.Errorf("%w; the device was lost before: %w", err, first)
	}
	return err
}

// Attribute asks the driver for an attribute of the device.
func (d *Device) Attribute(a cudadrv.Attribute) (value int32, err error) {
	err = d.Ask(func(drv cudadrv.Driver) (r cudadrv.Result) {
		value, r = drv.DeviceGetAttribute(a, d.handle)
		return r
	})
	return value, err
}

// DefaultPool returns the driver's default memory pool of the device, from
// which cuMemAllocAsync allocates.
func (d *Device) DefaultPool() (pool cudadrv.MemPool, err error) {
	err = d.Ask(func(drv cudadrv.Driver) (r cudadrv.Result) {
		pool, r = drv.DeviceGetDefaultMemPool(d.handle)
		return r
	})
	return pool, err
}

// Local returns the value for the key, and calls make on first use. Other packages store
// one value per device with it. Two concurrent first users may both call make, and only
// one result is kept, so the value must not own anything that has to be closed. The values
// are dropped when the System is closed.
func (d *Device) Local(key *handle.Key, make func() any) any {
	if v, ok := d.local.Load(key); ok {
		return v
	}
	return d.local.LoadOrStore(key, make())
}

// Kept returns the value of Local for the key, if it exists.
func (d *Device) Kept(key *handle.Key) (value any, ok bool) { return d.local.Load(key) }

// Context returns the primary context, creating it on first use.
func (d *Device) Context() (cudadrv.Context, error) {
	if r := d.retain(); r != cudadrv.Success {
		return 0, d.fail("cuDevicePrimaryCtxRetain", r)
	}
	return cudadrv.Context(d.ctx.Load()), nil
}

func (d *Device) bind() cudadrv.Result {
	if d.ctx.Load() == 0 {
		if r := d.retain(); r != cudadrv.Success {
			return r
		}
	}
	return d.sys.Driver.CtxSetCurrent(cudadrv.Context(d.ctx.Load()))
}

// retain retains the primary context, which NCCL, cuBLAS and PyTorch in the same process
// use too.
func (d *Device) retain() cudadrv.Result {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx.Load() != 0 {
		return cudadrv.Success
	}
	if d.sys.closed.Load() {
		return cudadrv.ErrorDeinitialized // which Errors.Failed explains
	}
	c, r := d.sys.Driver.DevicePrimaryCtxRetain(d.handle)
	if r == cudadrv.Success {
		d.ctx.Store(uintptr(c))
		if drv, ok := d.sys.Driver.(binder); ok {
			b := drv.Bound(c)
			d.binding.Store(&b)
		}
	}
	return r
}

// A binder is a driver that can bind a context with each call. That takes half as long as
// binding it in a separate call.
type binder interface {
	Bound(c cudadrv.Context) cudadrv.Driver
}

func (d *Device) release() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx.Swap(0) == 0 {
		return nil
	}
	d.binding.Store(nil)
	d.local.Clear() // its values belonged to the context
	return d.Ask(func(drv cudadrv.Driver) cudadrv.Result { return drv.DevicePrimaryCtxRelease(d.handle) })
}

// The modes of SetSyncDebug. Any other value is SyncError.
const (
	SyncOff int32 = iota
	SyncWarn
	SyncError
)

// ErrSynchronizing is returned, wrapped with the name of the call, by a call that would
// make the host wait in the mode SyncError.
var ErrSynchronizing = errors.New("called a synchronizing CUDA operation")

// SetSyncDebug sets the mode of Blocking, and returns the previous mode.
func (s *System) SetSyncDebug(mode int32) (before int32) { return s.syncDebug.Swap(mode) }

// SyncDebug returns the mode of SetSyncDebug.
func (s *System) SyncDebug() int32 { return s.syncDebug.Load() }

// Blocking is called before op makes the host wait for work of d. It costs one
// atomic load while the mode is SyncOff.
func (d *Device) Blocking(op string) error {
	mode := d.sys.SyncDebug()
	if mode == SyncOff {
		return nil
	}
	if mode == SyncWarn {
		slog.Warn(ErrSynchronizing.Error(), "operation", op, "device", d.String(), "caller", caller())
		return nil
	}
	return fmt.Errorf("%s on %s: %w, which SyncError forbids", op, d, ErrSynchronizing)
}

// caller returns the place in the program that called into Chorus.
func caller() string {
	pcs := make([]uintptr, 16)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(3, pcs)])
	for {
		f, more := frames.Next()
		if !leadsToBlocking(f.Function) || !more {
			return fmt.Sprintf("%s:%d", f.File, f.Line)
		}
	}
}

// leadsToBlocking reports whether a function belongs to the packages that call Blocking.
func leadsToBlocking(function string) bool {
	name, ours := strings.CutPrefix(function, "github.com/gochorus/chorus/")
	room, _, _ := strings.Cut(name, ".")
	return ours && (room == "internal/gpu" || room == "stream" || room == "memory")
}
