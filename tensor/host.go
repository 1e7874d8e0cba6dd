package tensor

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
	// upload enqueues a copy of n bytes from the byte at on.
	upload(s *stream.Stream, dst *memory.Buffer, to, at, n int) error
}

// OfHost returns a row-major tensor of the given shape over all of x
// (torch.from_numpy). Where it is the source of a copy, x may change when Copy
// has returned.
func OfHost[T memory.Element](x []T, shape ...int) (Tensor, error) {
	var z T
	h := hostMemory{p: unsafe.Pointer(unsafe.SliceData(x)), bytes: len(x) * int(unsafe.Sizeof(z))}
	return over(&storage{host: h}, 0, memory.DTypeOf[T](), len(x), shape)
}

// OfPinned is OfHost for pinned memory. Copies from it do not make the host wait:
// it must stay as it is until the stream is past them, but may be closed.
func OfPinned[T memory.Element](x *memory.Pinned[T], shape ...int) (Tensor, error) {
	if x == nil {
		return Tensor{}, fmt.Errorf("tensor: no pinned memory given")
	}
	var z T
	h := hostMemory{p: unsafe.Pointer(unsafe.SliceData(x.Data())), bytes: x.Len() * int(unsafe.Sizeof(z)), pinned: lockedOf[T]{x}}
	if err := h.check("tensor: of pinned memory"); err != nil {
		return Tensor{}, err
	}
	return over(&storage{host: h}, 0, memory.DTypeOf[T](), x.Len(), shape)
}

// MakeHost allocates a row-major tensor in Go's memory, which need not be closed
// (torch.zeros on the CPU).
func MakeHost(t memory.DType, shape ...int) (Tensor, error) {
	if t.Size() == 0 {
		return Tensor{}, fmt.Errorf("tensor: make: %s is no type of elements", t)
	}
	n, err := count(t, shape)
	if err != nil {
		return Tensor{}, err
	}
	words := make([]uint64, (n*t.Size()+7)/8) // aligned for every type
	h := hostMemory{p: unsafe.Pointer(unsafe.SliceData(words)), bytes: n * t.Size()}
	return over(&storage{host: h}, 0, t, n, shape)
}

// Data returns the elements of a contiguous tensor in host memory, which the two
// share.
func Data[T memory.Element](t Tensor) ([]T, error) {
	const op = "tensor: data"
	if err := checkTyped[T](op, t); err != nil {
		return nil, err
	}
	if !t.IsHost() {
		return nil, fmt.Errorf("%s: %s: want host memory: Copy to some", op, t)
	}
	n := t.Len()
	if n == 0 {
		return nil, nil
	}
	return unsafe.Slice((*T)(unsafe.Add(t.mem.host.p, t.off)), n), nil
}

// Slice returns the elements of a contiguous tensor in device memory, which the
// two share and the tensor owns.
func Slice[T memory.Element](t Tensor) (memory.Slice[T], error) {
	const op = "tensor: slice"
	if err := checkTyped[T](op, t); err != nil {
		return memory.Slice[T]{}, err
	}
	if t.IsHost() {
		return memory.Slice[T]{}, fmt.Errorf("%s: %s: want memory of a device", op, t)
	}
	return memory.View[T](t.mem.buf, t.off, t.Len())
}

func checkTyped[T memory.Element](op string, t Tensor) error {
	if err := t.Check(op, nil); err != nil {
		return err
	}
	if want := memory.DTypeOf[T](); t.dtype != want {
		return fmt.Errorf("%s: %s: not of %s", op, t, want)
	}
	if !t.Contiguous() {
		return fmt.Errorf("%s: %s with strides %v is not contiguous: Copy it", op, t, t.strides)
	}
	return nil
}

// all returns the bytes from the tensor's first element to the end of its memory.
func (t Tensor) all() []byte {
	h := &t.mem.host
	if h.p == nil || t.off >= h.bytes {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Add(h.p, t.off)), h.bytes-t.off)
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

// upload enqueues the copy of n bytes from the byte at on to a buffer.
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
