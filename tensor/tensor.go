package tensor

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Tensor is a view of memory with a shape and strides, both in elements. The zero Tensor
// is invalid.
type Tensor struct{ ref }

type ref = strided.Ref // hides the field

// Package strided takes a Tensor for a Ref, so a Tensor has no other field.
var _ [unsafe.Sizeof(strided.Ref{})]struct{} = [unsafe.Sizeof(Tensor{})]struct{}{}

// at returns the array of the tensor.
func (t *Tensor) at() *strided.Array { return strided.At(&t.ref) }

// of returns the tensor of an array.
func of(a strided.Array, err error) (Tensor, error) { return Tensor{strided.New(a)}, err }

// Of returns a row-major tensor of the given shape over all of x. It borrows the memory of
// x.
func Of[T memory.Element](x memory.Slice[T], shape ...int) (Tensor, error) {
	if x.Buffer() == nil {
		return Tensor{}, fmt.Errorf("tensor: the zero slice has no memory")
	}
	return of(strided.OfBuffer(x.Buffer(), x.Offset(), x.DType(), x.Len(), shape))
}

// OfHost returns a row-major tensor of the given shape that uses the memory of x
// (torch.from_numpy). If it is the source of a copy, x may change after Copy has returned.
func OfHost[T memory.Element](x []T, shape ...int) (Tensor, error) {
	return of(strided.OfHost(x, shape))
}

// OfPinned is OfHost for pinned memory. Copies from it do not make the host wait: it must
// not change until the stream has passed them, but may be closed.
func OfPinned[T memory.Element](x *memory.Pinned[T], shape ...int) (Tensor, error) {
	return of(strided.OfPinned(x, shape))
}

// Make allocates a row-major tensor of the given shape in the order of s, for the
// caller to close (torch.empty). The contents are undefined. See memory.Alloc.
func Make(s *stream.Stream, t memory.DType, shape ...int) (Tensor, error) {
	shape = slices.Clone(shape)
	return of(strided.Make(s, t, shape, strided.RowMajor(shape)))
}

// MakeLike allocates a tensor with the shape of x and type t, in the order of s
// (torch.empty_like). Its strides follow torch: the strides of x if x is dense, and otherwise
// dense strides in the same order.
func MakeLike(s *stream.Stream, x Tensor, t memory.DType) (Tensor, error) {
	a := x.at()
	if err := a.Check("tensor: make like", nil); err != nil {
		return Tensor{}, err
	}
	return of(strided.Make(s, t, a.Shape, strided.LikeStrides(a.Shape, a.Strides)))
}

// MakeHost allocates a row-major tensor in Go's memory, which need not be closed
// (torch.zeros on the CPU).
func MakeHost(t memory.DType, shape ...int) (Tensor, error) { return of(strided.MakeHost(t, shape)) }

// Data returns the elements of a contiguous tensor in host memory. The slice shares the
// tensor's memory.
func Data[T memory.Element](t Tensor) ([]T, error) { return strided.Data[T](t.at()) }

// Slice returns the elements of a contiguous tensor in device memory. The slice shares the
// memory, which the tensor owns.
func Slice[T memory.Element](t Tensor) (memory.Slice[T], error) { return strided.Slice[T](t.at()) }

// Retain returns a tensor of the same elements that owns another reference to their
// memory. It must be closed too: the memory is freed when all references are closed. If
// the memory belongs to a slice, or was freed, the result borrows.
func (t Tensor) Retain() Tensor { return Tensor{strided.New(t.at().Retain())} }

// Close releases the tensor's reference to its memory. The last reference frees the memory
// in the order of its stream; see memory.Buffer.Close. Close does nothing for a tensor
// that borrows, and is idempotent, also over copies of the value.
func (t Tensor) Close() error { return t.at().Close() }

// Shape returns the dimensions (torch.Tensor.size).
func (t Tensor) Shape() []int { return append([]int{}, t.at().Shape...) }

// Strides returns, for each dimension, the distance between neighbors in elements
// (torch.Tensor.stride).
func (t Tensor) Strides() []int { return append([]int{}, t.at().Strides...) }

// Dims returns the number of dimensions (torch.Tensor.dim).
func (t Tensor) Dims() int { return len(t.at().Shape) }

// Size returns the length of one dimension. It panics if the dimension does not exist.
func (t Tensor) Size(dim int) int {
	shape := t.at().Shape
	if dim < 0 {
		dim += len(shape)
	}
	return shape[dim]
}

// Len returns the number of elements (torch.Tensor.numel); 0 for the zero Tensor.
func (t Tensor) Len() int { return t.at().Len() }

// Bytes returns the number of bytes of all elements (torch.Tensor.nbytes).
func (t Tensor) Bytes() int { return t.at().Bytes() }

// DType returns the element type.
func (t Tensor) DType() memory.DType { return t.at().DType }

// Device returns the device whose memory it is, or nil for a tensor in host memory
// and for the zero Tensor (torch.Tensor.device).
func (t Tensor) Device() *device.Device { return t.at().Device() }

// IsHost reports whether the memory is the host's (torch.Tensor.is_cpu).
func (t Tensor) IsHost() bool { return t.at().IsHost() }

// String describes the tensor, not its elements, such as "float32 [2 3] on cuda:0".
func (t Tensor) String() string { return t.at().String() }

// Buffer returns the allocation of device memory that the tensor is a view of, or
// nil.
func (t Tensor) Buffer() *memory.Buffer { return t.at().Buffer() }

// Offset returns the number of bytes from the start of the memory to the first
// element.
func (t Tensor) Offset() int { return t.at().Offset }

// Ptr returns the address of the first element, on the device or on the host
// (torch.Tensor.data_ptr). It is 0 if nothing is allocated.
func (t Tensor) Ptr() uint64 { return t.at().Ptr() }

// Contiguous reports whether the elements are in row-major order without gaps
// (torch.Tensor.is_contiguous).
func (t Tensor) Contiguous() bool { return t.at().Contiguous() }

// RecordStream records that operations on s use the memory. It is then freed only after
// the operations that are enqueued on s at the time of Close (torch.Tensor.record_stream).
// It does nothing for a Go slice.
func (t Tensor) RecordStream(s *stream.Stream) error { return t.at().RecordStream(s) }
