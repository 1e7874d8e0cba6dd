package device

import (
	"context"
	"fmt"
	"sync/atomic"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
)

// A Device is one GPU, or one virtual device. There is one *Device for each
// ordinal of a System, so two devices are the same if the pointers are.
type Device struct {
	ref
	sys  *System
	lost atomic.Pointer[Error] // the first sticky error
}

type ref = gpu.DeviceRef

// System returns the set of devices that d belongs to.
func (d *Device) System() *System { return d.sys }

// Ordinal returns the device's number, from 0.
func (d *Device) Ordinal() int { return gpu.DeviceOf(d).Ordinal() }

// String returns "cuda:0" or "virtual:0".
func (d *Device) String() string { return gpu.DeviceOf(d).String() }

// Name returns the product name, such as "NVIDIA H200".
func (d *Device) Name() (string, error) {
	return ask(d, func(drv cudadrv.Driver, h cudadrv.Device) (string, cudadrv.Result) { return drv.DeviceGetName(h) })
}

// Active reports whether the device has a primary context in this process, created by Chorus or
// by another library (torch's _cuda_hasPrimaryContext). Finding, opening and describing a
// device does not create a context: the first call that needs a context creates it.
func (d *Device) Active() (bool, error) {
	active, err := ask(d, func(drv cudadrv.Driver, h cudadrv.Device) (int32, cudadrv.Result) {
		_, active, r := drv.DevicePrimaryCtxGetState(h)
		return active, r
	})
	return active != 0, err
}

// Sync waits until all work on all streams of the device has completed. It mirrors
// torch.cuda.synchronize. If ctx ends first, Sync returns its cause; the work continues,
// and one OS thread stays blocked until it completes. Prefer Stream.Sync, which blocks no
// thread.
func (d *Device) Sync(ctx context.Context) error {
	if err := gpu.DeviceOf(d).RefuseSync("device: synchronize " + d.String()); err != nil {
		return err
	}
	wait := func() error {
		return gpu.DeviceOf(d).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() })
	}
	if ctx.Done() == nil {
		return wait()
	}
	gaveUp := func() error { return fmt.Errorf("device: synchronize %s: %w", d, context.Cause(ctx)) }
	if ctx.Err() != nil {
		return gaveUp() // return without waiting
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
	err = gpu.DeviceOf(d).DoInTime(func(drv cudadrv.Driver) cudadrv.Result {
		f, t, r := drv.MemGetInfo()
		free, total = uint64(f), uint64(t)
		return r
	})
	return free, total, err
}

// Err returns the sticky error that made the device unusable for the process, or nil. Err does
// not query the driver, so it knows only errors that a call has returned.
func (d *Device) Err() error {
	if e := d.lost.Load(); e != nil {
		return e
	}
	return nil
}

// ask calls the driver for the device, without a context.
func ask[T any](d *Device, call func(drv cudadrv.Driver, h cudadrv.Device) (T, cudadrv.Result)) (v T, err error) {
	g := gpu.DeviceOf(d)
	err = g.Ask(func(drv cudadrv.Driver) (r cudadrv.Result) {
		v, r = call(drv, g.Handle())
		return r
	})
	return v, err
}
