package virtual

import (
	"fmt"

	"github.com/gochorus/chorus/internal/cudadrv"
)

var _ cudadrv.Auditor = driver{}

// MemLend poisons the piece.
func (d driver) MemLend(p cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.audit("MemLend", p, bytes, s, (*op).lend)
}

func (d driver) MemReturn(p cudadrv.DevicePtr, bytes uintptr, s cudadrv.Stream) cudadrv.Result {
	return d.audit("MemReturn", p, bytes, s, (*op).takeBack)
}

// audit lets the stream carry a call out, at once where nothing is before it: these
// calls are as frequent as an allocator's, and each goroutine that did nothing else
// would cost more than they do.
func (d driver) audit(name string, p cudadrv.DevicePtr, bytes uintptr, h cudadrv.Stream,
	do func(*op, *block, uint64, uint64) *trouble) cudadrv.Result {
	m, n := d.m, uint64(bytes)
	m.mu.Lock()
	defer m.mu.Unlock()
	b, _ := m.find(p)
	if b == nil || b.dev == nil || b.freeing || n == 0 || n > b.size-(uint64(p)-b.addr) {
		return cudadrv.ErrorInvalidValue
	}
	s, r := m.stream(b.dev, h)
	if r == cudadrv.Success {
		r = s.dev.status
	}
	if r != cudadrv.Success {
		return r
	}
	if b.pieces == nil {
		b.pieces = newPieces(b.size)
	}
	offset := uint64(p) - b.addr
	if s.capture != nil {
		b.pieces.set(offset, offset+n, run{state: captured}, true)
		return cudadrv.Success
	}
	carryOut := func(o *op) {
		if b.freedBy != "" {
			return
		}
		if t := do(o, b, offset, n); t != nil {
			o.lose(t)
		}
	}
	if s.idle() {
		s.step(name, carryOut)
		return s.dev.status
	}
	s.enqueue(name, func(o *op) {
		m.mu.Lock()
		defer m.mu.Unlock()
		carryOut(o)
	})
	return cudadrv.Success
}

// step carries an operation out while the stream is idle. When the host has waited
// for all that was before it, it has seen this one too. m.mu is held.
func (s *stream) step(name string, do func(*op)) {
	m := s.dev.m
	waited := m.host.at(s.now.slot) >= s.now.epoch
	s.now.seen = s.now.seen.join(m.host)
	s.now.epoch++
	do(&op{name: name, s: s, host: m.host})
	if waited {
		m.host = m.host.joinStamp(s.now)
	}
}

// lend makes a piece a user's.
func (o *op) lend(b *block, offset, n uint64) *trouble {
	if t := o.order(b, offset, n, true); t != nil {
		return t
	}
	if b.space != nil {
		if at := b.space.covered(offset, n); at < n {
			return o.blame("gave out %d bytes at %#x of %v, of which nothing is mapped from byte %d on", n, b.addr+offset, b, at)
		}
	}
	if part, found := b.pieces.seek(offset, offset+n, func(s state) bool { return s == lent }); found {
		return o.blame("gave out %d bytes at %#x of %v, of which those at %#x are given out and were not returned",
			n, b.addr+offset, b, b.addr+max(part.lo, offset))
	}
	b.pieces.audited = true
	if _, found := b.pieces.seek(offset, offset+n, func(s state) bool { return s == captured }); !found {
		b.stain(offset, n)
	}
	b.pieces.set(offset, offset+n, run{state: lent}, false)
	return nil
}

// takeBack makes a piece nobody's. The write that it counts as joins the history of
// its bytes into one span.
func (o *op) takeBack(b *block, offset, n uint64) *trouble {
	if t := o.order(b, offset, n, true); t != nil {
		return t
	}
	if part, found := b.pieces.seek(offset, offset+1, func(s state) bool { return !s.usable() }); found && b.pieces.audited {
		return o.blame("returned %d bytes at %#x of %v, %s", n, b.addr+offset, b, b.pieces.says(b, part))
	}
	b.pieces.audited = true
	b.pieces.set(offset, offset+n, run{state: returned, by: o.s.handle}, false)
	return nil
}

// blame says what the allocator did wrong.
func (o *op) blame(format string, args ...any) *trouble {
	text := fmt.Sprintf("%s on %v ", o.name, o.s) + fmt.Sprintf(format, args...)
	return &trouble{cudadrv.ErrorIllegalAddress, text}
}

// stain poisons a part of the block anew.
func (b *block) stain(offset, n uint64) {
	if b.space != nil {
		b.space.stain(b, offset, n)
		return
	}
	b.clean.stain(b.data, offset, n)
}

// covered returns how many of n bytes, from the first on, have memory mapped.
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

// barred says why nothing may use a part of the block, or "".
func (p *pieces) barred(b *block, offset, n uint64) string {
	if p == nil || !p.audited {
		return ""
	}
	part, found := p.seek(offset, offset+n, func(s state) bool { return !s.usable() })
	if !found {
		return ""
	}
	return p.says(b, part)
}

// says explains a part that is nobody's.
func (p *pieces) says(b *block, part run) string {
	if part.state == never {
		return fmt.Sprintf("which touches bytes from %#x on of %v, which the allocator has not given out", b.addr+part.lo, b)
	}
	part = p.whole(part)
	return fmt.Sprintf("which lies in %d bytes at %#x of %v that were freed by MemReturn on stream %#x",
		part.hi-part.lo, b.addr+part.lo, b, uintptr(part.by))
}
