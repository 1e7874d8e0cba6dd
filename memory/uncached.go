package memory

import (
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/alloc"
)

// An uncached engine asks an Allocator for each block and keeps nothing that was
// freed.
type uncached struct {
	h *heap
	a Allocator

	mu    sync.Mutex
	loans map[uint64]*loan // by address
	asked int64            // bytes that the Allocator is being asked for
	stats Stats            // but for what only the Allocator knows
}

// absurd is a size that no device has, of which drivers say one thing or another.
const absurd = 1 << 60

// A loan is a block that somebody has.
type loan struct {
	l     *lane
	bytes int
	users []*lane // other streams that use it
}

// uncached makes an engine. The heap is locked, or new.
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

// find returns the loan that addr lies in, or nil. e.mu is held.
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
	e.h.use()
	if e.h.closed.Load() {
		return 0, e.explain(bytes, alloc.ErrClosed)
	}
	if !l.Retain() {
		return 0, e.explain(bytes, alloc.ErrEnded)
	}
	err = device.ErrorOutOfMemory
	if e.reserve(bytes) {
		addr, err = e.a.Alloc(l.s, bytes)
		err = e.enter(l, addr, bytes, err)
	}
	if err == nil {
		return addr, nil
	}
	_ = l.s.Release() // a stream that cannot be destroyed costs nobody anything
	if errors.Is(err, device.ErrorOutOfMemory) {
		e.mu.Lock()
		e.stats.OOMs++
		e.mu.Unlock()
	}
	return 0, e.explain(bytes, err)
}

// reserve says whether the process may have so many bytes more, and keeps them from
// other goroutines until enter.
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

// enter puts what the Allocator has given, if it has, into the books, in place of what
// was reserved.
func (e *uncached) enter(l *lane, addr uint64, bytes int, err error) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.asked -= int64(bytes)
	if err != nil {
		return err
	}
	if addr == 0 || e.loans[addr] != nil { // to give it back would take it from whoever has it
		return fmt.Errorf("the allocator gave the address %#x: want one that is not 0, of memory that it has not given out already", addr)
	}
	e.loans[addr] = &loan{l: l, bytes: bytes}
	e.count(1, int64(bytes))
	e.stats.DeviceAllocs++
	return nil
}

// explain is heap.explain with what the engine knows. An Allocator that explains
// itself has the word.
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

// Free gives a block back in the order of its stream, behind what is on the others
// that use it.
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
		errs = append(errs, x.l.s.Follow(u.s), u.s.Release())
	}
	return errors.Join(append(errs, e.a.Free(x.l.s, addr, x.bytes), x.l.s.Release())...)
}

// refuseCapture returns an error while a stream of the loan is captured: the free
// would be part of the graph.
func (x *loan) refuseCapture() error {
	const op, advice = "memory: free", "the graph may use the memory: free it when the graph is closed"
	for _, l := range append(x.users, x.l) {
		if err := l.s.RefuseCapture(op, advice); err != nil {
			return err
		}
	}
	return nil
}

// RecordStream tells that another stream uses a block.
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

// count adds blocks and their bytes, or takes them away.
func (e *uncached) count(blocks, bytes int64) {
	for _, p := range []*PoolStats{&e.stats.Allocation, &e.stats.Active} {
		p.All.add(blocks)
	}
	for _, p := range []*PoolStats{&e.stats.AllocatedBytes, &e.stats.ActiveBytes, &e.stats.RequestedBytes, &e.stats.ReservedBytes} {
		p.All.add(bytes)
	}
}

// use notes that something is allocated.
func (h *heap) use() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.used = true
}
