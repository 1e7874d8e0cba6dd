package gpu

import "github.com/gochorus/chorus/internal/cudadrv"

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
