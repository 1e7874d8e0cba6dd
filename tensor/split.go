package tensor

import (
	"fmt"
	"slices"
)

// Chunk cuts a dimension into at most n views of equal length, the last perhaps
// shorter (torch.chunk): each has the nth part, rounded up, so that there can be
// fewer than n. A dimension of 0 gives n empty views.
func (t Tensor) Chunk(n, dim int) ([]Tensor, error) {
	d, err := t.dim("chunk", dim)
	if err != nil {
		return nil, err
	}
	if n < 1 {
		return nil, fmt.Errorf("tensor: chunk dimension %d of shape %v into %d: want 1 or more", dim, t.shape, n)
	}
	if t.shape[d] == 0 {
		return t.SplitSizes(make([]int, n), d)
	}
	return t.Split((t.shape[d]+n-1)/n, d)
}

// Split cuts a dimension into views of the given length, the last perhaps shorter
// (torch.split).
func (t Tensor) Split(size, dim int) ([]Tensor, error) {
	d, err := t.dim("split", dim)
	if err != nil {
		return nil, err
	}
	all := t.shape[d]
	if size < 0 || size == 0 && all > 0 {
		return nil, fmt.Errorf("tensor: split dimension %d of shape %v by %d: want 1 or more", dim, t.shape, size)
	}
	if all == 0 {
		return []Tensor{t.view()}, nil
	}
	out := make([]Tensor, 0, (all+size-1)/size)
	for at := 0; at < all; at += size {
		out = append(out, t.part(d, at, min(size, all-at), out))
	}
	return out, nil
}

// SplitSizes cuts a dimension into views of the given lengths
// (torch.split_with_sizes).
func (t Tensor) SplitSizes(sizes []int, dim int) ([]Tensor, error) {
	d, err := t.dim("split", dim)
	if err != nil {
		return nil, err
	}
	sum := 0
	for _, n := range sizes {
		if n < 0 {
			return nil, fmt.Errorf("tensor: split dimension %d of shape %v by %v: want no negative sizes", dim, t.shape, sizes)
		}
		sum = min(sum+min(n, t.shape[d]+1), t.shape[d]+1) // which does not overflow
	}
	if sum != t.shape[d] {
		return nil, fmt.Errorf("tensor: split dimension %d of shape %v by %v: want sizes that sum exactly to %d", dim, t.shape, sizes, t.shape[d])
	}
	out := make([]Tensor, 0, len(sizes))
	at := 0
	for _, n := range sizes {
		out = append(out, t.part(d, at, n, out))
		at += n
	}
	return out, nil
}

// part is narrow for a dimension that is cut. Shapes and strides are never changed, so that
// they can be shared, also with the part before.
func (t Tensor) part(d, from, n int, before []Tensor) Tensor {
	t.ref = nil
	t.off += from * t.strides[d] * t.dtype.Size()
	if i := len(before) - 1; i >= 0 && before[i].shape[d] == n {
		t.shape = before[i].shape
		return t
	}
	t.shape = slices.Clone(t.shape)
	t.shape[d] = n
	return t
}

// Unflatten returns views of a tensor of one dimension with the shapes of others, one
// after the other from its start (torch._utils._unflatten_dense_tensors). They are
// contiguous.
func (t Tensor) Unflatten(like []Tensor) ([]Tensor, error) {
	if len(t.shape) != 1 || !t.Contiguous() {
		return nil, fmt.Errorf("tensor: unflatten shape %v with strides %v: want one dimension without gaps", t.shape, t.strides)
	}
	out := make([]Tensor, len(like))
	at := 0
	for i := range like {
		v := &out[i]
		*v = like[i] // shapes are never changed, so that they can be shared
		if !v.Contiguous() {
			v.strides = rowMajor(v.shape)
		}
		n := like[i].Len()
		v.mem, v.ref, v.dtype, v.off = t.mem, nil, t.dtype, t.off+at*t.dtype.Size()
		if at += n; at > t.shape[0] {
			return nil, fmt.Errorf("tensor: unflatten shape %v as %d tensors: the first %d have %d elements", t.shape, len(like), i+1, at)
		}
	}
	return out, nil
}

// UnflattenEach is Unflatten of several tensors of one length, which own their memory. Each
// view has a share of its own in that, as Retain gives it, to be closed too.
func UnflattenEach(flats, like []Tensor) ([][]Tensor, error) {
	out := make([][]Tensor, len(flats))
	for i := range flats {
		t := &flats[i]
		if i == 0 || t.dtype != flats[0].dtype || t.off != flats[0].off || !SameShape(*t, flats[0]) || !t.Contiguous() {
			var err error
			if out[i], err = t.Unflatten(like); err != nil {
				return nil, err
			}
		} else {
			out[i] = slices.Clone(out[0]) // the same but for the memory
		}
		t.shareOut(out[i])
	}
	return out, nil
}

// shareOut gives views shares in the memory of t.
func (t *Tensor) shareOut(views []Tensor) {
	if t.mem == nil {
		return
	}
	t.mem.mu.Lock()
	defer t.mem.mu.Unlock()
	owned := t.mem.refs > 0
	if owned {
		t.mem.refs += len(views)
	}
	refs := make([]reference, len(views))
	for i := range views {
		v := &views[i]
		v.mem, v.ref = t.mem, nil
		if owned {
			refs[i].mem = t.mem
			v.ref = &refs[i]
		}
	}
}
