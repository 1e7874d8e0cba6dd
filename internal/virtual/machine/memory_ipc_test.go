package machine

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
)

func (r *rig) export(dev int, p cudadrv.DevicePtr) (h cudadrv.IpcMemHandle) {
	r.T.Helper()
	r.Do(dev, func() (res cudadrv.Result) { h, res = r.Drv.IpcGetMemHandle(p); return res })
	return h
}

func (r *rig) openHandle(dev int, h cudadrv.IpcMemHandle) (p cudadrv.DevicePtr, res cudadrv.Result) {
	r.T.Helper()
	res = r.On(dev, func() (res cudadrv.Result) {
		p, res = r.Drv.IpcOpenMemHandle(h, cudadrv.IpcMemLazyEnablePeerAccess)
		return res
	})
	return p, res
}

// Two machines stand for two processes.
func TestInterprocessMemory(t *testing.T) {
	for _, n := range []uintptr{100, 3<<20 + 5} {
		a, b := newRig(t, Config{Devices: 1}), newRig(t, Config{Devices: 2})
		sa, sb := a.Stream(0), b.Stream(0)
		p := a.Alloc(0, n)
		h := a.export(0, p)
		require.Equal(t, h, a.export(0, p+50), "one handle for all of a block")
		_, res := a.openHandle(0, h)
		require.Equal(t, cudadrv.ErrorInvalidContext, res)

		before := b.freeBytes(0)
		q, res := b.openHandle(0, h)
		b.OK(res)
		require.Equal(t, before, b.freeBytes(0), "it is not the importer's memory")
		for _, x := range virtualtest.Download[float32](b.Rig, 0, sb, q, int(n/4)) {
			require.NotEqual(t, x, x, "not a NaN")
		}
		again, res := b.openHandle(0, h)
		b.OK(res)
		require.Equal(t, q, again)
		a.OK(a.fill(0, sa, p, 3, n))
		a.Sync(0, sa)
		b.OK(b.fill(0, sb, q+10, 4, 1))
		b.Sync(0, sb)
		require.Equal(t, []byte{3, 4, 3}, virtualtest.Download[byte](a.Rig, 0, sa, p+9, 3))
		require.Equal(t, byte(3), virtualtest.Download[byte](b.Rig, 0, sb, q+cudadrv.DevicePtr(n)-1, 1)[0])

		// Through the second device the memory is a peer's.
		far, res := b.openHandle(1, h)
		b.OK(res)
		require.NotEqual(t, q, far)
		s1, five := b.Stream(1), uint32(5)
		params := []unsafe.Pointer{unsafe.Pointer(&far), unsafe.Pointer(&five)}
		f := b.function(1, store)
		b.Do(1, func() cudadrv.Result {
			return b.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s1, unsafe.Pointer(&params[0]))
		})
		b.Sync(1, s1)
		require.Equal(t, byte(5), virtualtest.Download[byte](b.Rig, 0, sb, q, 1)[0])

		for name, call := range map[string]func() cudadrv.Result{
			"export what is another's": func() cudadrv.Result { _, res := b.Drv.IpcGetMemHandle(q); return res },
			"free what is another's":   func() cudadrv.Result { return b.Drv.MemFree(q) },
			"free it on a stream":      func() cudadrv.Result { return b.Drv.MemFreeAsync(q, sb) },
			"close within it":          func() cudadrv.Result { return b.Drv.IpcCloseMemHandle(q + 1) },
		} {
			require.Equal(t, cudadrv.ErrorInvalidValue, b.On(0, call), name)
		}
		closeIt := func() cudadrv.Result { return b.Drv.IpcCloseMemHandle(q) }
		b.Do(0, closeIt)
		require.Equal(t, byte(4), virtualtest.Download[byte](b.Rig, 0, sb, q+10, 1)[0], "opened twice, closed once")
		b.Do(0, closeIt)
		require.Equal(t, cudadrv.ErrorInvalidValue, b.On(0, closeIt))
		require.Equal(t, byte(4), virtualtest.Download[byte](a.Rig, 0, sa, p+10, 1)[0], "closing changes nothing")
		b.OK(b.fill(0, sb, q, 1, 1))
		require.Equal(t, cudadrv.ErrorIllegalAddress, b.On(0, func() cudadrv.Result { return b.Drv.StreamSynchronize(sb) }))
		require.Contains(t, b.m.Explain(0), "freed by cuIpcCloseMemHandle")

		a.Do(0, func() cudadrv.Result { return a.Drv.MemFree(p) })
		_, res = newRig(t, Config{Devices: 1}).openHandle(0, h)
		require.Equal(t, cudadrv.ErrorMapFailed, res, "it was freed")
		a.Alloc(0, n)
		_, res = newRig(t, Config{Devices: 1}).openHandle(0, h)
		require.Equal(t, cudadrv.ErrorMapFailed, res, "its descriptor is another's")
	}
}

