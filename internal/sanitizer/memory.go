package sanitizer

import (
	"cmp"
	"fmt"
	"slices"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// allocated adds a block.
func (t *tracker) allocated(b *block) {
	t.mu.Lock()
	defer t.mu.Unlock()
	b.since = t.tick()
	t.blocks.add(b)
}

// registered adds memory that its owner has locked, and had before.
func (t *tracker) registered(b *block) {
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

// free frees a block on the host, whose addresses the driver may give to
// another thread at once.
func (d driver) free(p uint64, name string, call func() cudadrv.Result) cudadrv.Result {
	d.t.mu.Lock()
	b := d.t.blocks.at(p)
	var all Clock
	if b != nil {
		b.freed, b.freedAt = name, Here()
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
	where := Here()
	t.report(incident{at: b.base + lo, op: name, stream: Host, where: where.String(), other: a.Op, against: a.Stream, earlier: a.Where.String()},
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
	ctx, where := d.t.contextFor(s), Here()
	d.t.mu.Lock()
	b, q := d.t.blocks.at(uint64(p)), d.t.queue(ctx, s)
	if q.capture != nil {
		b = nil
	}
	if b != nil {
		b.freed, b.freedAt = fmt.Sprintf("cuMemFreeAsync on %s", NameOf(s)), where
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
		by := Access{Slot: q.now.Slot, Epoch: q.now.Epoch, Op: "cuMemFreeAsync", Stream: s, Where: where}
		d.t.order(b, q, Conflict{By: by, Write: true, Hi: b.size})
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
		d.t.registered(&block{base: uint64(onHost(p)), size: uint64(n), kind: "page-locked host memory"})
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

// A block is an allocation of the driver, a reservation of addresses, or page-locked memory.
type block struct {
	base, size uint64
	ctx        cudadrv.Context // 0 for page-locked memory
	kind       string
	since      uint64 // when it was allocated; 0 for memory that its owner had before
	pool       bool   // of a memory pool: cuMemFree does not wait
	history    History
	pieces     *Pieces // allocated from it by an allocator, or nil
	freed      string  // the call that freed it, or ""
	freedAt    *Place
}

func (b *block) String() string {
	return fmt.Sprintf("the %s of %d bytes at %#x", b.kind, b.size, b.base)
}

// barred returns the reason why [lo, hi) must not be used, or "".
func (b *block) barred(lo, hi uint64) string {
	if b.freed != "" {
		return fmt.Sprintf("which lies in %v that was freed by %s (%v)", b, b.freed, b.freedAt)
	}
	return b.pieces.Barred(b, b.base, lo, hi)
}

// replaced returns the reason why an operation that a graph captured at a time must not use [lo, hi), although it is
// allocated, or "". The time is 0 for an operation that is no graph's.
func (b *block) replaced(at, lo, hi uint64) string {
	if at == 0 {
		return ""
	}
	if b.since > at {
		return Run{Hi: b.size}.Replaced(b, b.base)
	}
	if piece, found := b.pieces.AllocatedAfter(at, lo, hi); found {
		return piece.Replaced(b, b.base)
	}
	return ""
}

// blocks are sorted by address and do not overlap. A freed block stays until an allocation
// takes its addresses.
type blocks struct{ list []*block }

func (x *blocks) search(p uint64) (int, bool) {
	return slices.BinarySearchFunc(x.list, p, func(b *block, p uint64) int { return cmp.Compare(b.base, p) })
}

// find returns the block with the address, or nil.
func (x *blocks) find(p uint64) *block {
	i, found := x.search(p)
	if !found {
		i--
	}
	if i < 0 || p-x.list[i].base >= x.list[i].size {
		return nil
	}
	return x.list[i]
}

// at returns the unfreed block that begins at the address, or nil.
func (x *blocks) at(p uint64) *block {
	if i, found := x.search(p); found && x.list[i].freed == "" {
		return x.list[i]
	}
	return nil
}

// add adds a block in place of the blocks that had its addresses.
func (x *blocks) add(b *block) {
	first, found := x.search(b.base)
	if !found && first > 0 && x.list[first-1].base+x.list[first-1].size > b.base {
		first--
	}
	last := first
	for last < len(x.list) && x.list[last].base < b.base+b.size {
		last++
	}
	x.list = slices.Replace(x.list, first, last, b)
}

func (x *blocks) deleteOf(ctx cudadrv.Context) {
	x.list = slices.DeleteFunc(x.list, func(b *block) bool { return b.ctx == ctx })
}

func (d driver) MemAllocated(p cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	d.t.audit("MemAllocated", p, n, s, Run{State: Allocated}, Here())
	if a, ok := d.Driver.(cudadrv.Auditor); ok {
		return a.MemAllocated(p, n, s)
	}
	return cudadrv.Success
}

func (d driver) MemFreed(p cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	d.t.audit("MemFreed", p, n, s, Run{State: Freed, By: s}, Here())
	if a, ok := d.Driver.(cudadrv.Auditor); ok {
		return a.MemFreed(p, n, s)
	}
	return cudadrv.Success
}

func (d driver) MemShare(p cudadrv.DevicePtr, n uintptr, s cudadrv.Stream) cudadrv.Result {
	d.t.share(p, n)
	if a, ok := d.Driver.(cudadrv.Auditor); ok {
		return a.MemShare(p, n, s)
	}
	return cudadrv.Success
}

func (d driver) HostAllocated(p unsafe.Pointer, n uintptr) {
	if a, ok := d.Driver.(cudadrv.Auditor); ok {
		a.HostAllocated(p, n)
	}
}

// share records that accesses of a piece need no order.
func (t *tracker) share(p cudadrv.DevicePtr, n uintptr) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if b, lo, hi := t.piece(p, n); b != nil {
		b.pieces.Set(lo, hi, Run{State: Shared}, false)
	}
}

// piece returns the block of a piece and its range there, or nil. t.mu is held.
func (t *tracker) piece(p cudadrv.DevicePtr, n uintptr) (b *block, lo, hi uint64) {
	b = t.blocks.find(uint64(p))
	if b == nil || b.freed != "" {
		return nil, 0, 0
	}
	if b.pieces == nil {
		b.pieces = NewPieces(b.size)
	}
	lo = uint64(p) - b.base
	return b, lo, min(lo+uint64(n), b.size)
}

// audit records that an allocator has allocated or freed a piece: a write of its bytes. If the
// host has waited for everything on the stream, it has waited for the write too.
func (t *tracker) audit(name string, p cudadrv.DevicePtr, n uintptr, s cudadrv.Stream, to Run, where *Place) {
	t.mu.Lock()
	defer t.unlock()
	b, lo, hi := t.piece(p, n)
	if b == nil {
		return
	}
	q := t.queue(b.ctx, s)
	if q.capture != nil {
		b.pieces.Set(lo, hi, Run{State: Captured}, true)
		return
	}
	waited := t.host.Covers(q.now)
	t.perform(&node{act: func(q *queue) {
		by := Access{Slot: q.now.Slot, Epoch: q.now.Epoch, Op: name, Stream: s, Where: where}
		t.order(b, q, Conflict{By: by, Write: true, Lo: lo, Hi: hi})
	}}, []*queue{q})
	if waited {
		t.host = t.host.JoinStamp(q.now)
	}
	b.pieces.Audited = true
	if to.State == Allocated {
		to.Since = t.tick()
	}
	b.pieces.Set(lo, hi, to, false)
}
