package tensor

import (
	"fmt"
	"math"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Tensor is a view of memory with a shape and strides, both in elements. The
// zero Tensor is none.
type Tensor struct {
	mem     *storage
	ref     *reference // what Close lets go of; nil where the memory is borrowed
	off     int        // bytes
	dtype   memory.DType
	shape   []int
	strides []int
}

// Of returns a row-major tensor of the given shape over all of x, whose memory it
// borrows.
func Of[T memory.Element](x memory.Slice[T], shape ...int) (Tensor, error) {
	if x.Buffer() == nil {
		return Tensor{}, fmt.Errorf("tensor: the zero slice has no memory")
	}
	return over(&storage{buf: x.Buffer()}, x.Offset(), x.DType(), x.Len(), shape)
}

// over returns a row-major tensor over n elements.
func over(mem *storage, off int, t memory.DType, n int, shape []int) (Tensor, error) {
	want, err := count(t, shape)
	if err != nil {
		return Tensor{}, err
	}
	if want != n {
		return Tensor{}, fmt.Errorf("tensor: shape %v has %d elements: the memory has %d", shape, want, n)
	}
	return Tensor{mem: mem, off: off, dtype: t, shape: slices.Clone(shape), strides: rowMajor(shape)}, nil
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

// Shape returns the dimensions (torch.Tensor.size).
func (t Tensor) Shape() []int { return append([]int{}, t.shape...) }

// Strides returns, for each dimension, how many elements apart its neighbours
// are in memory (torch.Tensor.stride).
func (t Tensor) Strides() []int { return append([]int{}, t.strides...) }

// Dims returns the number of dimensions (torch.Tensor.dim).
func (t Tensor) Dims() int { return len(t.shape) }

// Size returns one dimension. It panics when there is no such dimension.
func (t Tensor) Size(dim int) int {
	if dim < 0 {
		dim += len(t.shape)
	}
	return t.shape[dim]
}

// Len returns the number of elements (torch.Tensor.numel); 0 for the zero Tensor.
func (t Tensor) Len() int {
	if t.mem == nil {
		return 0
	}
	n := 1
	for _, d := range t.shape {
		n *= d
	}
	return n
}

// Bytes returns the number of bytes of all elements (torch.Tensor.nbytes).
func (t Tensor) Bytes() int { return t.Len() * t.dtype.Size() }

// DType returns the element type.
func (t Tensor) DType() memory.DType { return t.dtype }

// Device returns the device whose memory it is, or nil for a tensor in host memory
// and for the zero Tensor (torch.Tensor.device).
func (t Tensor) Device() *device.Device {
	if t.mem == nil || t.mem.buf == nil {
		return nil
	}
	return t.mem.buf.Device()
}

// IsHost reports whether the memory is the host's (torch.Tensor.is_cpu).
func (t Tensor) IsHost() bool { return t.mem != nil && t.mem.buf == nil }

// place names the memory in errors.
func (t Tensor) place() string {
	switch {
	case t.mem == nil:
		return "nowhere"
	case t.IsHost():
		return "the host"
	}
	return t.Device().String()
}

// String describes the tensor, not its elements, such as "float32 [2 3] on cuda:0".
func (t Tensor) String() string { return fmt.Sprintf("%s %v on %s", t.dtype, t.shape, t.place()) }

// Buffer returns the allocation of device memory that the tensor is a view of, or
// nil.
func (t Tensor) Buffer() *memory.Buffer {
	if t.mem == nil {
		return nil
	}
	return t.mem.buf
}

// Offset returns the number of bytes from the start of the memory to the first
// element.
func (t Tensor) Offset() int { return t.off }

// Ptr returns the address of the first element, of the device or of the host
// (torch.Tensor.data_ptr). It is 0 where nothing is allocated.
func (t Tensor) Ptr() uint64 {
	switch {
	case t.mem == nil:
		return 0
	case t.mem.buf == nil:
		return t.mem.host.address(t.off)
	}
	x, err := memory.View[uint8](t.mem.buf, t.off, 0)
	if err != nil {
		return 0
	}
	return x.Ptr()
}

// RecordStream tells that work on s uses the memory, so that it goes back only
// after the work that is on s when it is closed (torch.Tensor.record_stream). A
// Go slice needs no telling.
func (t Tensor) RecordStream(s *stream.Stream) error {
	switch {
	case t.mem == nil:
		return fmt.Errorf("tensor: record stream: no tensor given")
	case t.mem.buf != nil:
		return t.mem.buf.RecordStream(s)
	}
	return t.mem.host.record(s)
}

// Check returns an error if the tensor cannot be used by an operation on dev: it
// is none, its memory went back, or is not dev's, where dev is not nil. For
// Chorus's own packages.
func (t Tensor) Check(op string, dev *device.Device) error {
	switch {
	case t.mem == nil:
		return fmt.Errorf("%s: no tensor given", op)
	case dev != nil && t.Device() != dev:
		return fmt.Errorf("%s: the tensor is on %s, the operation runs on %s", op, t.place(), dev)
	case t.mem.buf == nil:
		return t.mem.host.check(op)
	}
	x, err := memory.View[uint8](t.mem.buf, 0, 0)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if x.Check(op, nil) != nil {
		return fmt.Errorf("%s: %s: %w", op, t, device.ErrClosed)
	}
	return nil
}

// OpenOn reports whether t is memory of a device that can be used, where Check says why
// not. For Chorus's own packages.
func (t *Tensor) OpenOn(dev *device.Device) bool {
	return t.mem != nil && t.mem.buf != nil && t.mem.buf.OpenOn(dev)
}

// raw returns the device address of the first element.
func (t Tensor) raw() (cudadrv.DevicePtr, error) {
	if err := t.Check("tensor", nil); err != nil {
		return 0, err
	}
	if t.mem.buf == nil {
		return 0, fmt.Errorf("tensor: %s: want memory of a device", t)
	}
	return cudadrv.DevicePtr(t.Ptr()), nil
}
