package alloc

// state says who has a block.
type state uint8

const (
	free    state = iota // its arena: on a shelf if it is mapped
	used                 // the caller
	pending              // was given back, but other streams than the arena's may still use it
)

// A block is a piece of a segment. The lock of its segment's domain guards it.
type block struct {
	// What searching and joining look at comes first, so that it is one line of
	// the processor's cache.
	size       uint64
	addr       uint64
	key        uint64 // orders the blocks of an arena: by segment, then by address
	prev, next *block // the neighbours in the segment
	arena      *Arena
	segment    *segment
	shelved    uint32 // the shelf's count of searches when it became free
	state      state
	unmapped   bool // of an expandable segment: without memory behind it

	requested uint64   // of size, while it is used
	stack     *Stack   // where it was allocated, if that is recorded
	users     []Stream // other streams that use it
	_         [24]byte // a whole number of lines
}

// split says whether the block is not a segment of its own.
func (b *block) split() bool { return b.prev != nil || b.next != nil }

// joins says whether b and o, which lie side by side, are one block when both
// are free.
func (b *block) joins(o *block) bool {
	return b != nil && o != nil && b.state == free && o.state == free && b.unmapped == o.unmapped && b.arena == o.arena
}

// cut divides b behind its first n bytes and returns the rest.
func (b *block) cut(n uint64) *block {
	rest := b.arena.blank()
	rest.addr, rest.size, rest.key = b.addr+n, b.size-n, b.key+n/unit
	rest.segment, rest.arena = b.segment, b.arena
	rest.state, rest.unmapped = b.state, b.unmapped
	rest.prev, rest.next = b, b.next
	if b.next != nil {
		b.next.prev = rest
	}
	b.next, b.size = rest, n
	return rest
}

// swallow makes the next block part of b and returns how large it was.
func (b *block) swallow() uint64 {
	o := b.next
	n := o.size
	b.size += n
	b.next = o.next
	if b.next != nil {
		b.next.prev = b
	}
	b.arena.recycle(o)
	return n
}

// A kit has descriptors of blocks that are not in use, so that splitting and
// joining allocate nothing.
type kit struct{ list *block }

// kitSize is how many descriptors are made at a time.
const kitSize = 64

func (a *Arena) blank() *block {
	k := &a.domain.kit
	if k.list == nil {
		more := make([]block, kitSize)
		for i := range more {
			more[i].next, k.list = k.list, &more[i]
		}
	}
	b := k.list
	k.list, b.next = b.next, nil
	return b
}

func (a *Arena) recycle(b *block) {
	k := &a.domain.kit
	*b = block{next: k.list}
	k.list = b
}
