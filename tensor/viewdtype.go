package tensor

import (
	"fmt"

	"github.com/gochorus/chorus/memory"
)

// ViewDType returns the same bytes as elements of another type, without a copy
// (torch.Tensor.view of a dtype). Where the sizes differ, the last dimension changes
// with them: its elements must lie side by side, and larger ones must divide it, the
// other strides and the place in memory.
func (t Tensor) ViewDType(as memory.DType) (Tensor, error) {
	from, to := t.dtype.Size(), as.Size()
	fail := func(format string, args ...any) (Tensor, error) {
		return Tensor{}, fmt.Errorf("tensor: view %v as %s: %s", t, as, fmt.Sprintf(format, args...))
	}
	switch {
	case from == 0:
		return fail("there is no tensor")
	case to == 0:
		return fail("that is no type of elements")
	case t.off%to != 0:
		return fail("it begins at byte %d of its memory: want a multiple of %d", t.off, to)
	}
	v := t.view()
	v.dtype = as
	if from == to {
		return v, nil
	}
	last := len(t.shape) - 1
	if last < 0 || t.strides[last] != 1 {
		return fail("elements of another size need a last dimension whose elements lie side by side")
	}
	if t.shape[last]*from%to != 0 {
		return fail("%d bytes of the last dimension are no multiple of %d", t.shape[last]*from, to)
	}
	v.shape[last] = t.shape[last] * from / to
	for i, n := range t.strides[:last] {
		if n*from%to != 0 {
			return fail("the stride %d of dimension %d does not fit", n, i)
		}
		v.strides[i] = n * from / to
	}
	return v, nil
}
