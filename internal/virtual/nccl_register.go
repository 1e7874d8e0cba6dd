package virtual

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
)

// scaledOp stands for all reductions of RedOpCreatePreMulSum in signatures: the
// scalar may differ from rank to rank.
const scaledOp = int32(ncclapi.Avg) + 1

// A scaledSum is a reduction of RedOpCreatePreMulSum.
type scaledSum struct {
	t      ncclapi.DType
	scalar []byte            // an immediate one
	p      cudadrv.DevicePtr // one in device memory
}

// value returns the scalar for the running operation.
func (s *scaledSum) value(o *op) ([]byte, *trouble) {
	if s.scalar != nil {
		return s.scalar, nil
	}
	m := o.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	return o.touch(s.p, uint64(s.t.Size()), false)
}

// redop finds a reduction for elements of the type; scaled is nil for those
// that are built in.
func (c *comm) redop(op ncclapi.RedOp, t ncclapi.DType) (scaled *scaledSum, ok bool) {
	if op >= ncclapi.Sum && op <= ncclapi.Avg {
		return nil, true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.redops[op]
	return &s, ok && s.t == t
}

func (l *ncclLib) RedOpCreatePreMulSum(scalar unsafe.Pointer, t ncclapi.DType, residence int32, h ncclapi.Comm) (ncclapi.RedOp, ncclapi.Result) {
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
		return 0, l.refuse(ncclapi.InvalidArgument, "%s: no scalar of a known data type", f.Name())
	case residence == ncclapi.ScalarHostImmediate:
		s.scalar = append([]byte(nil), unsafe.Slice((*byte)(scalar), t.Size())...)
	case residence == ncclapi.ScalarDevice:
		s.p = cudadrv.DevicePtr(uintptr(scalar))
		l.m.mu.Lock()
		bad := c.checkBuffer("the scalar", s.p, uint64(t.Size()), t)
		l.m.mu.Unlock()
		if bad != "" {
			return 0, l.refuse(ncclapi.InvalidArgument, "%s: %s", f.Name(), bad)
		}
	default:
		return 0, l.refuse(ncclapi.InvalidArgument, "%s: %d is no residence of a scalar", f.Name(), residence)
	}
	l.mu.Lock()
	l.lastSum++
	op := l.lastSum
	l.mu.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.redops[op] = s
	return op, ncclapi.Success
}

func (l *ncclLib) RedOpDestroy(op ncclapi.RedOp, h ncclapi.Comm) ncclapi.Result {
	return forget(l, ncclapi.FuncRedOpDestroy, h, op, func(c *comm) map[ncclapi.RedOp]scaledSum { return c.redops })
}

// forget removes something that belongs to a communicator.
func forget[K comparable, V any](l *ncclLib, f ncclapi.Func, h ncclapi.Comm, key K, table func(*comm) map[K]V) ncclapi.Result {
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

// registrable checks the memory of a registration and makes its number.
func (l *ncclLib) registrable(f ncclapi.Func, h ncclapi.Comm, p cudadrv.DevicePtr, bytes uintptr) (*comm, ncclapi.RegID, ncclapi.Result) {
	if r := l.enter(f); r != ncclapi.Success {
		return nil, 0, r
	}
	c, r := l.usable(f, h)
	if r != ncclapi.Success {
		return nil, 0, r
	}
	l.m.mu.Lock()
	bad := c.checkBuffer("the buffer", p, uint64(bytes), ncclapi.Uint8)
	l.m.mu.Unlock()
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

func (l *ncclLib) CommRegister(h ncclapi.Comm, p cudadrv.DevicePtr, bytes uintptr) (ncclapi.RegID, ncclapi.Result) {
	c, id, r := l.registrable(ncclapi.FuncCommRegister, h, p, bytes)
	if r != ncclapi.Success {
		return 0, r
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.regs[id] = true
	return id, ncclapi.Success
}

func (l *ncclLib) CommDeregister(h ncclapi.Comm, id ncclapi.RegID) ncclapi.Result {
	return forget(l, ncclapi.FuncCommDeregister, h, id, func(c *comm) map[ncclapi.RegID]bool { return c.regs })
}

// CommWindowRegister checks the window and waits for those of all ranks, which must
// be as long for a symmetric one.
func (l *ncclLib) CommWindowRegister(h ncclapi.Comm, p cudadrv.DevicePtr, bytes uintptr, out *ncclapi.Window, flags int32) ncclapi.Result {
	const f = ncclapi.FuncCommWindowRegister
	if !l.Has(f) {
		return ncclapi.MissingSymbol
	}
	if out == nil || flags != ncclapi.WindowDefault && flags != ncclapi.WindowCollSymmetric {
		return l.refuse(ncclapi.InvalidArgument, "%s: flags %d, result at %p", f.Name(), flags, out)
	}
	c, id, r := l.registrable(f, h, p, bytes)
	if r != ncclapi.Success {
		return r
	}
	c.mu.Lock()
	c.opened++
	meeting := fmt.Sprintf("window %d", c.opened)
	c.mu.Unlock()
	note := "a window"
	if flags == ncclapi.WindowCollSymmetric {
		note = fmt.Sprintf("a symmetric window of %d bytes", bytes)
	}
	return l.later(func() ncclapi.Result {
		if _, r := c.meet(f, meeting, note); r != ncclapi.Success {
			return r
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		*out = ncclapi.Window(id)
		c.windows[*out] = p
		return ncclapi.Success
	})
}

func (l *ncclLib) CommWindowDeregister(h ncclapi.Comm, w ncclapi.Window) ncclapi.Result {
	return forget(l, ncclapi.FuncCommWindowDeregister, h, w, func(c *comm) map[ncclapi.Window]cudadrv.DevicePtr { return c.windows })
}

// MemAlloc makes memory that all devices may use.
func (l *ncclLib) MemAlloc(bytes uintptr) (cudadrv.DevicePtr, ncclapi.Result) {
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
	l.m.mu.Lock()
	defer l.m.mu.Unlock()
	p, res := dev.allocPtr(bytes, func() *block {
		b := newBlock(dev, uint64(bytes), blockAlign)
		b.public = true
		return b
	})
	if res != cudadrv.Success {
		return 0, l.refuse(ncclapi.UnhandledCUDAError, "%s: %d bytes on device %d: %v", f.Name(), bytes, dev.ordinal, res)
	}
	return p, ncclapi.Success
}

// MemFree waits for the device, as cuMemFree does.
func (l *ncclLib) MemFree(p cudadrv.DevicePtr) ncclapi.Result {
	const f = ncclapi.FuncMemFree
	if r := l.enter(f); r != ncclapi.Success {
		return r
	}
	l.m.mu.Lock()
	b := l.m.owned(p)
	if b == nil || !b.public {
		l.m.mu.Unlock()
		return l.refuse(ncclapi.InvalidArgument, "%s: %#x is not memory of ncclMemAlloc", f.Name(), uint64(p))
	}
	if r := l.m.freeWaiting(f.Name(), b); r != cudadrv.Success {
		return l.refuse(ncclapi.UnhandledCUDAError, "%s: %v", f.Name(), fmt.Sprint(r))
	}
	return ncclapi.Success
}