func TestInterprocessMemoryRefusals(t *testing.T) {
	a := newRig(t, Config{Devices: 2})
	s := a.Stream(0)
	var pooled cudadrv.DevicePtr
	a.Do(0, func() (res cudadrv.Result) { pooled, res = a.Drv.MemAllocAsync(64, s); return res })
	mapped := a.Reserve(0, 1)
	a.Map(0, mapped, 1, 0)
	for _, p := range []cudadrv.DevicePtr{0, 1, pooled, mapped} {
		res := a.On(0, func() cudadrv.Result { _, res := a.Drv.IpcGetMemHandle(p); return res })
		require.Equal(t, cudadrv.ErrorInvalidValue, res)
	}
	h := a.export(1, a.Alloc(1, 64))
	_, res := newRig(t, Config{Devices: 1}).openHandle(0, h)
	require.Equal(t, cudadrv.ErrorInvalidDevice, res, "the importer does not see the device")
	_, res = newRig(t, Config{Devices: 2, Host: "elsewhere"}).openHandle(0, h)
	require.Equal(t, cudadrv.ErrorInvalidDevice, res)
	late, ok := readTicket(h)
	require.True(t, ok)
	late.Start++
	_, res = newRig(t, Config{Devices: 2}).openHandle(0, late.handle())
	require.Equal(t, cudadrv.ErrorMapFailed, res, "the number is another process's by now")
}

// The host must wait for what uses memory before it closes it.
func TestCloseRacesWithUse(t *testing.T) {
	a, b := newRig(t, Config{Devices: 1}), newRig(t, Config{Devices: 1})
	h := a.export(0, a.Alloc(0, 1<<20))
	p, res := b.openHandle(0, h)
	b.OK(res)
	s := b.Stream(0)
	gate, f := make(chan bool), cudadrv.Function(0)
	f = b.function(0, Kernel{Name: "gate", Func: func(*KernelCall) { <-gate }})
	b.OK(b.fill(0, s, p, 1, 8))
	e := b.Event(0)
	b.Do(0, func() cudadrv.Result { return b.Drv.EventRecord(e, s) })
	for b.m.running(e) { // the host looks, but not through the driver
	}
	b.Do(0, func() cudadrv.Result {
		return b.Drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, nil)
	})
	require.Equal(t, cudadrv.ErrorLaunchFailed, b.On(0, func() cudadrv.Result { return b.Drv.IpcCloseMemHandle(p) }))
	require.Contains(t, b.m.Explain(0), "has not waited for cuMemsetD8Async")
	close(gate)
}

// running reports whether the event's last record has not completed.
func (m *Machine) running(e cudadrv.Event) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.events[e].last.done:
		return false
	default:
		return true
	}
}

func TestResetClosesWhatWasOpened(t *testing.T) {
	a, b := newRig(t, Config{Devices: 1}), newRig(t, Config{Devices: 1})
	p := a.Alloc(0, 64)
	q, res := b.openHandle(0, a.export(0, p))
	b.OK(res)
	b.OK(b.Drv.DevicePrimaryCtxRelease(0))
	_, res = b.Drv.DevicePrimaryCtxRetain(0)
	b.OK(res)
	require.Equal(t, cudadrv.ErrorInvalidValue, b.On(0, func() cudadrv.Result { return b.Drv.IpcCloseMemHandle(q) }))
	q, res = b.openHandle(0, a.export(0, p))
	b.OK(res)
	b.Do(0, func() cudadrv.Result { return b.Drv.IpcCloseMemHandle(q) })
}

// envSharing names what a process of TestMemoryOfAnotherProcess does, and envHandle has the
// handle that it imports.
const (
	envSharing = "CHORUS_TEST_SHARING"
	envHandle  = "CHORUS_TEST_HANDLE"
)

type child = virtualtest.Child

func TestMain(m *testing.M) {
	if name := os.Getenv(envSharing); name != "" {
		sharing[name](newChild())
		return
	}
	virtualtest.Main(m)
}

var sharing = map[string]func(*child){"export": childExports, "import": childImports}

