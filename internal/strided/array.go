// Package strided copies and adds memory that has a shape and strides: layouts, copies
// between any two layouts, types and devices, many copies in one launch, and sums of many
// arrays.
//
// Package tensor is its face for users. A tensor.Tensor embeds a Ref, so that [Of] finds
// its Array, and users see neither the field nor its method. Errors begin with "tensor:",
// the package that users call.
package strided

import (
	"fmt"
	"math"
	"slices"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An Array is a view of memory. It is a value: its shape and strides do not change after it is
// passed on. The zero Array is invalid.
type Array struct {
	mem    *storage
	ref    *reference // the reference that Close releases; nil if the memory is borrowed
	Offset int        // bytes from the start of the memory to the first element
	DType  memory.DType
	Shape  []int
	// Strides are the distances between neighbors of each dimension in elements.
	Strides []int
}

// OfBuffer returns a row-major array of n elements of a buffer, whose memory it
// borrows, from a byte offset on.
func OfBuffer(b *memory.Buffer, offset int, t memory.DType, n int, shape []int) (Array, error) {
	return over(&storage{buf: b}, offset, t, n, shape)
}

// over returns a row-major array of n elements.
func over(mem *storage, offset int, t memory.DType, n int, shape []int) (Array, error) {
	want, err := count(t, shape)
	if err != nil {
		return Array{}, err
	}
	if want != n {
		return Array{}, fmt.Errorf("tensor: shape %v has %d elements: the memory has %d", shape, want, n)
	}
	return Array{mem: mem, Offset: offset, DType: t, Shape: slices.Clone(shape), Strides: RowMajor(shape)}, nil
}

// count is the number of elements of a shape.
func count(t memory.DType, shape []int) (int, error) {
	n, most := 1, math.MaxInt/max(1, t.Size())
	for _, d := range shape {
		switch {
		case d < 0:
			return 0, fmt.Errorf("tensor: shape %v has a negative dimension", shape)
		case d > 0 && n > most/d:
			return 0, fmt.Errorf("tensor: shape %v of %s is larger than any memory", shape, t)
		}
		n *= d
	}
	return n, nil
}

// Borrow returns the array without its reference to the memory.
func (t Array) Borrow() Array {
	t.ref = nil
	return t
}

// Len returns the number of elements; 0 for the zero Array.
func (t *Array) Len() int {
	if t.mem == nil {
		return 0
	}
	n := 1
	for _, d := range t.Shape {
		n *= d
	}
	return n
}

// Bytes returns the number of bytes of all elements.
func (t *Array) Bytes() int { return t.Len() * t.DType.Size() }

// Device returns the device whose memory it is, or nil for memory of the host and for the
// zero Array.
func (t *Array) Device() *device.Device {
	if t.mem == nil || t.mem.buf == nil {
		return nil
	}
	return t.mem.buf.Device()
}

// IsHost reports whether the memory is the host's.
func (t *Array) IsHost() bool { return t.mem != nil && t.mem.buf == nil }

// Buffer returns the allocation of device memory, or nil.
func (t *Array) Buffer() *memory.Buffer {
	if t.mem == nil {
		return nil
	}
	return t.mem.buf
}

// Ptr returns the address of the first element, on the device or on the host, or 0 if
// nothing is allocated.
func (t *Array) Ptr() uint64 {
	switch {
	case t.mem == nil:
		return 0
	case t.mem.buf == nil:
		return t.mem.host.address(t.Offset)
	}
	x, err := memory.View[uint8](t.mem.buf, t.Offset, 0)
	if err != nil {
		return 0
	}
	return x.Ptr()
}

// Place returns the name of the memory in errors.
func (t *Array) Place() string {
	switch {
	case t.mem == nil:
		return "nowhere"
	case t.IsHost():
		return "the host"
	}
	return t.Device().String()
}

func (t Array) String() string { return fmt.Sprintf("%s %v on %s", t.DType, t.Shape, t.Place()) }

// RecordStream records that operations on s use the memory.
func (t *Array) RecordStream(s *stream.Stream) error {
	switch {
	case t.mem == nil:
		return fmt.Errorf("tensor: record stream: no tensor given")
	case t.mem.buf != nil:
		return t.mem.buf.RecordStream(s)
	}
	return t.mem.host.record(s)
}

// Check returns an error if an operation on dev cannot use the array: it is the zero
// Array, its memory was freed, or dev is not nil and not its device.
func (t *Array) Check(op string, dev *device.Device) error {
	switch {
	case t.mem == nil:
		return fmt.Errorf("%s: no tensor given", op)
	case dev != nil && t.Device() != dev:
		return fmt.Errorf("%s: the tensor is on %s, the operation runs on %s", op, t.Place(), dev)
	case t.mem.buf == nil:
		return t.mem.host.check(op)
	}
	if inside.CheckBuffer(op, t.mem.buf, 0, nil) != nil {
		return fmt.Errorf("%s: %s: %w", op, *t, device.ErrClosed)
	}
	return nil
}

// Expand returns a view of the given shape, which borrows the memory, and
// repeats dimensions of length 1 and missing leading dimensions. A length of -1
// keeps the dimension.
func (t Array) Expand(shape []int) (Array, error) {
	more := len(shape) - len(t.Shape)
	if more < 0 {
		return Array{}, fmt.Errorf("tensor: expand shape %v to %v: too few dimensions", t.Shape, shape)
	}
	v := t
	v.ref, v.Shape, v.Strides = nil, slices.Clone(shape), make([]int, len(shape))
	for i, n := range shape {
		switch {
		case n == -1 && i >= more:
			v.Shape[i], v.Strides[i] = t.Shape[i-more], t.Strides[i-more]
		case n < 0:
			return Array{}, fmt.Errorf("tensor: expand shape %v to %v: a dimension is negative: want -1 only for a dimension that stays", t.Shape, shape)
		case i >= more && t.Shape[i-more] == n:
			v.Strides[i] = t.Strides[i-more]
		case i >= more && t.Shape[i-more] != 1:
			return Array{}, fmt.Errorf("tensor: expand shape %v to %v: only a dimension of 1 repeats", t.Shape, shape)
		}
	}
	return v, nil
}

// A Ref has the array of a tensor. The public tensor embeds it and has no other field.
type Ref struct{ a Array }

// New returns the Ref of a new tensor.
func New(a Array) Ref { return Ref{a} }

// At returns the array of a Ref, which package tensor has.
func At(r *Ref) *Array { return &r.a }

func (r Ref) array() Array { return r.a }

// A Tensor is the public tensor.
type Tensor interface{ array() Array }

// Of returns the array of a tensor.
func Of[T Tensor](t T) Array { return t.array() }

// arrays returns the arrays of tensors, in place: a tensor consists of its Ref, and a Ref
// of its Array.
func arrays[T Tensor](ts []T) []Array {
	return unsafe.Slice((*Array)(unsafe.Pointer(unsafe.SliceData(ts))), len(ts))
}

// arrayLists is arrays for lists of tensors.
func arrayLists[T Tensor](lists [][]T) [][]Array {
	return unsafe.Slice((*[]Array)(unsafe.Pointer(unsafe.SliceData(lists))), len(lists))
}

// tensors is the inverse of arrays.
func tensors[T Tensor](as []Array) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(as))), len(as))
}

