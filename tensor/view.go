package tensor

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
)

// view returns an array that borrows the memory of t, with its own copies of the shape and
// strides.
func (t Tensor) view() strided.Array {
	v := t.at().Borrow()
	v.Shape, v.Strides = slices.Clone(v.Shape), slices.Clone(v.Strides)
	return v
}

// dim is strided.WrapDim for an operation that needs a dimension.
func (t Tensor) dim(op string, dim int) (int, error) {
	shape := t.at().Shape
	if len(shape) == 0 {
		return 0, fmt.Errorf("tensor: %s: the tensor has no dimensions", op)
	}
	d, err := strided.WrapDim(dim, len(shape))
	if err != nil {
		return 0, fmt.Errorf("tensor: %s of shape %v: %w", op, shape, err)
	}
	return d, nil
}

// T returns the view with the last two dimensions exchanged, as torch's mT.
func (t Tensor) T() Tensor {
	v := t.view()
	if n := len(v.Shape); n >= 2 {
		exchange(v, n-1, n-2)
	}
	return Tensor{strided.New(v)}
}

func exchange(v strided.Array, a, b int) {
	v.Shape[a], v.Shape[b] = v.Shape[b], v.Shape[a]
	v.Strides[a], v.Strides[b] = v.Strides[b], v.Strides[a]
}

// Transpose returns the view with two dimensions exchanged (torch.transpose).
func (t Tensor) Transpose(a, b int) (Tensor, error) {
	a, err := t.dim("transpose", a)
	if err != nil {
		return Tensor{}, err
	}
	if b, err = t.dim("transpose", b); err != nil {
		return Tensor{}, err
	}
	v := t.view()
	exchange(v, a, b)
	return of(v, nil)
}

// Permute returns the view whose dimension i is dimension dims[i] of t
// (torch.permute).
func (t Tensor) Permute(dims ...int) (Tensor, error) {
	a := t.at()
	if len(dims) != len(a.Shape) {
		return Tensor{}, fmt.Errorf("tensor: permute shape %v to %v: want each dimension once", a.Shape, dims)
	}
	v := t.view()
	seen := make([]bool, len(dims))
	for i, d := range dims {
		d, err := t.dim("permute", d)
		if err != nil {
			return Tensor{}, err
		}
		if seen[d] {
			return Tensor{}, fmt.Errorf("tensor: permute shape %v to %v: want each dimension once", a.Shape, dims)
		}
		seen[d] = true
		v.Shape[i], v.Strides[i] = a.Shape[d], a.Strides[d]
	}
	return of(v, nil)
}

// Narrow returns the view of length n from start along a dimension, as torch's
// narrow, where a negative start counts from the end.
func (t Tensor) Narrow(dim, start, n int) (Tensor, error) {
	d, err := t.dim("narrow", dim)
	if err != nil {
		return Tensor{}, err
	}
	from, shape := start, t.at().Shape
	if from < 0 {
		from += shape[d]
	}
	if from < 0 || n < 0 || from > shape[d]-n {
		return Tensor{}, fmt.Errorf("tensor: narrow dimension %d of shape %v to %d from %d: out of range", dim, shape, n, start)
	}
	return of(t.narrow(d, from, n), nil)
}

func (t Tensor) narrow(d, from, n int) strided.Array {
	v := t.view()
	v.Shape[d] = n
	v.Offset += from * v.Strides[d] * v.DType.Size()
	return v
}

// Step returns the view of every step-th of the elements from start to stop-1
// along a dimension, as torch's t[start:stop:step]: negative bounds count from
// the end, and bounds that are out of range are clipped. The step must be at
// least 1.
func (t Tensor) Step(dim, start, stop, step int) (Tensor, error) {
	d, err := t.dim("step", dim)
	if err != nil {
		return Tensor{}, err
	}
	shape := t.at().Shape
	if step < 1 {
		return Tensor{}, fmt.Errorf("tensor: step over dimension %d of shape %v by %d: want 1 or more", dim, shape, step)
	}
	clip := func(i int) int {
		if i < 0 {
			i += shape[d]
		}
		return min(max(0, i), shape[d])
	}
	from, to := clip(start), clip(stop)
	v := t.narrow(d, from, max(0, to-from))
	v.Shape[d] = (v.Shape[d] + step - 1) / step
	v.Strides[d] *= step
	return of(v, nil)
}

