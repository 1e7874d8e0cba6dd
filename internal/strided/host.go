package strided

import (
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// hostMemory is memory of the host: a Go slice's, or pinned.
type hostMemory struct {
	p      unsafe.Pointer
	bytes  int
	pinned pinned // nil for a Go slice
}

// pinned is a memory.Pinned of any type.
type pinned interface {
	check(op string) error
	record(s *stream.Stream) error
	// upload enqueues a copy of n bytes, beginning at byte at.
	upload(s *stream.Stream, dst *memory.Buffer, to, at, n int) error
}

// OfHost returns a row-major array over the memory of a Go slice.
func OfHost[T memory.Element](x []T, shape []int) (Array, error) {
	var z T
	h := hostMemory{p: unsafe.Pointer(unsafe.SliceData(x)), bytes: len(x) * int(unsafe.Sizeof(z))}
	return over(&storage{host: h}, 0, memory.DTypeOf[T](), len(x), shape)
}

// OfPinned is OfHost for pinned memory.
func OfPinned[T memory.Element](x *memory.Pinned[T], shape []int) (Array, error) {
	if x == nil {
		return Array{}, fmt.Errorf("tensor: no pinned memory given")
	}
	var z T
	h := hostMemory{p: unsafe.Pointer(unsafe.SliceData(x.Data())), bytes: x.Len() * int(unsafe.Sizeof(z)), pinned: lockedOf[T]{x}}
	if err := h.check("tensor: of pinned memory"); err != nil {
		return Array{}, err
	}
	return over(&storage{host: h}, 0, memory.DTypeOf[T](), x.Len(), shape)
}

// MakeHost allocates a row-major array in Go's memory.
func MakeHost(t memory.DType, shape []int) (Array, error) {
	if t.Size() == 0 {
		return Array{}, fmt.Errorf("tensor: make: %s is not an element type", t)
	}
	n, err := count(t, shape)
	if err != nil {
		return Array{}, err
	}
	words := make([]uint64, (n*t.Size()+7)/8) // aligned for every type
	h := hostMemory{p: unsafe.Pointer(unsafe.SliceData(words)), bytes: n * t.Size()}
	return over(&storage{host: h}, 0, t, n, shape)
}

// Data returns the elements of a contiguous array in host memory.
func Data[T memory.Element](t *Array) ([]T, error) {
	const op = "tensor: data"
	if err := checkTyped[T](op, t); err != nil {
		return nil, err
	}
	if !t.IsHost() {
		return nil, fmt.Errorf("%s: %s: want host memory: Copy to some", op, *t)
	}
	n := t.Len()
	if n == 0 {
		return nil, nil
	}
	return unsafe.Slice((*T)(unsafe.Add(t.mem.host.p, t.Offset)), n), nil
}

// Slice returns the elements of a contiguous array in device memory.
func Slice[T memory.Element](t *Array) (memory.Slice[T], error) {
	const op = "tensor: slice"
	if err := checkTyped[T](op, t); err != nil {
		return memory.Slice[T]{}, err
	}
	if t.IsHost() {
		return memory.Slice[T]{}, fmt.Errorf("%s: %s: want memory of a device", op, *t)
	}
	return memory.View[T](t.mem.buf, t.Offset, t.Len())
}

func checkTyped[T memory.Element](op string, t *Array) error {
	if err := t.Check(op, nil); err != nil {
		return err
	}
	if want := memory.DTypeOf[T](); t.DType != want {
		return fmt.Errorf("%s: %s: not of %s", op, *t, want)
	}
	if !t.Contiguous() {
		return fmt.Errorf("%s: %s with strides %v is not contiguous: Copy it", op, *t, t.Strides)
	}
	return nil
}

// all returns the bytes from the first element to the end of its memory.
func (t *Array) all() []byte {
	h := &t.mem.host
	if h.p == nil || t.Offset >= h.bytes {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Add(h.p, t.Offset)), h.bytes-t.Offset)
}

func (h *hostMemory) address(off int) uint64 {
	if h.p == nil {
		return 0
	}
	return uint64(uintptr(h.p)) + uint64(off)
}

func (h *hostMemory) check(op string) error {
	if h.pinned != nil {
		return h.pinned.check(op)
	}
	return nil
}

func (h *hostMemory) record(s *stream.Stream) error {
	if h.pinned != nil {
		return h.pinned.record(s)
	}
	return nil
}

// upload enqueues a copy of n bytes, beginning at byte at, to a buffer.
func (h *hostMemory) upload(s *stream.Stream, dst *memory.Buffer, to, at, n int) error {
	if n == 0 {
		return nil
	}
	if h.pinned != nil {
		return h.pinned.upload(s, dst, to, at, n)
	}
	x, err := memory.View[uint8](dst, to, n)
	if err != nil {
		return err
	}
	return x.CopyFrom(s, unsafe.Slice((*byte)(unsafe.Add(h.p, at)), n))
}

type lockedOf[T memory.Element] struct{ x *memory.Pinned[T] }

func (l lockedOf[T]) check(op string) error {
	if l.x.Len() > 0 && l.x.Data() == nil {
		return fmt.Errorf("%s: pinned memory: %w", op, device.ErrClosed)
	}
	return nil
}

func (l lockedOf[T]) record(s *stream.Stream) error { return l.x.RecordStream(s) }

func (l lockedOf[T]) upload(s *stream.Stream, dst *memory.Buffer, to, at, n int) error {
	var z T
	size := int(unsafe.Sizeof(z))
	x, err := memory.View[T](dst, to, n/size)
	if err != nil {
		return err
	}
	return x.CopyFromPinned(s, l.x.Slice(at/size, (at+n)/size))
}
