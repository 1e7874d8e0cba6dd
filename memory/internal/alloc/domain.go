package alloc

import (
	"slices"
	"sync"
)

// A domain is the state under one lock: one arena of the default pool, or all arenas of
// a pool of graphs.
type domain struct {
	mu       sync.Mutex
	meter    meter
	arenas   []*Arena
	segments []*segment        // by number; nil if the number is free
	lowest   uint32            // no lower number is free
	moved    map[block]*Arena  // blocks whose arena is not their segment's home
	records  map[block]*record // of the few blocks that have one
}

// lock locks the domain and empties the pockets. Allocations and frees lock only mu.
func (d *domain) lock() {
	d.mu.Lock()
	for _, a := range d.arenas {
		a.emptyPocket()
	}
}

// A record has the streams and the stack of a block that other streams use or whose
// stack was recorded.
type record struct {
	users    []Stream // streams whose operations may use the block
	captured []Stream // streams whose captured operations use the block
	stack    *Stack   // stack of the allocation
}

func (d *domain) move(b block, a *Arena) {
	if d.moved == nil {
		d.moved = map[block]*Arena{}
	}
	d.moved[b] = a
}

// record returns the block's record, or nil.
func (b block) record() *record {
	if !b.slot().has(isRecorded) {
		return nil
	}
	return b.s.domain.records[b]
}

// keep returns the block's record and creates it if necessary.
func (b block) keep() *record {
	d := b.s.domain
	if r := b.record(); r != nil {
		return r
	}
	if d.records == nil {
		d.records = map[block]*record{}
	}
	r := &record{}
	d.records[b] = r
	b.slot().place |= isRecorded
	return r
}

// dropRecord removes the block's record and returns it; it may be nil.
func (b block) dropRecord() *record {
	r := b.record()
	if r != nil {
		delete(b.s.domain.records, b)
		b.slot().place &^= isRecorded
	}
	return r
}

// dropUsers removes and returns the users of a freed block. Its stack stays until the block
// is free.
func (b block) dropUsers() (users, captured []Stream) {
	r := b.record()
	users, captured = r.users, r.captured
	r.users, r.captured = nil, nil
	if len(users)+len(captured) == 0 || r.stack == nil {
		b.dropRecord()
	}
	return users, captured
}

// addUser adds a stream to the users of the block.
func (b block) addUser(s Stream) error {
	a := b.arena()
	if s == a.stream {
		return nil
	}
	if !s.Retain() {
		return ErrEnded
	}
	r := b.keep()
	list := &r.users
	if a.pool.capturing && captured(s) {
		list = &r.captured
	}
	if slices.Contains(*list, s) {
		s.Release()
		return nil
	}
	*list = append(*list, s)
	return nil
}

// captured reports whether the stream is being captured into a graph.
func captured(s Stream) bool {
	e, err := s.Record()
	if e != nil {
		e.Close()
	}
	return e == nil && err == nil
}

func (b block) stack() *Stack {
	if r := b.record(); r != nil {
		return r.stack
	}
	return nil
}
