package virtual

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

func (r *rig) export(dev int, p cudadrv.DevicePtr) (h cudadrv.IpcMemHandle) {
	r.t.Helper()
	r.do(dev, func() (res cudadrv.Result) { h, res = r.drv.IpcGetMemHandle(p); return res })
	return h
}

func (r *rig) openHandle(dev int, h cudadrv.IpcMemHandle) (p cudadrv.DevicePtr, res cudadrv.Result) {
	r.t.Helper()
	res = r.on(dev, func() (res cudadrv.Result) {
		p, res = r.drv.IpcOpenMemHandle(h, cudadrv.IpcMemLazyEnablePeerAccess)
		return res
	})
	return p, res
}

// Two machines stand for two processes.
func TestInterprocessMemory(t *testing.T) {
	for _, n := range []uintptr{100, 3<<20 + 5} {
		a, b := newRig(t, Config{Devices: 1}), newRig(t, Config{Devices: 2})
		sa, sb := a.stream(0), b.stream(0)
		p := a.alloc(0, n)
		h := a.export(0, p)
		require.Equal(t, h, a.export(0, p+50), "one handle for all of a block")
		_, res := a.openHandle(0, h)
		require.Equal(t, cudadrv.ErrorInvalidContext, res)

		before := b.freeBytes(0)
		q, res := b.openHandle(0, h)
		b.ok(res)
		require.Equal(t, before, b.freeBytes(0), "it is not the importer's memory")
		for _, x := range download[float32](b, 0, sb, q, int(n/4)) {
			require.NotEqual(t, x, x, "not a NaN")
		}
		again, res := b.openHandle(0, h)
		b.ok(res)
		require.Equal(t, q, again)
		a.ok(a.fill(0, sa, p, 3, n))
		a.sync(0, sa)
		b.ok(b.fill(0, sb, q+10, 4, 1))
		b.sync(0, sb)
		require.Equal(t, []byte{3, 4, 3}, download[byte](a, 0, sa, p+9, 3))
		require.Equal(t, byte(3), download[byte](b, 0, sb, q+cudadrv.DevicePtr(n)-1, 1)[0])

		// Through the second device the memory is a peer's.
		far, res := b.openHandle(1, h)
		b.ok(res)
		require.NotEqual(t, q, far)
		s1, five := b.stream(1), uint32(5)
		params := []unsafe.Pointer{unsafe.Pointer(&far), unsafe.Pointer(&five)}
		f := b.function(1, store)
		b.do(1, func() cudadrv.Result {
			return b.drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s1, unsafe.Pointer(&params[0]))
		})
		b.sync(1, s1)
		require.Equal(t, byte(5), download[byte](b, 0, sb, q, 1)[0])

		for name, call := range map[string]func() cudadrv.Result{
			"export what is another's": func() cudadrv.Result { _, res := b.drv.IpcGetMemHandle(q); return res },
			"free what is another's":   func() cudadrv.Result { return b.drv.MemFree(q) },
			"free it on a stream":      func() cudadrv.Result { return b.drv.MemFreeAsync(q, sb) },
			"close within it":          func() cudadrv.Result { return b.drv.IpcCloseMemHandle(q + 1) },
		} {
			require.Equal(t, cudadrv.ErrorInvalidValue, b.on(0, call), name)
		}
		closeIt := func() cudadrv.Result { return b.drv.IpcCloseMemHandle(q) }
		b.do(0, closeIt)
		require.Equal(t, byte(4), download[byte](b, 0, sb, q+10, 1)[0], "opened twice, closed once")
		b.do(0, closeIt)
		require.Equal(t, cudadrv.ErrorInvalidValue, b.on(0, closeIt))
		require.Equal(t, byte(4), download[byte](a, 0, sa, p+10, 1)[0], "closing changes nothing")
		b.ok(b.fill(0, sb, q, 1, 1))
		require.Equal(t, cudadrv.ErrorIllegalAddress, b.on(0, func() cudadrv.Result { return b.drv.StreamSynchronize(sb) }))
		require.Contains(t, b.m.Explain(0), "freed by cuIpcCloseMemHandle")

		a.do(0, func() cudadrv.Result { return a.drv.MemFree(p) })
		_, res = newRig(t, Config{Devices: 1}).openHandle(0, h)
		require.Equal(t, cudadrv.ErrorMapFailed, res, "it was freed")
		a.alloc(0, n)
		_, res = newRig(t, Config{Devices: 1}).openHandle(0, h)
		require.Equal(t, cudadrv.ErrorMapFailed, res, "its descriptor is another's")
	}
}

