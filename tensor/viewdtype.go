package tensor

import (
	"fmt"

	"github.com/gochorus/chorus/memory"
)

// ViewDType returns the same bytes as elements of another type, without a copy
// (torch.Tensor.view of a dtype). If the sizes differ, the last dimension changes with
// them: its elements must be contiguous, and the larger size must divide the last
// dimension, the other strides and the offset.
func (t Tensor) ViewDType(as memory.DType) (Tensor, error) {
	v := t.view()
	from, to := v.DType.Size(), as.Size()
	fail := func(format string, args ...any) (Tensor, error) {
		return Tensor{}, fmt.Errorf("tensor: view %v as %s: %s", t, as, fmt.Sprintf(format, args...))
	}
	switch {
	case from == 0:
		return fail("there is no tensor")
	case to == 0:
		return fail("that is not an element type")
	case v.Offset%to != 0:
		return fail("it begins at byte %d of its memory: want a multiple of %d", v.Offset, to)
	}
	v.DType = as
	if from == to {
		return of(v, nil)
	}
	last := len(v.Shape) - 1
	if last < 0 || v.Strides[last] != 1 {
		return fail("elements of another size need a last dimension whose elements lie side by side")
	}
	if v.Shape[last]*from%to != 0 {
		return fail("%d bytes of the last dimension are not a multiple of %d", v.Shape[last]*from, to)
	}
	v.Shape[last] = v.Shape[last] * from / to
	for i, n := range v.Strides[:last] {
		if n*from%to != 0 {
			return fail("the stride %d of dimension %d does not fit", n, i)
		}
		v.Strides[i] = n * from / to
	}
	return of(v, nil)
}
