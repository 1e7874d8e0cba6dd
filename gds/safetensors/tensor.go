package safetensors

import (
	"cmp"
	"fmt"
	"math/bits"
)

// A Tensor describes a tensor of a file: type, shape and position.
type Tensor struct {
	Name  string
	DType DType
	Shape []int // row-major; empty for a scalar; a dimension may be 0
	Begin int64 // position of its data in the file in bytes
	End   int64 // position after its last byte
}

// Bytes returns the length of the tensor's data in the file.
func (t *Tensor) Bytes() int64 { return t.End - t.Begin }

// size returns the size of a tensor in bytes. It returns the reason if a dimension is
// negative, or if the size overflows or is not a whole number of bytes. Like the reference
// implementation, it multiplies the dimensions in order, so that an overflow
// remains an error even if a later dimension is 0.
func size(t DType, shape []int) (bytes int64, reason string) {
	if t.Bits() == 0 {
		return 0, fmt.Sprintf("%v is not a dtype of the format", t)
	}
	n, over := uint64(1), uint64(0)
	for i, d := range shape {
		if d < 0 {
			return 0, fmt.Sprintf("dimension %d is %d: want 0 or more", i, d)
		}
		if over, n = bits.Mul64(n, uint64(d)); over != 0 {
			return 0, fmt.Sprintf("shape %s has more elements than 64 bits count", shapeText(shape))
		}
	}
	if over, n = bits.Mul64(n, uint64(t.Bits())); over != 0 {
		return 0, fmt.Sprintf("shape %s of %v has more bits than 64 bits count", shapeText(shape), t)
	}
	if n%8 != 0 {
		return 0, fmt.Sprintf("shape %s of %v takes %d bits, which is not a whole number of bytes", shapeText(shape), t, n)
	}
	return int64(n / 8), ""
}

// size returns the size of the tensor by its type and shape.
func (t *Tensor) size() (int64, error) {
	n, reason := size(t.DType, t.Shape)
	if reason != "" {
		return 0, fmt.Errorf("safetensors: tensor %q: %s", short(t.Name), reason)
	}
	return n, nil
}

// shapeText formats a shape for an error, truncated if long.
func shapeText(shape []int) string {
	const most = 8
	if len(shape) <= most {
		return fmt.Sprint(shape)
	}
	s := fmt.Sprint(shape[:most])
	return fmt.Sprintf("%s …] (%d dimensions)", s[:len(s)-1], len(shape))
}

// byPlace compares tensors by their position in the file. Empty tensors precede
// others at the same position, by name.
func byPlace(a, b Tensor) int {
	if c := cmp.Compare(a.Begin, b.Begin); c != 0 {
		return c
	}
	if c := cmp.Compare(a.End, b.End); c != 0 {
		return c
	}
	return cmp.Compare(a.Name, b.Name)
}
