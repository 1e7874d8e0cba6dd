package strided

import (
	"fmt"
	"sync"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A storage is the memory of one or more arrays: a device's, or the host's.
type storage struct {
	buf  *memory.Buffer // nil if the memory is the host's
	host hostMemory

	mu   sync.Mutex
	refs int // open references; 0 if the memory is borrowed
}

// A reference is a counted reference to a storage. Copies of an array share it: the first
// Close of a copy releases it.
type reference struct {
	mem    *storage
	closed bool // guarded by mem.mu
}

// Make allocates a dense array in the order of s, which takes over the shape and the
// strides. The caller closes it.
func Make(s *stream.Stream, t memory.DType, shape, strides []int) (Array, error) {
	if t.Size() == 0 {
		return Array{}, fmt.Errorf("tensor: make: %s is not an element type", t)
	}
	n, err := count(t, shape)
	if err != nil {
		return Array{}, err
	}
	buf, err := memory.Alloc(s, n*t.Size())
	if err != nil {
		return Array{}, err
	}
	own := &struct {
		mem storage
		ref reference // the first
	}{mem: storage{buf: buf, refs: 1}}
	own.ref.mem = &own.mem
	return Array{mem: &own.mem, ref: &own.ref, DType: t, Shape: shape, Strides: strides}, nil
}

// Retain returns an array of the same elements that owns another reference to their
// memory. It borrows if the memory has no owner, or was freed.
func (t Array) Retain() Array { return t.retain(new(reference)) }

// retain makes r the reference.
func (t Array) retain(r *reference) Array {
	t.ref = nil
	if t.mem == nil {
		return t
	}
	t.mem.mu.Lock()
	defer t.mem.mu.Unlock()
	if t.mem.refs > 0 {
		t.mem.refs++
		r.mem, t.ref = t.mem, r
	}
	return t
}

// Close releases the reference to the memory, once for all copies of the value. The last
// reference frees the memory.
func (t *Array) Close() error {
	if t.ref == nil {
		return nil
	}
	m := t.mem
	m.mu.Lock()
	defer m.mu.Unlock()
	if t.ref.closed {
		return nil
	}
	if m.refs == 1 {
		if err := m.buf.Close(); err != nil {
			return err
		}
	}
	m.refs--
	t.ref.closed = true
	return nil
}

// Owned reports whether Close of the last reference frees the memory.
func (t *Array) Owned() bool {
	if t.mem == nil {
		return false
	}
	t.mem.mu.Lock()
	defer t.mem.mu.Unlock()
	return t.mem.refs > 0
}
