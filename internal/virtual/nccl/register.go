package nccl

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

// scaledOp represents all reductions of RedOpCreatePreMulSum in signatures,
// because their scalars may differ between ranks.
const scaledOp = int32(ncclapi.Avg) + 1

// A scaledSum is a reduction of RedOpCreatePreMulSum.
type scaledSum struct {
	t      ncclapi.DType
	scalar []byte            // an immediate scalar
	p      cudadrv.DevicePtr // a scalar in device memory
}

// value returns the scalar for the running operation.
func (s *scaledSum) value(o *machine.Op) ([]byte, *machine.Trouble) {
	if s.scalar != nil {
		return s.scalar, nil
	}
	m := o.Machine()
	m.Lock()
	defer m.Unlock()
	return o.Touch(s.p, uint64(s.t.Size()), false)
}

// redop returns a reduction for elements of the type; scaled is nil for built-in
// reductions.
func (c *comm) redop(op ncclapi.RedOp, t ncclapi.DType) (scaled *scaledSum, ok bool) {
	if op >= ncclapi.Sum && op <= ncclapi.Avg {
		return nil, true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.redops[op]
	return &s, ok && s.t == t
}

func (l *lib) RedOpCreatePreMulSum(scalar unsafe.Pointer, t ncclapi.DType, residence int32, h ncclapi.Comm) (ncclapi.RedOp, ncclapi.Result) {
	const f = ncclapi.FuncRedOpCreatePreMulSum
	if r := l.enter(f); r != ncclapi.Success {
		return 0, r
	}
	c, r := l.usable(f, h)
	if r != ncclapi.Success {
		return 0, r
	}
	s := scaledSum{t: t}
	switch {
	case t.Size() == 0 || scalar == nil:
		return 0, l.refuse(ncclapi.InvalidArgument, "%s: the scalar is null or has an unknown data type", f.Name())
	case residence == ncclapi.ScalarHostImmediate:
		s.scalar = append([]byte(nil), unsafe.Slice((*byte)(scalar), t.Size())...)
	case residence == ncclapi.ScalarDevice:
		s.p = cudadrv.DevicePtr(uintptr(scalar))
		l.m.Lock()
		bad := c.checkBuffer("the scalar", s.p, uint64(t.Size()), t)
		l.m.Unlock()
		if bad != "" {
			return 0, l.refuse(ncclapi.InvalidArgument, "%s: %s", f.Name(), bad)
		}
	default:
		return 0, l.refuse(ncclapi.InvalidArgument, "%s: %d is not a valid residence of a scalar", f.Name(), residence)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	op := c.newRedop()
	c.redops[op] = s
	return op, ncclapi.Success
}

// newRedop returns the number of a new reduction. As in NCCL, it is the lowest index that is free,
// mixed with bits of the communicator, so that the number of a reduction of another communicator is
// refused. c.mu is held.
func (c *comm) newRedop() ncclapi.RedOp {
	for i := ncclapi.Avg + 1; ; i++ {
		op := i ^ c.redopBits
		if op <= ncclapi.Avg { // the number of a built-in reduction
			op = i
		}
		if _, taken := c.redops[op]; !taken {
			return op
		}
	}
}

func (l *lib) RedOpDestroy(op ncclapi.RedOp, h ncclapi.Comm) ncclapi.Result {
	return forget(l, ncclapi.FuncRedOpDestroy, h, op, func(c *comm) map[ncclapi.RedOp]scaledSum { return c.redops })
}

// forget removes an object of a communicator.
func forget[K comparable, V any](l *lib, f ncclapi.Func, h ncclapi.Comm, key K, table func(*comm) map[K]V) ncclapi.Result {
	c, r := l.begin(f, h)
	if r != ncclapi.Success {
		return r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := table(c)[key]; !ok {
		return l.refuse(ncclapi.InvalidArgument, "%s: %v does not belong to the communicator", f.Name(), key)
	}
	delete(table(c), key)
	return ncclapi.Success
}

// registrable validates the memory of a registration and returns a new id.
func (l *lib) registrable(f ncclapi.Func, h ncclapi.Comm, p cudadrv.DevicePtr, bytes uintptr) (*comm, ncclapi.RegID, ncclapi.Result) {
	if r := l.enter(f); r != ncclapi.Success {
		return nil, 0, r
	}
	c, r := l.usable(f, h)
	if r != ncclapi.Success {
		return nil, 0, r
	}
	l.m.Lock()
	bad := c.checkBuffer("the buffer", p, uint64(bytes), ncclapi.Uint8)
	l.m.Unlock()
	if bytes == 0 {
		bad = "the buffer is empty"
	}
	if bad != "" {
		return nil, 0, l.refuse(ncclapi.InvalidArgument, "%s at rank %d: %s", f.Name(), c.rank, bad)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lastRegID++
	return c, l.lastRegID, ncclapi.Success
}

func (l *lib) CommRegister(h ncclapi.Comm, p cudadrv.DevicePtr, bytes uintptr) (ncclapi.RegID, ncclapi.Result) {
	c, id, r := l.registrable(ncclapi.FuncCommRegister, h, p, bytes)
	if r != ncclapi.Success {
		return 0, r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.regs[id] = true
	return id, ncclapi.Success
}

func (l *lib) CommDeregister(h ncclapi.Comm, id ncclapi.RegID) ncclapi.Result {
	return forget(l, ncclapi.FuncCommDeregister, h, id, func(c *comm) map[ncclapi.RegID]bool { return c.regs })
}

// CommWindowRegister validates the window and waits for the windows of all
// ranks, whose sizes must be the same if they are symmetric.
func (l *lib) CommWindowRegister(h ncclapi.Comm, p cudadrv.DevicePtr, bytes uintptr, out *ncclapi.Window, flags int32) ncclapi.Result {
	const f = ncclapi.FuncCommWindowRegister
	if !l.Has(f) {
		return ncclapi.MissingSymbol
	}
	if out == nil || flags&^l.windowFlags() != 0 {
		return l.refuse(ncclapi.InvalidArgument, "%s: flags %d, result at %p", f.Name(), flags, out)
	}
	c, id, r := l.registrable(f, h, p, bytes)
	if r != ncclapi.Success {
		return r
	}
	if bad, r := l.checkWindow(p); r != ncclapi.Success {
		return l.refuse(r, "%s at rank %d: %s", f.Name(), c.rank, bad)
	}
	c.mu.Lock()
	c.opened++
	win := window{number: c.opened, p: p, bytes: bytes, symmetric: flags&ncclapi.WindowCollSymmetric != 0}
	meeting := fmt.Sprintf("window %d", c.opened)
	c.mu.Unlock()
	note := "a window"
	if flags&ncclapi.WindowCollSymmetric != 0 {
		note = fmt.Sprintf("a symmetric window of %d bytes", bytes)
	}
	return l.later(func() ncclapi.Result {
		if _, r := c.meet(f, meeting, note); r != ncclapi.Success {
			return r
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		*out = ncclapi.Window(id)
		c.windows[*out] = win
		return ncclapi.Success
	})
}

// windowAlignment is NCCL_WIN_REQUIRED_ALIGNMENT.
const windowAlignment = 4096

// checkWindow returns the error in the memory of a window. NCCL maps the allocation that contains the
// window in the other ranks, which memory of cuMemAlloc does not allow.
func (l *lib) checkWindow(p cudadrv.DevicePtr) (bad string, r ncclapi.Result) {
	l.m.Lock()
	defer l.m.Unlock()
	b, _ := l.m.Find(p)
	switch {
	case b == nil:
		return fmt.Sprintf("%#x is not a device address", uint64(p)), ncclapi.InvalidArgument
	case b.Offset(p)%windowAlignment != 0:
		return fmt.Sprintf("Window address must be suitably aligned: %#x is at byte %d of %v: want a multiple of %d", uint64(p), b.Offset(p), b, windowAlignment), ncclapi.InvalidArgument
	case !b.Public() && !b.Reserved():
		return fmt.Sprintf("%#x lies in %v, which is not memory of ncclMemAlloc or of cuMemCreate", uint64(p), b), ncclapi.UnhandledCUDAError
	}
	return "", ncclapi.Success
}

func (l *lib) CommWindowDeregister(h ncclapi.Comm, w ncclapi.Window) ncclapi.Result {
	return forget(l, ncclapi.FuncCommWindowDeregister, h, w, func(c *comm) map[ncclapi.Window]window { return c.windows })
}

// MemAlloc allocates memory that is accessible from all devices.
func (l *lib) MemAlloc(bytes uintptr) (cudadrv.DevicePtr, ncclapi.Result) {
	const f = ncclapi.FuncMemAlloc
	dev, r := l.takeDevice(f)
	if fault := l.enter(f); fault != ncclapi.Success {
		r = fault
	}
	if r != ncclapi.Success {
		return 0, r
	}
	if bytes == 0 {
		return 0, l.refuse(ncclapi.InvalidArgument, "%s: 0 bytes", f.Name())
	}
	l.m.Lock()
	defer l.m.Unlock()
	p, res := dev.AllocPublic(bytes)
	if res != cudadrv.Success {
		return 0, l.refuse(ncclapi.UnhandledCUDAError, "%s: %d bytes on device %d: %v", f.Name(), bytes, dev.Ordinal(), res)
	}
	return p, ncclapi.Success
}

// MemFree waits for the device, like cuMemFree.
func (l *lib) MemFree(p cudadrv.DevicePtr) ncclapi.Result {
	const f = ncclapi.FuncMemFree
	if r := l.enter(f); r != ncclapi.Success {
		return r
	}
	r, found := l.m.FreePublic(f.Name(), p)
	if !found {
		return l.refuse(ncclapi.InvalidArgument, "%s: %#x is not memory of ncclMemAlloc", f.Name(), uint64(p))
	}
	if r != cudadrv.Success {
		return l.refuse(ncclapi.UnhandledCUDAError, "%s: %v", f.Name(), fmt.Sprint(r))
	}
	return ncclapi.Success
}
