package machine

import (
	"cmp"
	"fmt"
	"slices"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A HostRange is the host side of a copy. Page-locked memory is resolved when the
// copy runs; pageable memory is staged, or the call waits for the copy.
type HostRange struct {
	bytes  []byte // of pageable memory
	block  *Block // of page-locked memory
	offset uint64
	n      uint64
}

func (m *Machine) HostRange(p unsafe.Pointer, n uintptr) (HostRange, cudadrv.Result) {
	addr := uint64(uintptr(p))
	if b := lookup(m.pinned, addr); b.contains(addr) {
		h := HostRange{block: b, offset: addr - b.addr, n: uint64(n)}
		if h.n > b.size-h.offset {
			return h, cudadrv.ErrorInvalidValue
		}
		return h, cudadrv.Success
	}
	if p == nil && n > 0 || addr >= addressBase {
		return HostRange{}, cudadrv.ErrorInvalidValue
	}
	if b := lookup(m.pinned, addr+uint64(n)); n > 0 && b != nil && b.addr > addr && b.addr-addr < uint64(n) {
		return HostRange{}, cudadrv.ErrorInvalidValue // CUDA refuses memory of which only a part is page-locked
	}
	return HostRange{bytes: unsafe.Slice((*byte)(p), n), n: uint64(n)}, cudadrv.Success
}

// Touch returns the host bytes for the running operation. m.mu is held.
func (h HostRange) Touch(o *Op, write bool) ([]byte, *Trouble) {
	if h.block == nil || h.n == 0 {
		return h.bytes, nil
	}
	if h.block.freedBy != "" {
		return nil, &Trouble{cudadrv.ErrorIllegalAddress, fmt.Sprintf(
			"%s on %v used %v, which the host freed with %s before the copy ran", o.Name, o.s, h.block, h.block.freedBy)}
	}
	if why := o.replaced(h.block, h.offset, h.n); why != "" {
		return nil, &Trouble{cudadrv.ErrorIllegalAddress, fmt.Sprintf("%s on %v used %d bytes of page-locked memory, %s", o.Name, o.s, h.n, why)}
	}
	return o.use(h.block, h.offset, h.n, write)
}

// Pinned reports whether the memory is page-locked.
func (h HostRange) Pinned() bool { return h.block != nil }

// Bytes returns the bytes of page-locked memory now, without a check of races. m.mu is held.
func (h HostRange) Bytes() []byte { return h.block.bytes(h.offset, h.n) }

// use tells which device memory the call names.
func (c *call) use(bytes uintptr, dst, src cudadrv.DevicePtr) {
	if bytes > 0 {
		c.uses, c.bytes = [2]cudadrv.DevicePtr{dst, src}, uint64(bytes)
	}
}

// move copies from the bytes that src returns to the bytes that dst returns,
// and calls dst only if src succeeds.
func (o *Op) move(dst, src func() ([]byte, *Trouble)) {
	m := o.s.dev.m
	m.mu.Lock()
	from, t := src()
	var to []byte
	if t == nil {
		to, t = dst()
	}
	m.mu.Unlock()
	if t != nil {
		o.Fail(t)
		return
	}
	copy(to, from)
	if o.wrong {
		Spoil(to)
	}
}

// Spoil changes a byte, as a fault plan asks for.
func Spoil(p []byte) {
	if len(p) > 0 {
		p[len(p)/2] ^= 1
	}
}

func (d driver) MemcpyHtoDAsync(dst cudadrv.DevicePtr, src unsafe.Pointer, bytes uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemcpyHtoDAsync", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	from, r := d.m.HostRange(src, bytes)
	if r != cudadrv.Success {
		return r
	}
	if from.block == nil && s.capture != nil {
		return s.Refused() // the bytes may have changed at a replay
	}
	if from.block == nil {
		from.bytes = append([]byte(nil), from.bytes...)
	}
	c.use(bytes, dst, 0)
	c.enqueue(s, func(o *Op) {
		o.move(func() ([]byte, *Trouble) { return o.Touch(dst, uint64(bytes), true) },
			func() ([]byte, *Trouble) { return from.Touch(o, false) })
	})
	return cudadrv.Success
}

func (d driver) MemcpyDtoHAsync(dst unsafe.Pointer, src cudadrv.DevicePtr, bytes uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemcpyDtoHAsync", h)
	if r != cudadrv.Success {
		return r
	}
	to, r := d.m.HostRange(dst, bytes)
	if r != cudadrv.Success {
		c.end()
		return r
	}
	if to.block == nil && s.capture != nil {
		defer c.end()
		return s.Refused()
	}
	c.use(bytes, 0, src)
	c.enqueue(s, func(o *Op) {
		o.move(func() ([]byte, *Trouble) { return to.Touch(o, true) },
			func() ([]byte, *Trouble) { return o.Touch(src, uint64(bytes), false) })
	})
	if to.block != nil {
		c.end()
		return cudadrv.Success
	}
	// CUDA returns from a copy to pageable memory only after the copy.
	k := s.Mark()
	c.end()
	return d.m.Await(s.dev, k)
}

func (d driver) MemcpyDtoDAsync(dst, src cudadrv.DevicePtr, bytes uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemcpyDtoDAsync", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if c.overlap(dst, src, bytes) {
		return cudadrv.ErrorInvalidValue
	}
	c.copyDevice(s, dst, src, bytes)
	return cudadrv.Success
}

