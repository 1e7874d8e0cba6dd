package tensor

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/strided"
)

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

// part is narrow for a divided dimension. Shapes and strides are immutable, so parts can
// share them with the part before.
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

// Unflatten returns views of a one-dimensional tensor with the shapes of other tensors,
// one after the other from its start (torch._utils._unflatten_dense_tensors). They are
// contiguous.
func (t Tensor) Unflatten(like []Tensor) ([]Tensor, error) { return strided.Unflatten(t, like) }
