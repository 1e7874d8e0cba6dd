package strided

import (
	"slices"

	"github.com/gochorus/chorus/device"
)

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

// Overlaps reports whether two tensors share memory. Like torch, it returns false for
// tensors that are not dense.
func Overlaps[T Tensor](a, b T) bool {
	x, y := a.array(), b.array()
	return overlaps(&x, &y)
}

// SameShape reports whether two tensors have the same dimensions.
func SameShape[T Tensor](a, b T) bool { return slices.Equal(a.array().Shape, b.array().Shape) }
