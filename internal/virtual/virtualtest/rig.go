// Package virtualtest helps the tests of the virtual devices.
package virtualtest

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// Unit is the size of the parts of a reservation that Map maps.
const Unit = 2 << 20

// A Rig is a driver with the contexts of its devices retained.
type Rig struct {
	T        *testing.T
	Drv      cudadrv.Driver
	Contexts []cudadrv.Context
}

// New initializes the driver and retains the contexts of its devices.
func New(t *testing.T, drv cudadrv.Driver, devices int) *Rig {
	t.Helper()
	r := &Rig{T: t, Drv: drv}
	t.Cleanup(func() { runtime.KeepAlive(drv) }) // or its memory may go while others have it open
	r.OK(drv.Init())
	for i := range devices {
		ctx, res := drv.DevicePrimaryCtxRetain(cudadrv.Device(i))
		r.OK(res)
		r.Contexts = append(r.Contexts, ctx)
	}
	return r
}

// OK stops the test if the result is an error.
func (r *Rig) OK(res cudadrv.Result) {
	r.T.Helper()
	require.Equal(r.T, cudadrv.Success, res)
}

// On binds the context of a device to this thread and calls f.
func (r *Rig) On(dev int, f func() cudadrv.Result) cudadrv.Result {
	r.T.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r.OK(r.Drv.CtxSetCurrent(r.Contexts[dev]))
	return f()
}

// Do is On for a call that must succeed.
func (r *Rig) Do(dev int, f func() cudadrv.Result) {
	r.T.Helper()
	r.OK(r.On(dev, f))
}

// Stream creates a stream.
func (r *Rig) Stream(dev int) (s cudadrv.Stream) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { s, res = r.Drv.StreamCreateWithPriority(1, 0); return })
	return s
}

// Alloc allocates memory.
func (r *Rig) Alloc(dev int, bytes uintptr) (p cudadrv.DevicePtr) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { p, res = r.Drv.MemAlloc(bytes); return })
	return p
}

// Event creates an event.
func (r *Rig) Event(dev int) (e cudadrv.Event) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { e, res = r.Drv.EventCreate(0); return })
	return e
}

// Sync waits for the stream.
func (r *Rig) Sync(dev int, s cudadrv.Stream) {
	r.T.Helper()
	r.Do(dev, func() cudadrv.Result { return r.Drv.StreamSynchronize(s) })
}

// Reserve reserves addresses.
func (r *Rig) Reserve(dev int, units uintptr) (p cudadrv.DevicePtr) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { p, res = r.Drv.MemAddressReserve(units*Unit, 0, 0); return res })
	return p
}

// Physical creates memory without addresses.
func (r *Rig) Physical(dev int, units uintptr) (h cudadrv.MemHandle) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) {
		h, res = r.Drv.MemCreate(units*Unit, cudadrv.MemAllocationProp{Device: cudadrv.Device(dev), HandleTypes: cudadrv.MemHandlePosixFD})
		return res
	})
	return h
}

// Map maps new memory of a device for the given devices. Only the mapping refers to it.
func (r *Rig) Map(dev int, p cudadrv.DevicePtr, units uintptr, devices ...cudadrv.Device) {
	r.T.Helper()
	h := r.Physical(dev, units)
	r.Do(dev, func() cudadrv.Result { return r.Drv.MemMap(p, units*Unit, 0, h) })
	r.Do(dev, func() cudadrv.Result { return r.Drv.MemRelease(h) })
	if len(devices) > 0 {
		r.Do(dev, func() cudadrv.Result {
			return r.Drv.MemSetAccess(p, units*Unit, cudadrv.MemAccessReadWrite, devices...)
		})
	}
}

// Upload copies elements to device memory.
func Upload[T any](r *Rig, dev int, s cudadrv.Stream, p cudadrv.DevicePtr, v []T) {
	r.T.Helper()
	r.Do(dev, func() cudadrv.Result {
		return r.Drv.MemcpyHtoDAsync(p, unsafe.Pointer(unsafe.SliceData(v)), uintptr(len(v))*unsafe.Sizeof(v[0]), s)
	})
}

// Download copies n elements of device memory to the host.
func Download[T any](r *Rig, dev int, s cudadrv.Stream, p cudadrv.DevicePtr, n int) []T {
	r.T.Helper()
	v := make([]T, n)
	r.Do(dev, func() cudadrv.Result {
		return r.Drv.MemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(v)), p, uintptr(n)*unsafe.Sizeof(v[0]), s)
	})
	return v
}

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

// Main runs the tests of a package, checks that none left a goroutine behind, and exits.
func Main(m *testing.M) {
	if os.Getenv("GORACE") == "" {
		os.Setenv("GORACE", "atexit_sleep_ms=0") // see testgpu.Main
	}
	code := m.Run()
	if left := strayGoroutines(); code == 0 && left != "" {
		fmt.Fprintln(os.Stderr, "goroutines were left behind:\n"+left)
		code = 99
	}
	os.Exit(code)
}

// strayGoroutines returns the stacks of the virtual devices' goroutines that do not
// end. Tests that make a stream hang forever leave one each.
func strayGoroutines() string {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		buf := make([]byte, 1<<20)
		stacks := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
		var left []string
		for _, s := range stacks[1:] {
			if strings.Contains(s, "internal/virtual/") && !strings.Contains(s, "machine.Forever") {
				left = append(left, s)
			}
		}
		if len(left) == 0 {
			return ""
		}
		if time.Now().After(deadline) {
			return strings.Join(left, "\n\n")
		}
	}
}

// Processes runs this test binary again, once for each rank, with more variables in its
// environment. It returns the output of each process and how it ended. No process runs
// longer than the deadline.
func Processes(t testing.TB, ranks int, variables func(rank int) []string) (out []string, errs []error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmds := make([]*exec.Cmd, ranks)
	stdout, stderr := make([]bytes.Buffer, ranks), make([]bytes.Buffer, ranks)
	for rank := range ranks {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), variables(rank)...)
		cmd.Stdout, cmd.Stderr = &stdout[rank], &stderr[rank]
		require.NoError(t, cmd.Start())
		cmds[rank] = cmd
	}
	for rank, cmd := range cmds {
		errs = append(errs, cmd.Wait())
		out = append(out, stdout[rank].String())
		if s := stderr[rank].String(); s != "" {
			t.Logf("rank %d: %s", rank, s)
		}
	}
	return out, errs
}
