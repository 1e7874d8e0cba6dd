package tensor

import (
	"fmt"
	"slices"
)

// view returns the tensor as one that borrows its memory, with a shape and strides
// of its own to be changed.
func (t Tensor) view() Tensor {
	t.ref = nil
	t.shape, t.strides = slices.Clone(t.shape), slices.Clone(t.strides)
	return t
}

// WrapDim returns the dimension that dim means of n: a negative one counts from the
// end (torch's maybe_wrap_dim). A tensor without dimensions is taken for one of one.
func WrapDim(dim, n int) (int, error) {
	n = max(1, n)
	if dim < -n || dim >= n {
		return 0, fmt.Errorf("dimension out of range (expected to be in range of [%d, %d], but got %d)", -n, n-1, dim)
	}
	if dim < 0 {
		dim += n
	}
	return dim, nil
}

// dim is WrapDim for an operation that needs a dimension.
func (t Tensor) dim(op string, dim int) (int, error) {
	if len(t.shape) == 0 {
		return 0, fmt.Errorf("tensor: %s: the tensor has no dimensions", op)
	}
	d, err := WrapDim(dim, len(t.shape))
	if err != nil {
		return 0, fmt.Errorf("tensor: %s of shape %v: %w", op, t.shape, err)
	}
	return d, nil
}

// T returns the view with the last two dimensions exchanged, as torch's mT.
func (t Tensor) T() Tensor {
	t = t.view()
	if n := len(t.shape); n >= 2 {
		t.shape[n-1], t.shape[n-2] = t.shape[n-2], t.shape[n-1]
		t.strides[n-1], t.strides[n-2] = t.strides[n-2], t.strides[n-1]
	}
	return t
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
	t = t.view()
	t.shape[a], t.shape[b] = t.shape[b], t.shape[a]
	t.strides[a], t.strides[b] = t.strides[b], t.strides[a]
	return t, nil
}

// Permute returns the view whose dimension i is dimension dims[i] of t
// (torch.permute).
func (t Tensor) Permute(dims ...int) (Tensor, error) {
	if len(dims) != len(t.shape) {
		return Tensor{}, fmt.Errorf("tensor: permute shape %v to %v: want each dimension once", t.shape, dims)
	}
	v := t.view()
	seen := make([]bool, len(dims))
	for i, d := range dims {
		d, err := t.dim("permute", d)
		if err != nil {
			return Tensor{}, err
		}
		if seen[d] {
			return Tensor{}, fmt.Errorf("tensor: permute shape %v to %v: want each dimension once", t.shape, dims)
		}
		seen[d] = true
		v.shape[i], v.strides[i] = t.shape[d], t.strides[d]
	}
	return v, nil
}

// Narrow returns the view of length n from start along a dimension, as torch's
// narrow. A negative start counts from the end.
func (t Tensor) Narrow(dim, start, n int) (Tensor, error) {
	d, err := t.dim("narrow", dim)
	if err != nil {
		return Tensor{}, err
	}
	from := start
	if from < 0 {
		from += t.shape[d]
	}
	if from < 0 || n < 0 || from > t.shape[d]-n {
		return Tensor{}, fmt.Errorf("tensor: narrow dimension %d of shape %v to %d from %d: out of range", dim, t.shape, n, start)
	}
	return t.narrow(d, from, n), nil
}

func (t Tensor) narrow(d, from, n int) Tensor {
	t = t.view()
	t.shape[d] = n
	t.off += from * t.strides[d] * t.dtype.Size()
	return t
}

// Step returns the view of every step-th of the elements from start to stop-1 along
// a dimension, as torch's t[start:stop:step]: negative bounds count from the end,
// and what is out of range is cut off. step is at least 1.
func (t Tensor) Step(dim, start, stop, step int) (Tensor, error) {
	d, err := t.dim("step", dim)
	if err != nil {
		return Tensor{}, err
	}
	if step < 1 {
		return Tensor{}, fmt.Errorf("tensor: step over dimension %d of shape %v by %d: want 1 or more", dim, t.shape, step)
	}
	clip := func(i int) int {
		if i < 0 {
			i += t.shape[d]
		}
		return min(max(0, i), t.shape[d])
	}
	from, to := clip(start), clip(stop)
	v := t.narrow(d, from, max(0, to-from))
	v.shape[d] = (v.shape[d] + step - 1) / step
	v.strides[d] *= step
	return v, nil
}