// overlap reports a copy whose two sides share some bytes, but not all: CUDA does not define its
// result. m.mu is held.
func (c *call) overlap(dst, src cudadrv.DevicePtr, bytes uintptr) bool {
	n := cudadrv.DevicePtr(bytes)
	return dst != src && dst < src+n && src < dst+n && c.reportOverlap(dst, src, bytes)
}

func (c *call) reportOverlap(dst, src cudadrv.DevicePtr, bytes uintptr) bool {
	c.m.Report(fmt.Sprintf("virtual device %d: %s: the %d bytes at %#x and at %#x overlap, and the result is undefined on GPUs (seed %#x)",
		c.dev.ordinal, c.name, bytes, uint64(src), uint64(dst), c.m.seed))
	return true
}

func (d driver) MemcpyPeerAsync(dst cudadrv.DevicePtr, dstCtx cudadrv.Context, src cudadrv.DevicePtr, srcCtx cudadrv.Context, bytes uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemcpyPeerAsync", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if s.capture != nil {
		return s.Refused() // cuMemcpyDtoDAsync can be captured instead
	}
	to, from := d.m.deviceOf(dstCtx), d.m.deviceOf(srcCtx)
	if to == nil || from == nil || to.retained == 0 || from.retained == 0 {
		return cudadrv.ErrorInvalidContext
	}
	if bytes > 0 && (!d.m.Belongs(dst, to) || !d.m.Belongs(src, from)) {
		return cudadrv.ErrorInvalidValue
	}
	if c.overlap(dst, src, bytes) {
		return cudadrv.ErrorInvalidValue
	}
	c.copyDevice(s, dst, src, bytes)
	return cudadrv.Success
}

// Belongs reports whether p may be an address of the device. m.mu is held.
func (m *Machine) Belongs(p cudadrv.DevicePtr, dev *Device) bool {
	b, _ := m.Find(p)
	return b == nil || b.dev == nil || b.Owner(p) == dev
}

func (c *call) copyDevice(s *Stream, dst, src cudadrv.DevicePtr, bytes uintptr) {
	zero := c.zero && c.m.crosses(dst, src)
	c.use(bytes, dst, src)
	c.enqueue(s, func(o *Op) { o.moveDevice(dst, src, uint64(bytes), zero) })
}

// moveDevice copies between device memory, or writes zeros.
func (o *Op) moveDevice(dst, src cudadrv.DevicePtr, bytes uint64, zero bool) {
	o.move(func() ([]byte, *Trouble) { return o.Touch(dst, bytes, true) },
		func() ([]byte, *Trouble) {
			b, t := o.Touch(src, bytes, false)
			if zero {
				b = make([]byte, len(b))
			}
			return b, t
		})
}

func (d driver) Memcpy2DAsync(x cudadrv.Memcpy2D, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemcpy2DAsync", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if min(x.DstPitch, x.SrcPitch) < x.WidthInBytes || max(x.DstPitch, x.SrcPitch) > cudadrv.MaxPitch {
		return cudadrv.ErrorInvalidValue
	}
	if c.overlap2D(&x) {
		return cudadrv.ErrorInvalidValue
	}
	zero := c.zero && c.m.crosses(x.Dst, x.Src)
	c.use(x.WidthInBytes*x.Height, x.Dst, x.Src)
	c.enqueue(s, func(o *Op) {
		for row := range x.Height {
			o.moveDevice(x.Dst+cudadrv.DevicePtr(row*x.DstPitch), x.Src+cudadrv.DevicePtr(row*x.SrcPitch), uint64(x.WidthInBytes), zero)
		}
	})
	return cudadrv.Success
}

