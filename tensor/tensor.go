package tensor

import (
	"errors"
	"fmt"
	"slices"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
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

// Of returns a row-major tensor of the given shape over all of x, whose memory
// it borrows.
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

// Make returns a stream-ordered row-major tensor of the given shape on s, for
// the caller to close. Like those of torch.empty and memory.Alloc, its contents
// are undefined.
func Make(s *stream.Stream, t memory.DType, shape ...int) (Tensor, error) {
	shape = slices.Clone(shape)
	return of(strided.Make(s, t, shape, strided.RowMajor(shape)))
}

// MakeFrom is Make with the elements of x, in row-major order (torch.tensor).
// The caller may change x once MakeFrom has returned.
func MakeFrom[T memory.Element](s *stream.Stream, x []T, shape ...int) (Tensor, error) {
	host, err := OfHost(x, shape...)
	if err != nil {
		return Tensor{}, err
	}
	t, err := Make(s, host.DType(), shape...)
	if err != nil {
		return t, err
	}
	if err := Copy(s, t, host); err != nil {
		return Tensor{}, errors.Join(err, t.Close())
	}
	return t, nil
}

// MakeLike allocates a tensor with the shape of x and type t, stream-ordered on s
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

// Data returns the elements of a contiguous tensor in host memory, as a slice
// that shares the tensor's memory.
func Data[T memory.Element](t Tensor) ([]T, error) { return strided.Data[T](t.at()) }

// Slice returns the elements of a contiguous tensor in device memory. The slice shares the
// memory, which the tensor owns.
func Slice[T memory.Element](t Tensor) (memory.Slice[T], error) { return strided.Slice[T](t.at()) }

// Retain returns a tensor of the same elements that owns another reference to their
// memory. It must be closed too: the memory is freed when all references are closed. If
// the memory belongs to a slice, or was freed, the result borrows.
func (t Tensor) Retain() Tensor { return Tensor{strided.New(t.at().Retain())} }

// Close releases the tensor's reference to its memory. The last reference frees the memory
// once pending work on its stream has finished; see memory.Buffer.Close. Close does nothing for a tensor
// that borrows, and is idempotent, also over copies of the value.
func (t Tensor) Close() error { return t.at().Close() }

// Shape returns the dimensions (torch.Tensor.size).
func (t Tensor) Shape() []int { return append([]int{}, t.at().Shape...) }

// Strides returns, for each dimension, the distance between neighbors in elements
// (torch.Tensor.stride).
func (t Tensor) Strides() []int { return append([]int{}, t.at().Strides...) }

// Dims returns the number of dimensions (torch.Tensor.dim).
func (t Tensor) Dims() int { return len(t.at().Shape) }

// Size returns the length of one dimension, and panics if the dimension does
// not exist.
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
// (torch.Tensor.data_ptr), or 0 if nothing is allocated.
func (t Tensor) Ptr() uint64 { return t.at().Ptr() }

// Contiguous reports whether the elements are in row-major order without gaps
// (torch.Tensor.is_contiguous).
func (t Tensor) Contiguous() bool { return t.at().Contiguous() }

// Zero enqueues zeros for all elements on s, a stream of the device
// (torch.Tensor.zero_). The tensor must be contiguous.
func (t Tensor) Zero(s *stream.Stream) error {
	const op = "tensor: zero"
	if err := gpu.CheckStream(op, s, nil); err != nil {
		return err
	}
	if err := t.at().Check(op, s.Device()); err != nil || t.Len() == 0 {
		return err
	}
	if !t.Contiguous() {
		return fmt.Errorf("%s: %s has gaps between its elements: want contiguous memory", op, t)
	}
	x, err := memory.View[byte](t.Buffer(), t.Offset(), t.Bytes())
	if err != nil {
		return err
	}
	return x.Zero(s)
}

// RecordStream records that operations on s use the memory, so that Close frees
// it only after the operations that are enqueued on s at that time
// (torch.Tensor.record_stream). It does nothing for a Go slice.
func (t Tensor) RecordStream(s *stream.Stream) error { return t.at().RecordStream(s) }

// Copy enqueues the copy of src to dst on s, a stream of either's device, between any two
// layouts, types, devices and the host (torch.Tensor.copy_ with non_blocking). src is
// expanded to the shape of dst. Numbers are converted as in torch: to floats by rounding
// to nearest, to integers by truncation, and to bool by a comparison with 0. If the type
// cannot represent a number, the result is undefined.
//
// If both tensors are contiguous in the same order, Copy is one copy of the driver, and so
// are long rows of a tensor on another device that become contiguous. All other copies use
// one kernel, which accesses the other device directly if the hardware supports it. If it
// does not, strided tensors are packed for the transfer. As with memory.Copy, work on the
// other device must be ordered with s, and memory of other streams must be recorded.
//
// If dst is in host memory, the host waits, as for Slice.CopyTo. If src is pinned the host
// does not wait; other host memory may change when Copy returns. Strided or converted host
// memory is packed first.
//
// The first copy or sum by a kernel on a device loads the kernels, and the driver may wait for all work of the device
// then. If a collective waits for a rank that is not enqueued yet, such a copy hangs, so copy a short tensor before.
//
// The elements of dst must not overlap, and dst must not share memory with src, unless
// both are the same elements; then Copy does nothing.
func Copy(s *stream.Stream, dst, src Tensor) error { return strided.Copy(s, *dst.at(), *src.at()) }

// CopyAll enqueues the copy of each tensor of src to the corresponding tensor of dst on s,
// like Copy. One kernel makes up to 120 copies (torch._foreach_copy_), also between
// devices that kernels can access, for tensors that need no conversion and are small and
// contiguous, or consist of contiguous rows. The tensors of dst must not share memory with
// each other or with tensors of src.
func CopyAll(s *stream.Stream, dst, src []Tensor) error { return strided.CopyAll(s, dst, src) }

// Add enqueues dst = a + b on s (torch.add with out), for tensors of one shape
// on the device of s. The sum has the type that torch promotes a and b to; the
// 16-bit floats are added in float. It is rounded to the type of dst, which
// must not be of a lower category. Bools are or-ed; 8-bit floats, which torch
// does not add, are added in float and rounded. dst may be a or b. The first
// sum may wait for the device, as in Copy.
func Add(s *stream.Stream, dst, a, b Tensor) error {
	return strided.Add(s, *dst.at(), *a.at(), *b.at())
}

// ChannelsLast reports whether the strides are torch's memory format channels_last, for
// four dimensions, or channels_last_3d, for five.
func (t Tensor) ChannelsLast() bool {
	a := t.at()
	n := len(a.Shape)
	if n != 4 && n != 5 || a.Strides[1] == 0 {
		return false
	}
	least := 0
	for _, d := range channelsLastOrder(n) {
		switch {
		case a.Shape[d] == 0 || a.Strides[d] < least:
			return false
		case d == 0 && least == a.Strides[1]:
			return false // ambiguous: all dimensions but the first are 1
		}
		least = a.Strides[d] * max(1, a.Shape[d])
	}
	return true
}

// channelsLastOrder returns the dimensions from the innermost to the outermost.
func channelsLastOrder(n int) []int {
	order := []int{1}
	for d := n - 1; d >= 2; d-- {
		order = append(order, d)
	}
	return append(order, 0)
}

// Chunk divides a dimension into at most n views of equal length, the last one possibly
// shorter (torch.chunk): each has an nth of the length, rounded up, so there may be fewer
// than n. A dimension of length 0 gives n empty views.
func (t Tensor) Chunk(n, dim int) ([]Tensor, error) {
	d, err := t.dim("chunk", dim)
	if err != nil {
		return nil, err
	}
	if n < 1 {
		return nil, fmt.Errorf("tensor: chunk dimension %d of shape %v into %d: want 1 or more", dim, t.at().Shape, n)
	}
	all := t.at().Shape[d]
	if all == 0 {
		return t.SplitSizes(make([]int, n), d)
	}
	return t.Split((all+n-1)/n, d)
}

// Split divides a dimension into views of the given length, the last one possibly shorter
// (torch.split).
func (t Tensor) Split(size, dim int) ([]Tensor, error) {
	d, err := t.dim("split", dim)
	if err != nil {
		return nil, err
	}
	all := t.at().Shape[d]
	if size < 0 || size == 0 && all > 0 {
		return nil, fmt.Errorf("tensor: split dimension %d of shape %v by %d: want 1 or more", dim, t.at().Shape, size)
	}
	if all == 0 {
		return []Tensor{{strided.New(t.view())}}, nil
	}
	out := make([]Tensor, 0, (all+size-1)/size)
	for at := 0; at < all; at += size {
		out = append(out, t.part(d, at, min(size, all-at), out))
	}
	return out, nil
}

// SplitSizes divides a dimension into views of the given lengths (torch.split_with_sizes).
func (t Tensor) SplitSizes(sizes []int, dim int) ([]Tensor, error) {
	d, err := t.dim("split", dim)
	if err != nil {
		return nil, err
	}
	sum, all := 0, t.at().Shape[d]
	for _, n := range sizes {
		if n < 0 {
			return nil, fmt.Errorf("tensor: split dimension %d of shape %v by %v: want no negative sizes", dim, t.at().Shape, sizes)
		}
		sum = min(sum+min(n, all+1), all+1) // does not overflow
	}
	if sum != all {
		return nil, fmt.Errorf("tensor: split dimension %d of shape %v by %v: want sizes that sum exactly to %d", dim, t.at().Shape, sizes, all)
	}
	out := make([]Tensor, 0, len(sizes))
	at := 0
	for _, n := range sizes {
		out = append(out, t.part(d, at, n, out))
		at += n
	}
	return out, nil
}

// part is narrow for a divided dimension, where parts can share the shape and
// strides of the part before, because these are immutable.
func (t Tensor) part(d, from, n int, before []Tensor) Tensor {
	a := t.at().Borrow()
	a.Offset += from * a.Strides[d] * a.DType.Size()
	if i := len(before) - 1; i >= 0 && before[i].at().Shape[d] == n {
		a.Shape = before[i].at().Shape
	} else {
		a.Shape = slices.Clone(a.Shape)
		a.Shape[d] = n
	}
	return Tensor{strided.New(a)}
}

// Unflatten returns contiguous views of a one-dimensional tensor with the
// shapes of other tensors, one after the other from its start
// (torch._utils._unflatten_dense_tensors).
func (t Tensor) Unflatten(like []Tensor) ([]Tensor, error) { return strided.Unflatten(t, like) }
