package machine

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/sanitizer"
)

var _ cudadrv.Auditor = driver{}

// MemAllocated marks the piece as allocated and poisons it.
func (d driver) MemAllocated(p cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.audit("MemAllocated", p, bytes, s, (*Op).markAllocated)
}

func (d driver) MemFreed(p cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.audit("MemFreed", p, bytes, s, (*Op).markFreed)
}

func (d driver) MemShare(p cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.audit("MemShare", p, bytes, s, func(_ *Op, b *Block, offset, n uint64) *Trouble {
		b.pieces.Set(offset, offset+n, sanitizer.Run{State: sanitizer.Shared}, false)
		return nil
	})
}

// HostAllocated records when the owner of a piece has changed.
func (d driver) HostAllocated(p unsafe.Pointer, bytes uintptr) {
	m, addr := d.m, uint64(uintptr(p))
	m.mu.Lock()
	defer m.mu.Unlock()
	b := lookup(m.pinned, addr)
	if !b.contains(addr) {
		return
	}
	if b.pieces == nil {
		b.pieces = sanitizer.NewPieces(b.size)
	}
	lo := addr - b.addr
	b.pieces.Set(lo, min(lo+uint64(bytes), b.size), sanitizer.Run{State: sanitizer.Allocated, Since: m.tick()}, true)
}

// audit enqueues a call, or runs it immediately if the stream is idle. These
// calls are as frequent as calls of an allocator, and a goroutine for each one
// would cost more than the call.
func (d driver) audit(name string, p cudadrv.DevicePtr, bytes uintptr, h cudadrv.Stream,
	do func(*Op, *Block, uint64, uint64) *Trouble) cudadrv.Result {
	m, n := d.m, uint64(bytes)
	m.mu.Lock()
	defer m.mu.Unlock()
	b, _ := m.Find(p)
	if b == nil || b.dev == nil || b.freeing || n == 0 || n > b.size-(uint64(p)-b.addr) {
		return cudadrv.ErrorInvalidValue
	}
	s, r := m.Stream(b.dev, h)
	if r == cudadrv.Success {
		r = s.dev.status
	}
	if r != cudadrv.Success {
		return r
	}
	if b.pieces == nil {
		b.pieces = sanitizer.NewPieces(b.size)
	}
	offset, at := uint64(p)-b.addr, m.tick()
	if s.capture != nil {
		b.pieces.Set(offset, offset+n, sanitizer.Run{State: sanitizer.Captured}, true)
		return cudadrv.Success
	}
	s.carryOut(name, func(o *Op) {
		if b.freedBy != "" {
			return
		}
		o.audited = at
		if t := do(o, b, offset, n); t != nil {
			o.Lose(t)
		}
	})
	return s.dev.status
}

// carryOut runs an operation: at once if the stream is idle. The operation runs with m.mu
// held, which is held now.
func (s *Stream) carryOut(name string, do func(*Op)) {
	if s.Idle() {
		s.step(name, do)
		return
	}
	m := s.dev.m
	s.Enqueue(name, func(o *Op) {
		m.mu.Lock()
		defer m.mu.Unlock()
		do(o)
	})
}

// step runs an operation while the stream is idle. If the host has waited for all
// earlier operations, it has waited for this one too. m.mu is held.
func (s *Stream) step(name string, do func(*Op)) {
	m := s.dev.m
	waited := m.host.Covers(s.now)
	s.now.Seen = s.now.Seen.Join(m.host)
	s.now.Epoch++
	do(&Op{Name: name, s: s, host: m.host})
	if waited {
		m.host = m.host.JoinStamp(s.now)
	}
}

// markAllocated marks a piece as allocated.
func (o *Op) markAllocated(b *Block, offset, n uint64) *Trouble {
	if t := o.order(b, offset, n, true); t != nil {
		return t
	}
	if b.space != nil {
		if at := b.space.covered(offset, n); at < n {
			return o.blame("allocated %d bytes at %#x of %v, but nothing is mapped from byte %d on", n, b.addr+offset, b, at)
		}
	}
	if part, found := b.pieces.Seek(offset, offset+n, func(s sanitizer.State) bool { return s == sanitizer.Allocated }); found {
		return o.blame("allocated %d bytes at %#x of %v, but the bytes at %#x are already allocated",
			n, b.addr+offset, b, b.addr+max(part.Lo, offset))
	}
	b.pieces.Audited = true
	if _, found := b.pieces.Seek(offset, offset+n, func(s sanitizer.State) bool { return s == sanitizer.Captured }); !found {
		b.stain(offset, n)
	}
	b.pieces.Set(offset, offset+n, sanitizer.Run{State: sanitizer.Allocated, Since: o.audited}, false)
	return nil
}

// markFreed marks a piece as free and counts as a write, which merges the
// history of the bytes into one span.
func (o *Op) markFreed(b *Block, offset, n uint64) *Trouble {
	if t := o.order(b, offset, n, true); t != nil {
		return t
	}
	if part, found := b.pieces.Seek(offset, offset+1, func(s sanitizer.State) bool { return !s.Usable() }); found && b.pieces.Audited {
		return o.blame("freed %d bytes at %#x of %v, %s", n, b.addr+offset, b, b.pieces.Says(b, b.addr, part))
	}
	b.pieces.Audited = true
	b.pieces.Set(offset, offset+n, sanitizer.Run{State: sanitizer.Freed, By: o.s.handle}, false)
	return nil
}

// blame reports a mistake of the allocator.
func (o *Op) blame(format string, args ...any) *Trouble {
	text := fmt.Sprintf("%s on %v ", o.Name, o.s) + fmt.Sprintf(format, args...)
	return &Trouble{cudadrv.ErrorIllegalAddress, text}
}

// stain poisons a part of the block again.
func (b *Block) stain(offset, n uint64) {
	if b.space != nil {
		b.space.stain(b, offset, n)
		return
	}
	b.clean.stain(b.data, offset, n)
}

// covered returns the number of bytes at the start of [offset, offset+n) that have mapped memory.
func (s *space) covered(offset, n uint64) uint64 {
	at := offset
	for _, x := range s.within(offset, n) {
		if x.lo > at {
			break
		}
		at = min(x.hi, offset+n)
	}
	return at - offset
}
