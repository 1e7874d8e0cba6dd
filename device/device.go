package device

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gochorus/chorus/internal/captures"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/poll"
)

// A Device is one GPU, or one virtual device. There is one *Device for each
// ordinal of a System, so two devices are the same if the pointers are.
type Device struct {
	sys     *System
	ordinal int
	handle  cudadrv.Device

	mu      sync.Mutex // guards the first use
	ctx     atomic.Uintptr
	binding atomic.Pointer[cudadrv.Driver] // binds ctx with each call; nil where the driver cannot
	lost    atomic.Pointer[Error]          // the first sticky error
	local   kept.Map                       // what other packages keep for this device; see Local
}

// System returns the set of devices that d belongs to.
func (d *Device) System() *System { return d.sys }

// Ordinal returns the device's number, from 0.
func (d *Device) Ordinal() int { return d.ordinal }

// String returns "cuda:0" or "virtual:0".
func (d *Device) String() string { return fmt.Sprintf("%s:%d", d.sys.sys.Name, d.ordinal) }

// Name returns the product name, such as "NVIDIA H200".
func (d *Device) Name() (string, error) {
	s, r := d.sys.sys.Driver.DeviceGetName(d.handle)
	return s, d.Check("cuDeviceGetName", r)
}

// UUID returns the device's identity across processes and reboots, as
// nvidia-smi prints it: GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx.
func (d *Device) UUID() (string, error) {
	u, r := d.sys.sys.Driver.DeviceGetUUID(d.handle)
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:]), d.Check("cuDeviceGetUuid", r)
}

// PCIBusID returns the device's place on the bus, such as "0000:1b:00.0".
func (d *Device) PCIBusID() (string, error) {
	s, r := d.sys.sys.Driver.DeviceGetPCIBusID(d.handle)
	return s, d.Check("cuDeviceGetPCIBusId", r)
}

// Active reports whether the device has a primary context in this process,
// whoever created it; torch's name is _cuda_hasPrimaryContext. Finding, opening
// and describing a device creates none: the first call that needs one does.
func (d *Device) Active() (bool, error) {
	_, active, r := d.sys.sys.Driver.DevicePrimaryCtxGetState(d.handle)
	return active != 0, d.Check("cuDevicePrimaryCtxGetState", r)
}

// Sync waits until all work on all streams of the device has completed. It
// mirrors torch.cuda.synchronize. A wait that ctx ends
// returns its cause and leaves the work running and one OS thread blocked until
// it completes; prefer Stream.Sync, which leaves none.
func (d *Device) Sync(ctx context.Context) error {
	if c := captures.Find(func(c *captures.Capture) bool { return c.Device == d }); c != nil {
		return &CaptureError{Op: "device: synchronize " + d.String(), Object: c.Stream.String(),
			Advice: "what is captured has not run and cannot be waited for: synchronize the device before or after the capture"}
	}
	wait := func() error {
		return d.Do("cuCtxSynchronize", func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() })
	}
	if ctx.Done() == nil {
		return wait()
	}
	gaveUp := func() error { return fmt.Errorf("device: synchronize %s: %w", d, context.Cause(ctx)) }
	if ctx.Err() != nil {
		return gaveUp() // and nothing waits
	}
	done := make(chan error, 1)
	go func() { done <- wait() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return gaveUp()
	}
}

// MemoryInfo returns the free and the total memory of the device in bytes, as
// the driver sees them. It mirrors torch.cuda.mem_get_info.
func (d *Device) MemoryInfo() (free, total uint64, err error) {
	err = d.Do("cuMemGetInfo", func(drv cudadrv.Driver) cudadrv.Result {
		f, t, r := drv.MemGetInfo()
		free, total = uint64(f), uint64(t)
		return r
	})
	return free, total, err
}

// Do makes one call of the driver with the device's context bound to the
// calling OS thread. It is the only place that binds. call makes exactly one
// driver call that needs a context: virtual devices consume the binding. Its
// parameter types are internal, so only Chorus's own packages can use it.
func (d *Device) Do(op string, call func(drv cudadrv.Driver) cudadrv.Result) error {
	runtime.LockOSThread()
	drv, r := d.driver()
	if r == cudadrv.Success {
		r = call(drv)
	} else {
		op = "cuCtxSetCurrent"
	}
	runtime.UnlockOSThread()
	if r == cudadrv.Success {
		return nil
	}
	return d.sys.fail(op, d.ordinal, r)
}

// driver returns the driver for one call on this thread: with the context bound,
// or one that binds it with the call.
func (d *Device) driver() (cudadrv.Driver, cudadrv.Result) {
	if drv := d.binding.Load(); drv != nil {
		return *drv, cudadrv.Success
	}
	if r := d.bind(); r != cudadrv.Success {
		return nil, r
	}
	return d.sys.sys.Driver, cudadrv.Success
}

