package machine

import (
	"sync"
	"time"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/osthread"
)

// driver implements cudadrv.Driver. Its methods are in the files of the objects
// that they use.
type driver struct{ m *Machine }

var _ cudadrv.Driver = driver{}

// threads holds the context bound to each OS thread.
type threads struct {
	mu    sync.Mutex
	bound map[uintptr]cudadrv.Context

	// hosts run a host function. A host function must not call the driver: CUDA may permit it
	// and then hang.
	hosts osthread.Threads
}

func (t *threads) bind(c cudadrv.Context) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.bound == nil {
		t.bound = map[uintptr]cudadrv.Context{}
	}
	if c == 0 {
		delete(t.bound, osthread.Thread())
		return
	}
	t.bound[osthread.Thread()] = c
}

func (t *threads) current() cudadrv.Context {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.bound[osthread.Thread()]
}

// take returns the context of the calling thread and unbinds it. A caller that
// depends on the binding of an earlier call then fails always, not only after the
// scheduler has moved it to another thread.
func (t *threads) take() cudadrv.Context {
	t.mu.Lock()
	defer t.mu.Unlock()
	tid := osthread.Thread()
	c := t.bound[tid]
	delete(t.bound, tid)
	return c
}

// A call is a driver call that has passed the common checks.
type call struct {
	m       *Machine
	dev     *Device // of the bound context; nil in calls without a context
	name    string
	planned bool          // the fault plan makes the call fail
	hang    bool          // the fault plan makes the stream operation of the call hang
	zero    bool          // the fault plan makes the copy deliver zeros
	wrong   bool          // the fault plan makes the copy deliver a wrong byte
	slow    time.Duration // the fault plan makes the operation begin later
	// check tells at the launch of a graph whether the resources of the call
	// still exist; nil if they cannot disappear.
	check func() cudadrv.Result
	// uses has the device memory that a copy or a fill of the call names.
	uses  [2]cudadrv.DevicePtr
	bytes uint64 // that the copy or the fill moves
	// cooperative is set for a cooperative launch of a kernel.
	cooperative bool
}

func (c *call) end() { c.m.mu.Unlock() }

// begin consults the fault plan and unbinds the thread's context. If it succeeds,
// the machine is locked until call.end.
func (d driver) begin(name string) (call, cudadrv.Result) {
	c, r := d.beginEnding(name)
	if r == cudadrv.Success && c.dev.status != cudadrv.Success {
		c.end()
		return c, c.dev.status
	}
	return c, r
}

// beginEnding is begin for calls that release a resource: they also work on a
// lost device.
func (d driver) beginEnding(name string) (call, cudadrv.Result) {
	c := call{m: d.m, name: name}
	bound := d.m.threads.take()
	x := d.m.FaultIn(bound, name)
	c.hang, c.zero, c.wrong, c.slow = x.Hang, x.Zero, x.Wrong, x.Slow
	d.m.mu.Lock()
	c.dev = d.m.deviceOf(bound)
	d.m.enter(c.dev)
	r := cudadrv.Result(x.Status)
	c.planned = r != cudadrv.Success && c.dev != nil
	switch {
	case !d.m.initialized:
		r = cudadrv.ErrorNotInitialized
	case d.m.threads.hosts.Has():
		r = cudadrv.ErrorNotPermitted
	case c.dev == nil || c.dev.retained == 0:
		r = cudadrv.ErrorInvalidContext
	case r.Sticky():
		c.dev.lose(r, "the fault plan failed "+name+" with "+r.Error())
	case r == cudadrv.Success:
		r = d.m.Permits(name)
	}
	if r != cudadrv.Success {
		d.m.mu.Unlock()
	}
	return c, r
}

// beginFree is begin for calls that do not need a context.
func (d driver) beginFree(name string) (call, cudadrv.Result) {
	c := call{m: d.m, name: name}
	status, hang := d.m.faults.Hit(name)
	c.hang = hang
	if status != 0 {
		return c, cudadrv.Result(status)
	}
	if d.m.threads.hosts.Has() {
		return c, cudadrv.ErrorNotPermitted
	}
	d.m.mu.Lock()
	if !d.m.initialized {
		d.m.mu.Unlock()
		return c, cudadrv.ErrorNotInitialized
	}
	r := d.m.Permits(name)
	if r != cudadrv.Success {
		d.m.mu.Unlock()
	}
	return c, r
}

// deviceOf returns the device with the primary context c. m.mu is held.
func (m *Machine) deviceOf(c cudadrv.Context) *Device {
	for _, dev := range m.devices {
		if dev.context == c {
			return dev
		}
	}
	return nil
}