// Check returns an error if an operation on dev cannot use the tensor; see Array.Check.
func Check[T Tensor](op string, t T, dev *device.Device) error {
	x := t.array()
	return x.Check(op, dev)
}

// CheckCopy returns the error that Copy returns for its tensors before it enqueues
// anything, for callers that validate several copies first.
func CheckCopy[T Tensor](op string, dst, src T) error {
	to, from := dst.array(), src.array()
	return checkCopy(op, &to, &from)
}

// Overlaps reports whether two tensors share memory. It returns false for tensors that
// interleave in many dimensions.
func Overlaps[T Tensor](a, b T) bool {
	x, y := a.array(), b.array()
	return overlaps(&x, &y)
}

// SameShape reports whether two tensors have the same dimensions.
func SameShape[T Tensor](a, b T) bool { return slices.Equal(a.array().Shape, b.array().Shape) }

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

// Make returns a stream-ordered dense array, which takes over the shape and the
// strides, and which the caller closes.
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
	return owning(buf, t, shape, strides), nil
}

// Adopt returns an array over memory that other code has allocated: it begins
// offset bytes behind ptr. The array takes over the shape and the strides,
// which must not be negative. The last Close releases the memory, as
// memory.Adopt describes.
func Adopt(s *stream.Stream, t memory.DType, ptr, offset uint64, shape, strides []int, release func()) (Array, error) {
	n, err := count(t, shape)
	if err != nil {
		return Array{}, err
	}
	size, last := t.Size(), 0 // last is the farthest element
	for i, d := range shape {
		switch {
		case strides[i] < 0:
			return Array{}, fmt.Errorf("strides %v are negative, which is not supported: copy the tensor first", strides)
		case n > 0 && d > 1 && strides[i] > (math.MaxInt/size-last-1)/(d-1):
			return Array{}, fmt.Errorf("shape %v with strides %v is larger than any memory", shape, strides)
		}
		if n > 0 {
			last += (d - 1) * strides[i]
		}
	}
	if ptr > math.MaxUint64-offset || (ptr+offset)%uint64(size) != 0 {
		return Array{}, fmt.Errorf("the elements of %s begin at byte %d of %#x: misaligned: want a multiple of %d", t, offset, ptr, size)
	}
	if n > 0 {
		last++
	}
	x, err := memory.Adopt[uint8](s, ptr+offset, last*size, release)
	if err != nil {
		return Array{}, err
	}
	return owning(x.Buffer(), t, shape, strides), nil
}

// owning returns an array that has the first reference to a buffer.
func owning(buf *memory.Buffer, t memory.DType, shape, strides []int) Array {
	own := &struct {
		mem storage
		ref reference
	}{mem: storage{buf: buf, refs: 1}}
	own.ref.mem = &own.mem
	return Array{mem: &own.mem, ref: &own.ref, DType: t, Shape: shape, Strides: strides}
}

// Follow orders operations on s from now on after those that are enqueued on
// the stream of the memory, or does nothing if s is nil.
func (t *Array) Follow(op string, s *stream.Stream) error {
	if s == nil {
		return nil
	}
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	return s.WaitStream(inside.BufferOf(t.mem.buf).Stream)
}

// Retain returns an array of the same elements that owns another reference to their
// memory. It borrows if the memory has no owner, or was freed.
func (t Array) Retain() Array { return t.retain(new(reference)) }

// retain stores r as the reference.
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

// Close releases the reference to the memory, once for all copies of the value,
// and frees the memory with the last reference.
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