// DoRelaxed is Do for a call that CUDA forbids to threads that capture a graph,
// and that does the graph no harm (cuThreadExchangeStreamCaptureMode).
func (d *Device) DoRelaxed(op string, call func(drv cudadrv.Driver) cudadrv.Result) error {
	return d.Do(op, func(drv cudadrv.Driver) cudadrv.Result {
		mode, r := drv.ThreadExchangeStreamCaptureMode(cudadrv.CaptureRelaxed)
		if r != cudadrv.Success {
			return r
		}
		defer drv.ThreadExchangeStreamCaptureMode(mode)
		return call(drv)
	})
}

// Relaxed makes calls in the relaxed mode of captures (cuThreadExchangeStreamCaptureMode):
// calls of the driver and of libraries above it that allocate, load or free something do
// a capture no harm, though CUDA forbids them to threads that capture, and to all threads
// in the mode global. For Chorus's own packages.
func (d *Device) Relaxed(call func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	drv := d.Driver()
	mode, r := drv.ThreadExchangeStreamCaptureMode(cudadrv.CaptureRelaxed)
	if r != cudadrv.Success {
		return d.Check("cuThreadExchangeStreamCaptureMode", r)
	}
	defer drv.ThreadExchangeStreamCaptureMode(mode)
	return call()
}

// Bound runs call on a locked OS thread with the device's context bound, for
// libraries above the driver that read the current context.
func (d *Device) Bound(call func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if r := d.bind(); r != cudadrv.Success {
		return d.sys.fail("cuCtxSetCurrent", d.ordinal, r)
	}
	return d.Because(call())
}

// Err returns the sticky error that lost the device to this process, or nil. It
// asks nothing of the driver: what no call has met yet, it does not know.
func (d *Device) Err() error {
	if e := d.lost.Load(); e != nil {
		return e
	}
	return nil
}

// answerPatience is how long the driver may take to say whether a device was lost.
const answerPatience = 100 * time.Millisecond

// Because adds to an error of a library above the driver what lost the device,
// if that is so. Such a library says only that CUDA failed, and may be the first
// to notice: so the driver is asked. For Chorus's own packages.
func (d *Device) Because(err error) error {
	if err == nil {
		return nil
	}
	if _, known := errors.AsType[*Error](err); known {
		return err
	}
	if d.Err() == nil && d.ctx.Load() != 0 {
		// A lost device fails this with its sticky error. One that a launch keeps from
		// answering is not lost.
		poll.Within(answerPatience, func() error {
			_, _, err := d.MemoryInfo()
			return err
		})
	}
	if first := d.Err(); first != nil {
		return fmt.Errorf("%w; the device was lost before: %w", err, first)
	}
	return err
}

// Check turns the result of a driver call that needs no context into an error.
func (d *Device) Check(op string, r cudadrv.Result) error {
	if r == cudadrv.Success {
		return nil
	}
	return d.sys.fail(op, d.ordinal, r)
}

// Driver is for Chorus's own packages, for calls that need no context.
func (d *Device) Driver() cudadrv.Driver { return d.sys.sys.Driver }

// Handle returns the driver's handle. For Chorus's own packages.
func (d *Device) Handle() cudadrv.Device { return d.handle }

// Context returns the primary context, creating it on first use. For Chorus's
// own packages.
func (d *Device) Context() (cudadrv.Context, error) {
	if r := d.retain(); r != cudadrv.Success {
		return 0, d.sys.fail("cuDevicePrimaryCtxRetain", d.ordinal, r)
	}
	return cudadrv.Context(d.ctx.Load()), nil
}

// Local returns what was stored for the key, making it on first use: other
// packages keep one thing for each device this way. Two first users may both
// make one; only one of them is kept, so make must not own anything that has to
// be closed. It is forgotten when the System is closed.
func (d *Device) Local(key *kept.Key, make func() any) any {
	if v, ok := d.local.Load(key); ok {
		return v
	}
	return d.local.LoadOrStore(key, make())
}

// Kept returns what Local has for the key, if anything. For Chorus's own packages.
func (d *Device) Kept(key *kept.Key) (value any, ok bool) { return d.local.Load(key) }

func (d *Device) bind() cudadrv.Result {
	if d.ctx.Load() == 0 {
		if r := d.retain(); r != cudadrv.Success {
			return r
		}
	}
	return d.sys.sys.Driver.CtxSetCurrent(cudadrv.Context(d.ctx.Load()))
}

// retain creates the primary context, the one that NCCL, cuBLAS and PyTorch in
// the same process use too.
func (d *Device) retain() cudadrv.Result {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ctx.Load() != 0 {
		return cudadrv.Success
	}
	if d.sys.closed.Load() {
		return cudadrv.ErrorDeinitialized // of which fail tells
	}
	c, r := d.sys.sys.Driver.DevicePrimaryCtxRetain(d.handle)
	if r == cudadrv.Success {
		d.ctx.Store(uintptr(c))
		if drv, ok := d.sys.sys.Driver.(binder); ok {
			b := drv.Bound(c)
			d.binding.Store(&b)
		}
	}
	return r
}

// A binder is a driver that can bind a context with each call, which takes half as
// long as doing so before.
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
	d.local.Clear() // it was of the context
	return d.Check("cuDevicePrimaryCtxRelease", d.sys.sys.Driver.DevicePrimaryCtxRelease(d.handle))
}