func TestInterprocessMemoryRefusals(t *testing.T) {
	a := newRig(t, Config{Devices: 2})
	s := a.stream(0)
	var pooled cudadrv.DevicePtr
	a.do(0, func() (res cudadrv.Result) { pooled, res = a.drv.MemAllocAsync(64, s); return res })
	mapped := a.reserve(0, 1)
	a.mapped(0, mapped, 1, 0)
	for _, p := range []cudadrv.DevicePtr{0, 1, pooled, mapped} {
		res := a.on(0, func() cudadrv.Result { _, res := a.drv.IpcGetMemHandle(p); return res })
		require.Equal(t, cudadrv.ErrorInvalidValue, res)
	}
	h := a.export(1, a.alloc(1, 64))
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
	h := a.export(0, a.alloc(0, 1<<20))
	p, res := b.openHandle(0, h)
	b.ok(res)
	s := b.stream(0)
	gate, f := make(chan bool), cudadrv.Function(0)
	f = b.function(0, Kernel{Name: "gate", Func: func(*KernelCall) { <-gate }})
	b.ok(b.fill(0, s, p, 1, 8))
	e := b.event(0)
	b.do(0, func() cudadrv.Result { return b.drv.EventRecord(e, s) })
	for b.m.running(e) { // the host looks, but not through the driver
	}
	b.do(0, func() cudadrv.Result {
		return b.drv.LaunchKernel(f, [3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, 0, s, nil)
	})
	require.Equal(t, cudadrv.ErrorLaunchFailed, b.on(0, func() cudadrv.Result { return b.drv.IpcCloseMemHandle(p) }))
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
	p := a.alloc(0, 64)
	q, res := b.openHandle(0, a.export(0, p))
	b.ok(res)
	b.ok(b.drv.DevicePrimaryCtxRelease(0))
	_, res = b.drv.DevicePrimaryCtxRetain(0)
	b.ok(res)
	require.Equal(t, cudadrv.ErrorInvalidValue, b.on(0, func() cudadrv.Result { return b.drv.IpcCloseMemHandle(q) }))
	q, res = b.openHandle(0, a.export(0, p))
	b.ok(res)
	b.do(0, func() cudadrv.Result { return b.drv.IpcCloseMemHandle(q) })
}

// envSharing names what a process of TestMemoryOfAnotherProcess does.
const envSharing = "CHORUS_TEST_SHARING"

var sharing = map[string]func(*child){"export": childExports, "import": childImports}

// childExports makes memory, names it, and waits until it is killed.
func childExports(c *child) {
	p := c.alloc(5 << 20)
	c.cu(c.do(func() cudadrv.Result { return c.drv.MemsetD8Async(p, 0x21, 5<<20, c.s) }))
	c.cu(c.do(func() cudadrv.Result { return c.drv.StreamSynchronize(c.s) }))
	var h cudadrv.IpcMemHandle
	c.cu(c.do(func() (r cudadrv.Result) { h, r = c.drv.IpcGetMemHandle(p); return r }))
	fmt.Println(hex.EncodeToString(h[:]))
	forever(nil)
}

// childImports adds 1 to the first byte of the memory of the handle that it is given
// and of the physical memory whose descriptor it inherits.
func childImports(c *child) {
	var h cudadrv.IpcMemHandle
	if _, err := hex.Decode(h[:], []byte(os.Getenv(envID))); err != nil {
		panic(err)
	}
	var p, q cudadrv.DevicePtr
	c.cu(c.do(func() (r cudadrv.Result) {
		p, r = c.drv.IpcOpenMemHandle(h, cudadrv.IpcMemLazyEnablePeerAccess)
		return r
	}))
	var m cudadrv.MemHandle
	c.cu(c.do(func() (r cudadrv.Result) {
		m, r = c.drv.MemImportFromShareableHandle(3, cudadrv.MemHandlePosixFD)
		return r
	}))
	c.cu(c.do(func() (r cudadrv.Result) { q, r = c.drv.MemAddressReserve(unit, 0, 0); return r }))
	c.cu(c.do(func() cudadrv.Result { return c.drv.MemMap(q, unit, 0, m) }))
	c.cu(c.do(func() cudadrv.Result { return c.drv.MemSetAccess(q, unit, cudadrv.MemAccessReadWrite, 0) }))
	for _, x := range []cudadrv.DevicePtr{p, q} {
		v := make([]float32, 1)
		c.get(v, x)
		v[0]++
		c.put(x, v)
	}
	c.cu(c.do(func() cudadrv.Result { return c.drv.StreamSynchronize(c.s) }))
	c.cu(c.do(func() cudadrv.Result { return c.drv.IpcCloseMemHandle(p) }))
}

// newChild is a process of its own without a communicator.
func newChild() *child {
	c := &child{}
	var err error
	if c.m, err = New(&Config{Devices: 1}); err != nil {
		panic(err)
	}
	c.drv, c.api = c.m.Driver(), c.m.NCCL()
	c.cu(c.drv.Init())
	var r cudadrv.Result
	c.ctx, r = c.drv.DevicePrimaryCtxRetain(0)
	c.cu(r)
	c.cu(c.do(func() (r cudadrv.Result) { c.s, r = c.drv.StreamCreateWithPriority(1, 0); return r }))
	return c
}

func sharingProcess(t *testing.T, name string, env ...string) *exec.Cmd {
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(append(os.Environ(), envSharing+"="+name), env...)
	cmd.Stderr = os.Stderr
	return cmd
}

func TestMemoryOfAnotherProcess(t *testing.T) {
	r := newRig(t, Config{Devices: 1})
	s := r.stream(0)

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
	r.ok(res)
	require.Equal(t, byte(0x21), download[byte](r, 0, s, p+5<<20-1, 1)[0])
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait())
	require.Equal(t, byte(0x21), download[byte](r, 0, s, p+1, 1)[0], "what is mapped stays")
	_, res = newRig(t, Config{Devices: 1}).openHandle(0, h)
	require.Equal(t, cudadrv.ErrorMapFailed, res)
	r.do(0, func() cudadrv.Result { return r.drv.IpcCloseMemHandle(p) })

	// Another process imports.
	p, q := r.alloc(0, 64), r.reserve(0, 1)
	physical := r.physical(0, 1)
	r.do(0, func() cudadrv.Result { return r.drv.MemMap(q, unit, 0, physical) })
	r.do(0, func() cudadrv.Result { return r.drv.MemSetAccess(q, unit, cudadrv.MemAccessReadWrite, 0) })
	upload(r, 0, s, p, []float32{41})
	upload(r, 0, s, q, []float32{51})
	r.sync(0, s)
	var fd int32
	r.do(0, func() (res cudadrv.Result) {
		fd, res = r.drv.MemExportToShareableHandle(physical, cudadrv.MemHandlePosixFD)
		return res
	})
	h = r.export(0, p)
	cmd = sharingProcess(t, "import", envID+"="+hex.EncodeToString(h[:]))
	file := os.NewFile(uintptr(fd), "physical memory")
	defer file.Close()
	cmd.ExtraFiles = []*os.File{file}
	require.NoError(t, cmd.Run())
	require.Equal(t, []float32{42}, download[float32](r, 0, s, p, 1))
	require.Equal(t, []float32{52}, download[float32](r, 0, s, q, 1))
}
