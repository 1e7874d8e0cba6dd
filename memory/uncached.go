package memory

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

// An uncached engine calls an Allocator for each block and does not cache freed memory.
type uncached struct {
	h *heap
	a Allocator

	mu    sync.Mutex
	loans map[uint64]*loan // by address
	asked int64            // bytes of allocations in progress
	stats Stats            // except the values that only the Allocator knows
}

// absurd is a size that no device has. Drivers report different errors for such sizes.
const absurd = 1 << 60

// A loan is an allocated block.
type loan struct {
	l     *lane
	bytes int
	users []*lane // other streams that use the block
}

// uncached makes an engine. The heap is locked, or not shared yet.
func (h *heap) uncached(a Allocator) *uncached {
	e := &uncached{h: h, a: a, loans: map[uint64]*loan{}}
	h.engines = append(h.engines, e)
	return e
}

func (e *uncached) has(addr uint64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.find(addr) != nil
}

// find returns the loan that contains addr, or nil. e.mu is held.
func (e *uncached) find(addr uint64) *loan {
	if x := e.loans[addr]; x != nil {
		return x
	}
	for base, x := range e.loans {
		if addr-base < uint64(x.bytes) {
			return x
		}
	}
	return nil
}

func (e *uncached) alloc(l *lane, bytes int) (addr uint64, err error) {
	e.h.markUsed()
	if e.h.closed.Load() {
		return 0, e.explain(bytes, alloc.ErrClosed)
	}
	if !l.Retain() {
		return 0, e.explain(bytes, alloc.ErrEnded)
	}
	err = device.ErrorOutOfMemory
	if e.reserve(bytes) {
		addr, err = e.a.Alloc(l.s, bytes)
		err = e.addLoan(l, addr, bytes, err)
	}
	if err == nil {
		return addr, nil
	}
	_ = gpu.StreamOf(l.s).Release() // a stream that cannot be destroyed does no harm
	if errors.Is(err, device.ErrorOutOfMemory) {
		e.mu.Lock()
		e.stats.OOMs++
		e.mu.Unlock()
	}
	return 0, e.explain(bytes, err)
}

// reserve reports whether the process may allocate the bytes, and reserves them until
// enter is called.
func (e *uncached) reserve(bytes int) bool {
	if bytes >= absurd {
		return false
	}
	f := e.h.native.Fraction()
	e.mu.Lock()
	defer e.mu.Unlock()
	if has := e.stats.AllocatedBytes.All.Current + e.asked; f < 1 && has+int64(bytes) > int64(f*float64(e.h.total)) {
		return false
	}
	e.asked += int64(bytes)
	return true
}

// addLoan replaces a reservation by the block that the Allocator has returned, if it
// succeeded.
func (e *uncached) addLoan(l *lane, addr uint64, bytes int, err error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked -= int64(bytes)
	if err != nil {
		return err
	}
	if addr == 0 || e.loans[addr] != nil { // freeing it would free the memory of its other user
		return fmt.Errorf("the allocator gave the address %#x: want one that is not 0, of memory that it has not given out already", addr)
	}
	e.loans[addr] = &loan{l: l, bytes: bytes}
	e.count(1, int64(bytes))
	e.stats.DeviceAllocs++
	return nil
}

// explain is heap.explain with the engine's statistics. An *OutOfMemoryError of the
// Allocator itself is returned unchanged.
func (e *uncached) explain(bytes int, err error) error {
	if !errors.Is(err, device.ErrorOutOfMemory) {
		return e.h.explain(bytes, err)
	}
	if _, ok := errors.AsType[*OutOfMemoryError](err); ok {
		return err
	}
	x := outOfMemory(e.h.dev, uintptr(bytes), err).(*OutOfMemoryError)
	if bytes >= absurd {
		x.Wanted = 0
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	x.Allocated, x.Reserved, x.Fraction = uint64(e.stats.AllocatedBytes.All.Current), uint64(e.stats.AllocatedBytes.All.Current), e.h.native.Fraction()
	return x
}

// Free frees a block in the order of its stream, after the operations on the other
// streams that use it.
func (e *uncached) Free(addr uint64) error {
	e.mu.Lock()
	x := e.loans[addr]
	if x == nil {
		e.mu.Unlock()
		return &alloc.PointerError{Addr: addr}
	}
	if err := x.refuseCapture(); err != nil {
		e.mu.Unlock()
		return err
	}
	delete(e.loans, addr)
	e.count(-1, -int64(x.bytes))
	e.stats.DeviceFrees++
	e.mu.Unlock()
	var errs []error
	for _, u := range x.users {
		errs = append(errs, gpu.StreamOf(x.l.s).Follow(gpu.StreamOf(u.s)), gpu.StreamOf(u.s).Release())
	}
	return errors.Join(append(errs, e.a.Free(x.l.s, addr, x.bytes), gpu.StreamOf(x.l.s).Release())...)
}

// refuseCapture returns an error while a stream of the loan is captured: the free would
// become part of the graph.
func (x *loan) refuseCapture() error {
	const op, advice = "memory: free", "the graph may use the memory: free it when the graph is closed"
	for _, l := range append(x.users, x.l) {
		if err := gpu.StreamOf(l.s).RefuseCapture(op, advice); err != nil {
			return err
		}
	}
	return nil
}

// RecordStream records that another stream uses a block.
func (e *uncached) RecordStream(addr uint64, s alloc.Stream) error {
	l := s.(*lane)
	e.mu.Lock()
	defer e.mu.Unlock()
	x := e.find(addr)
	if x == nil {
		return &alloc.PointerError{Addr: addr}
	}
	if x.l != l && !slices.Contains(x.users, l) {
		if !l.Retain() {
			return alloc.ErrEnded
		}
		x.users = append(x.users, l)
	}
	return nil
}

// count adds blocks and their bytes, or subtracts them.
func (e *uncached) count(blocks, bytes int64) {
	for _, p := range []*PoolStats{&e.stats.Allocation, &e.stats.Active} {
		p.All.add(blocks)
	}
	for _, p := range []*PoolStats{&e.stats.AllocatedBytes, &e.stats.ActiveBytes, &e.stats.RequestedBytes, &e.stats.ReservedBytes} {
		p.All.add(bytes)
	}
}

// markUsed records that memory was allocated.
func (h *heap) markUsed() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.used = true
}
