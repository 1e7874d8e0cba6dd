package alloc

// A segment is memory of a Source, divided into blocks that lie side by side; or,
// if it is expandable, a range of addresses, parts of which have memory.
type segment struct {
	addr   uint64
	size   uint64
	kind   kind
	home   *Arena // for which it was made; all its blocks are of arenas of home's domain
	domain *domain
	first  *block
	span   *span // of an expandable segment
	stack  *Stack
}

// keyBits is room for the units of a segment in a block's key: 2 TiB.
const keyBits = 32

func newSegment(a *Arena, k kind, addr, size, serial uint64) *segment {
	s := &segment{addr: addr, size: size, kind: k, home: a, domain: a.domain}
	b := a.blank()
	b.addr, b.size, b.key = addr, size, firstKey(k, serial)
	b.segment, b.arena = s, a
	s.first = b
	return s
}

func (s *segment) has(addr uint64) bool { return addr-s.addr < s.size }

// holding returns the block that addr lies in, or nil. It looks at one block
// after the other: it is for calls that are rare.
func (s *segment) holding(addr uint64) *block {
	if !s.has(addr) {
		return nil
	}
	b := s.first
	for b.addr+b.size <= addr {
		b = b.next
	}
	return b
}

// idle says whether nobody has or may use any of the segment, so that it can go
// back where it came from.
func (s *segment) idle() bool { return s.first.state == free && s.first.next == nil }

// firstKey is the key of a segment's first byte. Small segments come in the order
// in which they were made and large ones in the opposite order: that is how CUDA
// lays them out on an empty H200, so that a program places its blocks as under
// PyTorch, and in the same way on every machine.
func firstKey(k kind, serial uint64) uint64 {
	if k == large {
		serial = 1<<keyBits - serial
	}
	return serial << keyBits
}