func (d driver) DevicePrimaryCtxRetain(ord cudadrv.Device) (cudadrv.Context, cudadrv.Result) {
	c, r := d.beginFree("cuDevicePrimaryCtxRetain")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	dev := d.m.Device(ord)
	if dev == nil {
		return 0, cudadrv.ErrorInvalidDevice
	}
	dev.retained++
	return dev.context, cudadrv.Success
}

func (d driver) DevicePrimaryCtxRelease(ord cudadrv.Device) cudadrv.Result {
	c, r := d.beginFree("cuDevicePrimaryCtxRelease")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	dev := d.m.Device(ord)
	switch {
	case dev == nil:
		return cudadrv.ErrorInvalidDevice
	case dev.retained == 0:
		return cudadrv.ErrorInvalidContext
	}
	if dev.retained--; dev.retained == 0 {
		dev.reset()
	}
	return cudadrv.Success
}

func (d driver) DevicePrimaryCtxGetState(ord cudadrv.Device) (flags uint32, active int32, r cudadrv.Result) {
	c, dev, r := d.beginDevice("cuDevicePrimaryCtxGetState", ord)
	if r != cudadrv.Success {
		return 0, 0, r
	}
	defer c.end()
	if dev.retained > 0 {
		active = 1
	}
	return 0, active, cudadrv.Success
}

// reset destroys all objects of a context after its last release. A lost device stays lost:
// CUDA returns the sticky error until the process ends. m.mu is held.
func (d *Device) reset() {
	d.resetGraphs()
	for h, s := range d.m.streams {
		if s.dev == d {
			delete(d.m.streams, h)
			s.destroyed = true
			s.release()
		}
	}
	d.legacy = nil
	d.queues = map[int32][]hardwareQueue{}
	for h, e := range d.m.events {
		if e.dev == d {
			e.unshare()
			delete(d.m.events, h)
		}
	}
	for h, f := range d.m.functions {
		if f.dev == d {
			delete(d.m.functions, h)
		}
	}
	for h, mod := range d.m.modules {
		if mod.dev == d {
			delete(d.m.modules, h)
		}
	}
	d.resetOpened()
	d.resetPhysicals()
	d.arena.clear("cuDevicePrimaryCtxRelease")
	d.resetPools()
	d.peers = [maxDevices]bool{}
	d.profiling = false
}

func (d driver) CtxSetCurrent(ctx cudadrv.Context) cudadrv.Result {
	c, r := d.beginFree("cuCtxSetCurrent")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if ctx != 0 {
		dev := d.m.deviceOf(ctx)
		if dev == nil {
			return cudadrv.ErrorInvalidContext
		}
		if dev.retained == 0 {
			return cudadrv.ErrorContextIsDestroyed
		}
	}
	d.m.threads.bind(ctx)
	return cudadrv.Success
}

func (d driver) CtxGetCurrent() (cudadrv.Context, cudadrv.Result) {
	c, r := d.beginFree("cuCtxGetCurrent")
	if r != cudadrv.Success {
		return 0, r
	}
	defer c.end()
	return d.m.threads.current(), cudadrv.Success
}

func (d driver) CtxSynchronize() cudadrv.Result {
	c, r := d.begin("cuCtxSynchronize")
	if r != cudadrv.Success {
		return r
	}
	dev := c.dev
	if dev.capturing() {
		defer c.end()
		return cudadrv.ErrorStreamCaptureUnsupported
	}
	marks := dev.marks()
	c.end()
	return d.m.awaitDevice(c.name, dev, marks...)
}

func (d driver) CtxGetStreamPriorityRange() (least, greatest int32, r cudadrv.Result) {
	c, r := d.begin("cuCtxGetStreamPriorityRange")
	if r != cudadrv.Success {
		return 0, 0, r
	}
	defer c.end()
	return leastPriority, greatestPriority, cudadrv.Success
}

func (d driver) CtxEnablePeerAccess(peer cudadrv.Context, flags uint32) cudadrv.Result {
	c, r := d.begin("cuCtxEnablePeerAccess")
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	other := d.m.deviceOf(peer)
	switch {
	case flags != 0:
		return cudadrv.ErrorInvalidValue
	case other == nil || other == c.dev || other.retained == 0:
		return cudadrv.ErrorInvalidContext
	case c.dev.peers[other.ordinal]:
		return cudadrv.ErrorPeerAccessAlreadyEnabled
	}
	c.dev.peers[other.ordinal] = true
	return cudadrv.Success
}