// overlap2D is overlap for the rows of a copy, which are in ascending order on both sides. m.mu is held.
func (c *call) overlap2D(x *cudadrv.Memcpy2D) bool {
	if x.Dst == x.Src && x.DstPitch == x.SrcPitch || x.WidthInBytes == 0 {
		return false
	}
	width := cudadrv.DevicePtr(x.WidthInBytes)
	for i, j := uintptr(0), uintptr(0); i < x.Height && j < x.Height; {
		dst, src := x.Dst+cudadrv.DevicePtr(i*x.DstPitch), x.Src+cudadrv.DevicePtr(j*x.SrcPitch)
		switch {
		case dst+width <= src:
			i++
		case src+width <= dst:
			j++
		default:
			return c.reportOverlap(dst, src, x.WidthInBytes)
		}
	}
	return false
}

// crosses reports whether the addresses belong to different devices. m.mu is held.
func (m *Machine) crosses(p, q cudadrv.DevicePtr) bool {
	a, _ := m.Find(p)
	b, _ := m.Find(q)
	return a != nil && b != nil && a.Owner(p) != b.Owner(q)
}

func (d driver) MemsetD8Async(dst cudadrv.DevicePtr, value uint8, count uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemsetD8Async", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	c.use(count, dst, 0)
	c.enqueue(s, func(o *Op) {
		d.m.mu.Lock()
		parts, t := o.overwrite(dst, uint64(count), value)
		d.m.mu.Unlock()
		if t != nil {
			o.Fail(t)
			return
		}
		for _, p := range parts {
			fill(p, value)
		}
	})
	return cudadrv.Success
}

func fill(p []byte, value byte) {
	if value == 0 || len(p) == 0 {
		clear(p)
		return
	}
	p[0] = value
	for n := 1; n < len(p); n *= 2 {
		copy(p[n:], p[:n])
	}
}

// Steps is one dimension of a strided layout: the number of elements, and the
// distance between them in elements.
type Steps struct{ N, Step int }

// StridedOf is ReadOf, or WriteOf, for the elements of a strided layout. The first
// element is at p, and each element consists of width Ts. It returns the memory from
// the first to the last element, but records only the elements of the layout; the
// kernel must not touch others.
//
// It records runs of adjacent elements by address, so that a
// transposed matrix is one run and costs as little as a dense one.
// matrix is one run, and so costs no more than a dense one.
func StridedOf[T any](k *KernelCall, p cudadrv.DevicePtr, width int, dims []Steps, write bool) []T {
	var zero T
	checkAligned[T](k, p)
	size := uint64(unsafe.Sizeof(zero))
	last := width
	for _, d := range dims {
		if d.N <= 0 {
			return nil
		}
		last += (d.N - 1) * d.Step
	}
	m := k.op.s.dev.m
	m.mu.Lock()
	defer m.mu.Unlock()
	b, _ := m.Find(p)
	run, outer := neighbours(width, dims)
	each(outer, 0, func(at int) {
		from := p + cudadrv.DevicePtr(uint64(at)*size)
		found, t := k.op.resolve(from, uint64(run)*size, write)
		if t == nil && found != b {
			t = &Trouble{cudadrv.ErrorIllegalAddress, fmt.Sprintf("%s on %v used %#x, which lies in %v and not in %v like the first element at %#x",
				k.op.Name, k.op.s, uint64(from), found, b, uint64(p))}
		}
		if t == nil {
			t = k.op.order(b, uint64(from)-b.addr, uint64(run)*size, write)
		}
		if t != nil {
			panic(t)
		}
	})
	return View[T](k.op.hold(b, uint64(p)-b.addr, uint64(last)*size))
}

// neighbours merges the dimensions with adjacent elements into one run. It
// returns the length of the run and the other dimensions, the largest step first.
func neighbours(width int, dims []Steps) (run int, outer []Steps) {
	dims = slices.Clone(dims)
	slices.SortFunc(dims, func(a, b Steps) int { return cmp.Compare(a.Step, b.Step) })
	run = width
	for _, d := range dims {
		switch {
		case d.N == 1:
		case d.Step <= run && len(outer) == 0:
			run += (d.N - 1) * d.Step
		default:
			outer = append(outer, d)
		}
	}
	slices.Reverse(outer)
	return run, outer
}

// each calls fn with the offset of each element of a layout.
func each(dims []Steps, at int, fn func(at int)) {
	if len(dims) == 0 {
		fn(at)
		return
	}
	for i := range dims[0].N {
		each(dims[1:], at+i*dims[0].Step, fn)
	}
}