// childExports allocates memory, names it, and waits until it is killed.
func childExports(c *child) {
	p := c.Alloc(5 << 20)
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.MemsetD8Async(p, 0x21, 5<<20, c.Stream) }))
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.StreamSynchronize(c.Stream) }))
	var h cudadrv.IpcMemHandle
	c.CU(c.Do(func() (r cudadrv.Result) { h, r = c.Drv.IpcGetMemHandle(p); return r }))
	fmt.Println(hex.EncodeToString(h[:]))
	Forever(nil)
}

// childImports adds 1 to the first byte of the memory of the handle that it is given
// and of the physical memory whose descriptor it inherits.
func childImports(c *child) {
	var h cudadrv.IpcMemHandle
	if _, err := hex.Decode(h[:], []byte(os.Getenv(envHandle))); err != nil {
		panic(err)
	}
	var p, q cudadrv.DevicePtr
	c.CU(c.Do(func() (r cudadrv.Result) {
		p, r = c.Drv.IpcOpenMemHandle(h, cudadrv.IpcMemLazyEnablePeerAccess)
		return r
	}))
	var m cudadrv.MemHandle
	c.CU(c.Do(func() (r cudadrv.Result) {
		m, r = c.Drv.MemImportFromShareableHandle(3, cudadrv.MemHandlePosixFD)
		return r
	}))
	c.CU(c.Do(func() (r cudadrv.Result) { q, r = c.Drv.MemAddressReserve(unit, 0, 0); return r }))
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.MemMap(q, unit, 0, m) }))
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.MemSetAccess(q, unit, cudadrv.MemAccessReadWrite, 0) }))
	for _, x := range []cudadrv.DevicePtr{p, q} {
		v := make([]float32, 1)
		c.Get(v, x)
		v[0]++
		c.Put(x, v)
	}
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.StreamSynchronize(c.Stream) }))
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.IpcCloseMemHandle(p) }))
}

// newChild is a process of its own without a communicator.
func newChild() *child {
	m, err := New(&Config{Devices: 1})
	if err != nil {
		panic(err)
	}
	return virtualtest.NewChild(m.Driver(), 0, func() string { return fmt.Sprintf("%s (seed %#x)", m.Explain(0), m.Seed()) })
}

func sharingProcess(t *testing.T, name string, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(append(os.Environ(), envSharing+"="+name), env...)
	cmd.Stderr = os.Stderr
	return cmd
}

func TestMemoryOfAnotherProcess(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.Stream(0)

	// Another process exports, and is killed.
	cmd := sharingProcess(t, "export")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	var h cudadrv.IpcMemHandle
	_, err = hex.Decode(h[:], []byte(strings.TrimSpace(line)))
	require.NoError(t, err)
	p, res := r.openHandle(0, h)
	r.OK(res)
	require.Equal(t, byte(0x21), virtualtest.Download[byte](r.Rig, 0, s, p+5<<20-1, 1)[0])
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Equal(t, byte(0x21), virtualtest.Download[byte](r.Rig, 0, s, p+1, 1)[0], "what is mapped stays")
	_, res = newRig(t, Config{Devices: 1}).openHandle(0, h)
	require.Equal(t, cudadrv.ErrorMapFailed, res)
	r.Do(0, func() cudadrv.Result { return r.Drv.IpcCloseMemHandle(p) })

	// Another process imports.
	p, q := r.Alloc(0, 64), r.Reserve(0, 1)
	physical := r.Physical(0, 1)
	r.Do(0, func() cudadrv.Result { return r.Drv.MemMap(q, unit, 0, physical) })
	r.Do(0, func() cudadrv.Result { return r.Drv.MemSetAccess(q, unit, cudadrv.MemAccessReadWrite, 0) })
	virtualtest.Upload(r.Rig, 0, s, p, []float32{41})
	virtualtest.Upload(r.Rig, 0, s, q, []float32{51})
	r.Sync(0, s)
	var fd int32
	r.Do(0, func() (res cudadrv.Result) {
		fd, res = r.Drv.MemExportToShareableHandle(physical, cudadrv.MemHandlePosixFD)
		return res
	})
	h = r.export(0, p)
	cmd = sharingProcess(t, "import", envHandle+"="+hex.EncodeToString(h[:]))
	file := os.NewFile(uintptr(fd), "physical memory")
	defer file.Close()
	cmd.ExtraFiles = []*os.File{file}
	require.NoError(t, cmd.Run())
	require.Equal(t, []float32{42}, virtualtest.Download[float32](r.Rig, 0, s, p, 1))
	require.Equal(t, []float32{52}, virtualtest.Download[float32](r.Rig, 0, s, q, 1))
}