// Select returns the view of one index along a dimension, which is removed (torch.select).
func (t Tensor) Select(dim, index int) (Tensor, error) {
	d, err := t.dim("select", dim)
	if err != nil {
		return Tensor{}, err
	}
	i, shape := index, t.at().Shape
	if i < 0 {
		i += shape[d]
	}
	if i < 0 || i >= shape[d] {
		return Tensor{}, fmt.Errorf("tensor: select %d of dimension %d of shape %v: out of range", index, dim, shape)
	}
	v := t.narrow(d, i, 1)
	v.Shape, v.Strides = slices.Delete(v.Shape, d, d+1), slices.Delete(v.Strides, d, d+1)
	return of(v, nil)
}

// Unsqueeze returns the view with a dimension of length 1 inserted before dim
// (torch.unsqueeze).
func (t Tensor) Unsqueeze(dim int) (Tensor, error) {
	v, stride := t.view(), 1
	d, err := strided.WrapDim(dim, len(v.Shape)+1)
	if err != nil {
		return Tensor{}, fmt.Errorf("tensor: unsqueeze shape %v: %w", v.Shape, err)
	}
	if d < len(v.Shape) {
		stride = v.Shape[d] * v.Strides[d]
	}
	v.Shape, v.Strides = slices.Insert(v.Shape, d, 1), slices.Insert(v.Strides, d, stride)
	return of(v, nil)
}

// Expand returns a read-only view of the given shape, which repeats dimensions
// of length 1 and missing leading dimensions (torch.Tensor.expand). A length of -1
// keeps the dimension.
func (t Tensor) Expand(shape ...int) (Tensor, error) { return of(t.at().Expand(shape)) }

// View returns the elements under another shape, without a copy (torch.Tensor.view). One
// dimension may be -1: it is inferred from the others. If the strides do not allow the
// view, Copy the tensor first.
func (t Tensor) View(shape ...int) (Tensor, error) {
	shape, err := t.fill(shape)
	if err != nil {
		return Tensor{}, err
	}
	v := t.at().Borrow()
	strides, ok := viewStrides(v.Shape, v.Strides, shape)
	if !ok {
		return Tensor{}, fmt.Errorf("tensor: view shape %v with strides %v as %v: its elements lie apart: Copy it first", v.Shape, v.Strides, shape)
	}
	v.Shape, v.Strides = shape, strides
	return of(v, nil)
}

// fill replaces -1 by the inferred length.
func (t Tensor) fill(shape []int) ([]int, error) {
	was, have := t.at().Shape, t.Len()
	shape = slices.Clone(shape)
	open, n := -1, 1
	for i, d := range shape {
		switch {
		case d == -1 && open < 0:
			open = i
		case d < 0:
			return nil, fmt.Errorf("tensor: view shape %v as %v: a dimension is negative", was, shape)
		default:
			n *= d
		}
	}
	if open >= 0 && n > 0 && have%n == 0 {
		shape[open], n = have/n, have
	}
	if n != have || open >= 0 && shape[open] < 0 {
		return nil, fmt.Errorf("tensor: view shape %v as %v: it has %d elements", was, shape, have)
	}
	return shape, nil
}

// viewStrides returns the strides of a view of another shape, as torch's computeStride:
// contiguous groups of dimensions are divided again.
func viewStrides(shape, strides, as []int) ([]int, bool) {
	out := strided.RowMajor(as)
	for _, n := range shape {
		if n == 0 {
			return out, true
		}
	}
	at := len(as) - 1
	for end := len(shape); end > 0; {
		begin, n := end-1, shape[end-1]
		for begin > 0 && (shape[begin-1] == 1 || strides[begin-1] == n*strides[end-1]) {
			begin--
			n *= shape[begin]
		}
		stride := strides[end-1]
		done := 1
		for ; at >= 0 && (done < n || as[at] == 1); at-- {
			out[at] = done * stride
			done *= as[at]
		}
		if done != n {
			return nil, false
		}
		end = begin
	}
	return out, true
}

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
