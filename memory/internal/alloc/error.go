package alloc

import (
	"errors"
	"fmt"
)

// ErrClosed is the error of an allocation from a pool that was closed.
var ErrClosed = errors.New("the memory pool was closed")

// ErrEnded is the error of an allocation on a destroyed stream.
var ErrEnded = errors.New("the stream was destroyed meanwhile")

// A NoMemoryError reports that every step of the ladder failed. It matches ErrNoMemory.
type NoMemoryError struct {
	Requested uint64 // bytes
	Wanted    uint64 // bytes requested from the driver; 0 if no device has as much
	Allocated uint64 // bytes in use
	Private   uint64 // the part of Allocated in pools other than the default pool
	PoolFree  uint64 // bytes that pools other than the default pool have reserved and not allocated
	Reserved  uint64 // bytes reserved from the driver
	Largest   uint64 // bytes of the largest free block of the stream
	Limit     uint64 // limit of Reserved, or 0
}

func (e *NoMemoryError) Error() string {
	return fmt.Sprintf("%d bytes wanted, %d allocated, %d reserved: %v", e.Requested, e.Allocated, e.Reserved, ErrNoMemory)
}

// Unwrap returns ErrNoMemory.
func (e *NoMemoryError) Unwrap() error { return ErrNoMemory }

// noMemory makes the error with the current sizes. growth is held.
func (a *Arena) noMemory(s *Settings, k kind, size uint64) *NoMemoryError {
	d := a.device
	e := &NoMemoryError{Requested: size, Wanted: s.segment(size), Reserved: d.reserved}
	if limit, limited := d.limit(); limited {
		e.Limit = limit
	}
	domains := d.lockAll()
	defer unlock(domains)
	free := func(dom *domain) uint64 {
		return uint64(dom.meter.r[ReservedBytes][both].now - dom.meter.r[AllocatedBytes][both].now)
	}
	for _, dom := range domains {
		e.PoolFree += free(dom)
		e.Allocated += uint64(dom.meter.r[AllocatedBytes][both].now)
		e.Private += uint64(dom.meter.r[AllocatedBytes][both].now)
	}
	for _, o := range d.def.arenas {
		e.PoolFree -= free(o.domain)
		e.Private -= uint64(o.domain.meter.r[AllocatedBytes][both].now)
	}
	e.Largest = a.shelves[k].largest()
	if a.pool.base != nil {
		e.Largest = max(e.Largest, a.pool.base.shelves[k].largest())
	}
	return e
}

// A SourceError reports an invalid address that a Source has returned.
type SourceError struct{ Addr, Bytes uint64 }

func (e *SourceError) Error() string {
	return fmt.Sprintf("the allocator gave %d bytes at %#x: want an address from %#x to %#x that is a multiple of %d, and memory that it has not given out already",
		e.Bytes, e.Addr, unit, addressEnd-e.Bytes, unit)
}

// A PointerError reports an address that is not the start of an allocated block.
type PointerError struct {
	Addr   uint64
	Within uint64 // start of the block that contains Addr, or 0
	Size   uint64 // of that block
	Used   bool   // that block is allocated
	Stack  *Stack // stack of its last allocation, if recorded
	Freed  *Stack // stack of its last free
}

func (e *PointerError) Error() string {
	switch {
	case e.Within == 0:
		return fmt.Sprintf("%#x is not memory of this allocator: it was never allocated here, or was freed and went back to the driver", e.Addr)
	case e.Used:
		return fmt.Sprintf("%#x lies in the block of %d bytes at %#x and is not its beginning", e.Addr, e.Size, e.Within)
	}
	return fmt.Sprintf("%#x was freed before: it lies in a free block of %d bytes at %#x", e.Addr, e.Size, e.Within)
}

// foreign explains why an address cannot be freed or used.
func (d *Device) foreign(addr uint64) error {
	err := &PointerError{Addr: addr}
	if s := d.table.segment(addr); s != nil {
		s.domain.lock()
		b := s.holding(addr)
		err.Within, err.Size, err.Used, err.Stack = b.addr(), b.size(), b.slot().has(isUsed), b.stack()
		s.domain.mu.Unlock()
	}
	if h := d.history.Load(); h != nil {
		alloc, freed := h.last(addr)
		if err.Stack == nil {
			err.Stack = alloc
		}
		err.Freed = freed
	}
	return err
}
