package virtual

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// A hostRange is the host side of a copy. In page-locked memory the bytes are
// looked up when the copy runs; other memory was staged, or is waited for.
type hostRange struct {
	bytes  []byte // of other memory
	block  *block // of page-locked memory
	offset uint64
	n      uint64
}

func (m *Machine) hostRange(p unsafe.Pointer, n uintptr) (hostRange, cudadrv.Result) {
	addr := uint64(uintptr(p))
	if b := lookup(m.pinned, addr); b.contains(addr) {
		h := hostRange{block: b, offset: addr - b.addr, n: uint64(n)}
		if h.n > b.size-h.offset {
			return h, cudadrv.ErrorInvalidValue
		}
		return h, cudadrv.Success
	}
	if p == nil && n > 0 || addr >= addressBase {
		return hostRange{}, cudadrv.ErrorInvalidValue
	}
	return hostRange{bytes: unsafe.Slice((*byte)(p), n), n: uint64(n)}, cudadrv.Success
}

// touch returns the host bytes for the running operation. m.mu is held.
func (h hostRange) touch(o *op, write bool) ([]byte, *trouble) {
	if h.block == nil || h.n == 0 {
		return h.bytes, nil
	}
	if h.block.freedBy != "" {
		return nil, &trouble{cudadrv.ErrorIllegalAddress, fmt.Sprintf(
			"%s on %v used %v, which the host freed with %s before the copy ran", o.name, o.s, h.block, h.block.freedBy)}
	}
	return o.use(h.block, h.offset, h.n, write)
}

// move copies between what the two functions return, of which the first is
// called for the destination.
func (o *op) move(dst, src func() ([]byte, *trouble)) {
	m := o.s.dev.m
	m.mu.Lock()
	from, t := src()
	var to []byte
	if t == nil {
		to, t = dst()
	}
	m.mu.Unlock()
	if t != nil {
		o.fail(t)
		return
	}
	copy(to, from)
}

func (d driver) MemcpyHtoDAsync(dst cudadrv.DevicePtr, src unsafe.Pointer, bytes uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemcpyHtoDAsync", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	from, r := d.m.hostRange(src, bytes)
	if r != cudadrv.Success {
		return r
	}
	if from.block == nil && s.capture != nil {
		return s.refused() // a replay would find other bytes there
	}
	if from.block == nil {
		from.bytes = append([]byte(nil), from.bytes...)
	}
	c.enqueue(s, func(o *op) {
		o.move(func() ([]byte, *trouble) { return o.touch(dst, uint64(bytes), true) },
			func() ([]byte, *trouble) { return from.touch(o, false) })
	})
	return cudadrv.Success
}

func (d driver) MemcpyDtoHAsync(dst unsafe.Pointer, src cudadrv.DevicePtr, bytes uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemcpyDtoHAsync", h)
	if r != cudadrv.Success {
		return r
	}
	to, r := d.m.hostRange(dst, bytes)
	if r != cudadrv.Success {
		c.end()
		return r
	}
	if to.block == nil && s.capture != nil {
		defer c.end()
		return s.refused()
	}
	c.enqueue(s, func(o *op) {
		o.move(func() ([]byte, *trouble) { return to.touch(o, true) },
			func() ([]byte, *trouble) { return o.touch(src, uint64(bytes), false) })
	})
	if to.block != nil {
		c.end()
		return cudadrv.Success
	}
	// CUDA returns from a copy to pageable memory when it is done.
	k := s.mark()
	c.end()
	return d.m.await(s.dev, k)
}

func (d driver) MemcpyDtoDAsync(dst, src cudadrv.DevicePtr, bytes uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemcpyDtoDAsync", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	c.copyDevice(s, dst, src, bytes)
	return cudadrv.Success
}

func (d driver) MemcpyPeerAsync(dst cudadrv.DevicePtr, dstCtx cudadrv.Context, src cudadrv.DevicePtr, srcCtx cudadrv.Context, bytes uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemcpyPeerAsync", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	if s.capture != nil {
		return s.refused() // a copy in one address space, cuMemcpyDtoDAsync, can be captured
	}
	to, from := d.m.deviceOf(dstCtx), d.m.deviceOf(srcCtx)
	if to == nil || from == nil || to.retained == 0 || from.retained == 0 {
		return cudadrv.ErrorInvalidContext
	}
	if bytes > 0 && (!d.m.lies(dst, to) || !d.m.lies(src, from)) {
		return cudadrv.ErrorInvalidValue
	}
	c.copyDevice(s, dst, src, bytes)
	return cudadrv.Success
}

// lies reports whether p may be an address of the device. m.mu is held.
func (m *Machine) lies(p cudadrv.DevicePtr, dev *device) bool {
	b, _ := m.find(p)
	return b == nil || b.dev == nil || b.owner(p) == dev
}

func (c *call) copyDevice(s *stream, dst, src cudadrv.DevicePtr, bytes uintptr) {
	zero := c.zero && c.m.crosses(dst, src)
	c.enqueue(s, func(o *op) { o.moveDevice(dst, src, uint64(bytes), zero) })
}

// moveDevice copies between device memory, or brings zeros.
func (o *op) moveDevice(dst, src cudadrv.DevicePtr, bytes uint64, zero bool) {
	o.move(func() ([]byte, *trouble) { return o.touch(dst, bytes, true) },
		func() ([]byte, *trouble) {
			b, t := o.touch(src, bytes, false)
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
	zero := c.zero && c.m.crosses(x.Dst, x.Src)
	c.enqueue(s, func(o *op) {
		for row := range x.Height {
			o.moveDevice(x.Dst+cudadrv.DevicePtr(row*x.DstPitch), x.Src+cudadrv.DevicePtr(row*x.SrcPitch), uint64(x.WidthInBytes), zero)
		}
	})
	return cudadrv.Success
}

// crosses reports whether the addresses are of two devices. m.mu is held.
func (m *Machine) crosses(p, q cudadrv.DevicePtr) bool {
	a, _ := m.find(p)
	b, _ := m.find(q)
	return a != nil && b != nil && a.owner(p) != b.owner(q)
}

func (d driver) MemsetD8Async(dst cudadrv.DevicePtr, value uint8, count uintptr, h cudadrv.Stream) cudadrv.Result {
	c, s, r := d.beginStream("cuMemsetD8Async", h)
	if r != cudadrv.Success {
		return r
	}
	defer c.end()
	c.enqueue(s, func(o *op) {
		d.m.mu.Lock()
		to, t := o.touch(dst, uint64(count), true)
		d.m.mu.Unlock()
		if t != nil {
			o.fail(t)
			return
		}
		fill(to, value)
	})
	return cudadrv.Success
}

func fill(p []byte, value byte) {
	if len(p) == 0 {
		return
	}
	p[0] = value
	for n := 1; n < len(p); n *= 2 {
		copy(p[n:], p[:n])
	}
}