// Select returns the view of one index along a dimension, which goes (torch.select).
func (t Tensor) Select(dim, index int) (Tensor, error) {
	d, err := t.dim("select", dim)
	if err != nil {
		return Tensor{}, err
	}
	i := index
	if i < 0 {
		i += t.shape[d]
	}
	if i < 0 || i >= t.shape[d] {
		return Tensor{}, fmt.Errorf("tensor: select %d of dimension %d of shape %v: out of range", index, dim, t.shape)
	}
	v := t.narrow(d, i, 1)
	v.shape, v.strides = slices.Delete(v.shape, d, d+1), slices.Delete(v.strides, d, d+1)
	return v, nil
}

// Unsqueeze returns the view with a dimension of 1 before dim (torch.unsqueeze).
func (t Tensor) Unsqueeze(dim int) (Tensor, error) {
	d, err := WrapDim(dim, len(t.shape)+1)
	if err != nil {
		return Tensor{}, fmt.Errorf("tensor: unsqueeze shape %v: %w", t.shape, err)
	}
	v, stride := t.view(), 1
	if d < len(t.shape) {
		stride = t.shape[d] * t.strides[d]
	}
	v.shape, v.strides = slices.Insert(v.shape, d, 1), slices.Insert(v.strides, d, stride)
	return v, nil
}

// Expand returns the view of the given shape in which dimensions of 1, and missing
// ones in front, repeat (torch.Tensor.expand). It can be read from only.
func (t Tensor) Expand(shape ...int) (Tensor, error) {
	more := len(shape) - len(t.shape)
	if more < 0 {
		return Tensor{}, fmt.Errorf("tensor: expand shape %v to %v: too few dimensions", t.shape, shape)
	}
	v := t
	v.ref, v.shape, v.strides = nil, slices.Clone(shape), make([]int, len(shape))
	for i, n := range shape {
		switch {
		case n < 0:
			return Tensor{}, fmt.Errorf("tensor: expand shape %v to %v: a dimension is negative", t.shape, shape)
		case i >= more && t.shape[i-more] == n:
			v.strides[i] = t.strides[i-more]
		case i >= more && t.shape[i-more] != 1:
			return Tensor{}, fmt.Errorf("tensor: expand shape %v to %v: only a dimension of 1 repeats", t.shape, shape)
		}
	}
	return v, nil
}

// View returns the elements under another shape, without a copy
// (torch.Tensor.view). One dimension may be -1: it is what is left. Where the
// strides allow no such view, Copy the tensor first.
func (t Tensor) View(shape ...int) (Tensor, error) {
	shape, err := t.fill(shape)
	if err != nil {
		return Tensor{}, err
	}
	strides, ok := viewStrides(t.shape, t.strides, shape)
	if !ok {
		return Tensor{}, fmt.Errorf("tensor: view shape %v with strides %v as %v: its elements lie apart: Copy it first", t.shape, t.strides, shape)
	}
	t.ref, t.shape, t.strides = nil, shape, strides
	return t, nil
}

// fill puts in what -1 stands for.
func (t Tensor) fill(shape []int) ([]int, error) {
	shape = slices.Clone(shape)
	open, n := -1, 1
	for i, d := range shape {
		switch {
		case d == -1 && open < 0:
			open = i
		case d < 0:
			return nil, fmt.Errorf("tensor: view shape %v as %v: a dimension is negative", t.shape, shape)
		default:
			n *= d
		}
	}
	have := t.Len()
	if open >= 0 && n > 0 && have%n == 0 {
		shape[open], n = have/n, have
	}
	if n != have || open >= 0 && shape[open] < 0 {
		return nil, fmt.Errorf("tensor: view shape %v as %v: it has %d elements", t.shape, shape, have)
	}
	return shape, nil
}

// viewStrides returns the strides of a view of another shape, as torch's
// computeStride: runs of dimensions that lie as one are divided anew.
func viewStrides(shape, strides, as []int) ([]int, bool) {
	out := rowMajor(as)
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
