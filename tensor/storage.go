package tensor

import (
	"fmt"
	"slices"
	"sync"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A storage is the memory of one or more tensors: a device's, or the host's.
type storage struct {
	buf  *memory.Buffer // nil where it is the host's
	host hostMemory

	mu   sync.Mutex
	refs int // open references; 0 where somebody else owns the memory
}

// A reference is a share in a storage. Copies of a tensor's value have it in
// common, so that closing any of them lets go of it once.
type reference struct {
	mem    *storage
	closed bool // guarded by mem.mu
}

// Make allocates a row-major tensor of the given shape in the order of s, for the
// caller to close (torch.empty). The contents are undefined. See memory.Alloc.
func Make(s *stream.Stream, t memory.DType, shape ...int) (Tensor, error) {
	shape = slices.Clone(shape)
	return makeStrided(s, t, shape, rowMajor(shape))
}

// MakeLike allocates a tensor of the shape of x in the order of s, of type t, with
// torch's strides for it: those of x where its elements lie densely, and otherwise
// dense ones in the same order (torch.empty_like).
func MakeLike(s *stream.Stream, x Tensor, t memory.DType) (Tensor, error) {
	if err := x.Check("tensor: make like", nil); err != nil {
		return Tensor{}, err
	}
	return makeStrided(s, t, x.shape, likeStrides(x.shape, x.strides))
}

// makeStrided allocates a dense tensor, which keeps the shape and the strides.
func makeStrided(s *stream.Stream, t memory.DType, shape, strides []int) (Tensor, error) {
	if t.Size() == 0 {
		return Tensor{}, fmt.Errorf("tensor: make: %s is no type of elements", t)
	}
	n, err := count(t, shape)
	if err != nil {
		return Tensor{}, err
	}
	buf, err := memory.Alloc(s, n*t.Size())
	if err != nil {
		return Tensor{}, err
	}
	own := &struct {
		mem storage
		ref reference // the first
	}{mem: storage{buf: buf, refs: 1}}
	own.ref.mem = &own.mem
	return Tensor{mem: &own.mem, ref: &own.ref, dtype: t, shape: shape, strides: strides}, nil
}

// Retain returns a tensor of the same elements with a share of its own in their
// memory, to be closed too: the memory stays until all shares are closed. Where
// the memory belongs to a slice or to nobody any more, it returns one that borrows.
func (t Tensor) Retain() Tensor { return t.retain(new(reference)) }

// RetainAll is Retain of each of many tensors.
func RetainAll(ts []Tensor) []Tensor {
	refs, out := make([]reference, len(ts)), make([]Tensor, len(ts))
	for i := range ts {
		out[i] = ts[i].retain(&refs[i])
	}
	return out
}

// retain makes r the share.
func (t Tensor) retain(r *reference) Tensor {
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

// Close lets go of the tensor's share in its memory, which goes back in the order
// of its stream with the last share; see memory.Buffer.Close. It does nothing for
// a tensor that borrows, and is idempotent, also over copies of the value.
func (t Tensor) Close() error {
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

// Owned reports whether the memory is one that Close of the last share gives back,
// and not a slice's.
func (t Tensor) Owned() bool {
	if t.mem == nil {
		return false
	}
	t.mem.mu.Lock()
	defer t.mem.mu.Unlock()
	return t.mem.refs > 0
}
