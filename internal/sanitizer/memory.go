package sanitizer

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/race"
)

// allocated adds a block.
func (t *tracker) allocated(b *block) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.blocks.add(b)
}

func (d driver) MemAlloc(n uintptr) (cudadrv.DevicePtr, cudadrv.Result) {
	ctx := d.t.current()
	p, r := d.Driver.MemAlloc(n)
	if r == cudadrv.Success {
		d.t.allocated(&block{base: uint64(p), size: uint64(n), ctx: ctx, kind: "block"})
	}
	return p, r
}

// MemFree waits for the whole device, except for memory of a pool.
func (d driver) MemFree(p cudadrv.DevicePtr) cudadrv.Result {
	return d.free(uint64(p), "cuMemFree", func() cudadrv.Result { return d.Driver.MemFree(p) })
}

// free frees a block on the host. The driver may give its addresses to another thread at once.
func (d driver) free(p uint64, name string, call func() cudadrv.Result) cudadrv.Result {
	d.t.mu.Lock()
	b := d.t.blocks.at(p)
	var all race.Clock
	if b != nil {
		b.freed, b.freedAt = name, race.Here()
		all = d.t.device(b.ctx)
	}
	d.t.mu.Unlock()
	r := call()
	if b == nil {
		return r
	}
	d.t.mu.Lock()
	defer d.t.unlock()
	switch {
	case r != cudadrv.Success:
		b.freed, b.freedAt = "", nil
	case b.ctx != 0 && !b.pool:
		d.t.host = d.t.host.Join(all)
	default:
		d.t.unfinished(b, 0, b.size, name)
	}
	return r
}

// unfinished reports memory that the host releases although an operation may still use it.
func (t *tracker) unfinished(b *block, lo, hi uint64, name string) {
	a, found := b.history.UnfinishedIn(t.host, lo, hi)
	if !found {
		return
	}
	where := race.Here()
	t.report(incident{at: b.base + lo, op: name, stream: race.Host, where: where.String(), other: a.Op, against: a.Stream, earlier: a.Where.String()},
		fmt.Sprintf("race: the host freed %v with %s (%v), but has not waited for %v: let the host wait for the stream first", b, name, where, a))
}

func (d driver) MemAllocAsync(n uintptr, s cudadrv.Stream) (cudadrv.DevicePtr, cudadrv.Result) {
	ctx := d.t.contextFor(s)
	p, r := d.Driver.MemAllocAsync(n, s)
	return d.allocatedAsync(p, r, "cuMemAllocAsync", n, ctx, s)
}

// allocatedAsync adds memory that exists from this point of the stream on.
func (d driver) allocatedAsync(p cudadrv.DevicePtr, r cudadrv.Result, name string, n uintptr, ctx cudadrv.Context, s cudadrv.Stream) (cudadrv.DevicePtr, cudadrv.Result) {
	if r != cudadrv.Success {
		return p, r
	}
	d.t.mu.Lock()
	captured := d.t.queue(ctx, s).capture != nil
	d.t.mu.Unlock()
	if captured { // a graph allocates and frees it at each launch
		return p, r
	}
	d.t.allocated(&block{base: uint64(p), size: uint64(n), ctx: ctx, kind: "block", pool: true})
	return p, d.enqueued(r, name, ctx, s, write(p, n))
}

// MemFreeAsync is a write of the block, and no later operation may use it.
func (d driver) MemFreeAsync(p cudadrv.DevicePtr, s cudadrv.Stream) cudadrv.Result {
	ctx, where := d.t.contextFor(s), race.Here()
	d.t.mu.Lock()
	b, q := d.t.blocks.at(uint64(p)), d.t.queue(ctx, s)
	if q.capture != nil {
		b = nil
	}
	if b != nil {
		b.freed, b.freedAt = fmt.Sprintf("cuMemFreeAsync on %s", race.NameOf(s)), where
	}
	d.t.mu.Unlock()
	r := d.Driver.MemFreeAsync(p, s)
	if b == nil {
		return r
	}
	d.t.mu.Lock()
	defer d.t.unlock()
	if r != cudadrv.Success {
		b.freed, b.freedAt = "", nil
		return r
	}
	d.t.perform(&node{act: func(q *queue) {
		by := race.Access{Slot: q.now.Slot, Epoch: q.now.Epoch, Op: "cuMemFreeAsync", Stream: s, Where: where}
		d.t.order(b, q, race.Conflict{By: by, Write: true, Hi: b.size})
	}}, []*queue{q})
	return r
}

func (d driver) MemAddressReserve(n, alignment uintptr, hint cudadrv.DevicePtr) (cudadrv.DevicePtr, cudadrv.Result) {
	ctx := d.t.current()
	p, r := d.Driver.MemAddressReserve(n, alignment, hint)
	if r == cudadrv.Success {
		d.t.allocated(&block{base: uint64(p), size: uint64(n), ctx: ctx, kind: "reservation"})
	}
	return p, r
}

func (d driver) MemAddressFree(p cudadrv.DevicePtr, n uintptr) cudadrv.Result {
	return d.free(uint64(p), "cuMemAddressFree", func() cudadrv.Result { return d.Driver.MemAddressFree(p, n) })
}

// MemUnmap does not wait for uses of the memory.
func (d driver) MemUnmap(p cudadrv.DevicePtr, n uintptr) cudadrv.Result {
	r := d.Driver.MemUnmap(p, n)
	d.t.mu.Lock()
	defer d.t.unlock()
	if b := d.t.blocks.find(uint64(p)); r == cudadrv.Success && b != nil {
		d.t.unfinished(b, uint64(p)-b.base, uint64(p)-b.base+uint64(n), "cuMemUnmap")
	}
	return r
}

func (d driver) MemHostAlloc(n uintptr, flags uint32) (unsafe.Pointer, cudadrv.Result) {
	p, r := d.Driver.MemHostAlloc(n, flags)
	if r == cudadrv.Success {
		d.t.allocated(&block{base: uint64(onHost(p)), size: uint64(n), kind: "page-locked host memory"})
	}
	return p, r
}

func (d driver) MemFreeHost(p unsafe.Pointer) cudadrv.Result {
	return d.free(uint64(onHost(p)), "cuMemFreeHost", func() cudadrv.Result { return d.Driver.MemFreeHost(p) })
}

func (d driver) MemHostRegister(p unsafe.Pointer, n uintptr, flags uint32) cudadrv.Result {
	r := d.Driver.MemHostRegister(p, n, flags)
	if r == cudadrv.Success {
		d.t.allocated(&block{base: uint64(onHost(p)), size: uint64(n), kind: "page-locked host memory"})
	}
	return r
}

// MemHostUnregister leaves the memory to its owner, so that later uses are not of freed memory.
func (d driver) MemHostUnregister(p unsafe.Pointer) cudadrv.Result {
	r := d.free(uint64(onHost(p)), "cuMemHostUnregister", func() cudadrv.Result { return d.Driver.MemHostUnregister(p) })
	d.t.mu.Lock()
	defer d.t.mu.Unlock()
	if i, found := d.t.blocks.search(uint64(onHost(p))); found && r == cudadrv.Success && d.t.blocks.list[i].freed != "" {
		d.t.blocks.list = append(d.t.blocks.list[:i], d.t.blocks.list[i+1:]...)
	}
	return r
}
