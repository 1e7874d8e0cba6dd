package tensor

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/memory"
)

// A Tensor is a view of device memory with a shape and strides, both in
// elements.
type Tensor struct {
	buf     *memory.Buffer
	off     int // bytes
	dtype   memory.DType
	shape   []int
	strides []int
}

// Of returns a row-major tensor of the given shape over all of x.
func Of[T memory.Element](x memory.Slice[T], shape ...int) (Tensor, error) {
	n := 1
	for _, d := range shape {
		if d < 0 {
			return Tensor{}, fmt.Errorf("tensor: shape %v has a negative dimension", shape)
		}
		n *= d
	}
	if n != x.Len() {
		return Tensor{}, fmt.Errorf("tensor: shape %v has %d elements: the memory has %d", shape, n, x.Len())
	}
	t := Tensor{buf: x.Buffer(), off: x.Offset(), dtype: x.DType(), shape: slices.Clone(shape), strides: make([]int, len(shape))}
	stride := 1
	for i := len(shape) - 1; i >= 0; i-- {
		t.strides[i] = stride
		stride *= shape[i]
	}
	return t, nil
}

// Shape returns the dimensions.
func (t Tensor) Shape() []int { return slices.Clone(t.shape) }

// Strides returns, for each dimension, how many elements apart its neighbours
// are in memory.
func (t Tensor) Strides() []int { return slices.Clone(t.strides) }

// DType returns the element type.
func (t Tensor) DType() memory.DType { return t.dtype }

// Device returns the device whose memory it is, or nil for the zero Tensor.
func (t Tensor) Device() *device.Device {
	if t.buf == nil {
		return nil
	}
	return t.buf.Device()
}

// T returns the view with the last two dimensions exchanged, as torch's mT.
func (t Tensor) T() Tensor {
	n := len(t.shape)
	if n < 2 {
		return t
	}
	t.shape, t.strides = slices.Clone(t.shape), slices.Clone(t.strides)
	t.shape[n-1], t.shape[n-2] = t.shape[n-2], t.shape[n-1]
	t.strides[n-1], t.strides[n-2] = t.strides[n-2], t.strides[n-1]
	return t
}

// Narrow returns the view of length n from start along a dimension, as torch's
// narrow.
func (t Tensor) Narrow(dim, start, n int) (Tensor, error) {
	if dim < 0 || dim >= len(t.shape) || start < 0 || n < 0 || start > t.shape[dim]-n {
		return Tensor{}, fmt.Errorf("tensor: narrow dimension %d of shape %v to %d from %d: out of range", dim, t.shape, n, start)
	}
	t.shape = slices.Clone(t.shape)
	t.shape[dim] = n
	t.off += start * t.strides[dim] * t.dtype.Size()
	return t, nil
}

// raw returns the device address of the first element.
func (t Tensor) raw() (cudadrv.DevicePtr, error) {
	x, err := memory.View[uint8](t.buf, t.off, 0)
	if err != nil {
		return 0, err
	}
	if err := x.Check("tensor", nil); err != nil {
		return 0, err
	}
	return x.Raw(), nil
}
