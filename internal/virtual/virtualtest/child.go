package virtualtest

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A Child is a separate process of a test. It uses one device.
type Child struct {
	Drv     cudadrv.Driver
	Context cudadrv.Context
	Stream  cudadrv.Stream
	Explain func() string // describes the state of the process if a call fails
}

// NewChild initializes the driver and creates a stream on the device.
func NewChild(drv cudadrv.Driver, dev cudadrv.Device, explain func() string) *Child {
	c := &Child{Drv: drv, Explain: explain}
	c.CU(drv.Init())
	var r cudadrv.Result
	c.Context, r = drv.DevicePrimaryCtxRetain(dev)
	c.CU(r)
	c.CU(c.Do(func() (r cudadrv.Result) { c.Stream, r = drv.StreamCreateWithPriority(1, 0); return r }))
	return c
}

// Must ends the process unless ok is true. skip is the number of callers to leave out of
// the place that it prints.
func (c *Child) Must(r error, ok bool, skip int) {
	if !ok {
		_, file, line, _ := runtime.Caller(1 + skip)
		fmt.Fprintf(os.Stderr, "%s:%d: %v: %s\n", file, line, r, c.Explain())
		os.Exit(1)
	}
}

// CU ends the process if the result is an error.
func (c *Child) CU(r cudadrv.Result) { c.Must(r, r == 0, 1) }

// Do binds the context to this thread and calls f.
func (c *Child) Do(f func() cudadrv.Result) cudadrv.Result {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if r := c.Drv.CtxSetCurrent(c.Context); r != 0 {
		return r
	}
	return f()
}

// Alloc allocates at least one byte.
func (c *Child) Alloc(n int) (p cudadrv.DevicePtr) {
	c.CU(c.Do(func() (r cudadrv.Result) { p, r = c.Drv.MemAlloc(uintptr(max(n, 1))); return r }))
	return p
}

// Put copies v to device memory.
func (c *Child) Put(p cudadrv.DevicePtr, v []float32) {
	if len(v) > 0 {
		c.CU(c.Do(func() cudadrv.Result {
			return c.Drv.MemcpyHtoDAsync(p, unsafe.Pointer(&v[0]), uintptr(4*len(v)), c.Stream)
		}))
	}
}

// Get copies device memory to v.
func (c *Child) Get(v []float32, p cudadrv.DevicePtr) {
	if len(v) > 0 {
		c.CU(c.Do(func() cudadrv.Result {
			return c.Drv.MemcpyDtoHAsync(unsafe.Pointer(&v[0]), p, uintptr(4*len(v)), c.Stream)
		}))
	}
}
