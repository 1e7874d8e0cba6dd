package strided

import (
	"fmt"
	"slices"
)

// Unflatten returns arrays with the shapes of others, one after the other from the start
// of a one-dimensional array. They are contiguous, and borrow the memory.
func (t *Array) Unflatten(like []Array) ([]Array, error) {
	if len(t.Shape) != 1 || !t.Contiguous() {
		return nil, fmt.Errorf("tensor: unflatten shape %v with strides %v: want one dimension without gaps", t.Shape, t.Strides)
	}
	out := make([]Array, len(like))
	at := 0
	for i := range like {
		v := &out[i]
		*v = like[i] // shapes are immutable, so they can be shared
		if !v.Contiguous() {
			v.Strides = RowMajor(v.Shape)
		}
		n := like[i].Len()
		v.mem, v.ref, v.DType, v.Offset = t.mem, nil, t.DType, t.Offset+at*t.DType.Size()
		if at += n; at > t.Shape[0] {
			return nil, fmt.Errorf("tensor: unflatten shape %v as %d tensors: the first %d have %d elements", t.Shape, len(like), i+1, at)
		}
	}
	return out, nil
}

// Unflatten is Array.Unflatten for tensors.
func Unflatten[T Tensor](t T, like []T) ([]T, error) {
	flat := t.array()
	out, err := flat.Unflatten(arrays(like))
	return tensors[T](out), err
}

// UnflattenEach is Unflatten of several tensors of one length, which own their memory.
// Each view owns a reference to that memory, like a tensor of Retain, and must be closed
// too.
func UnflattenEach[T Tensor](flats, like []T) ([][]T, error) {
	out := make([][]T, len(flats))
	for i := range out {
		t, first := &arrays(flats)[i], &arrays(flats)[0]
		var views []Array
		if i == 0 || t.DType != first.DType || t.Offset != first.Offset || !slices.Equal(t.Shape, first.Shape) || !t.Contiguous() {
			var err error
			if views, err = t.Unflatten(arrays(like)); err != nil {
				return nil, err
			}
		} else {
			views = slices.Clone(arrays(out[0])) // the same except for the memory
		}
		t.shareOut(views)
		out[i] = tensors[T](views)
	}
	return out, nil
}

// shareOut gives each view a reference to the memory of t.
func (t *Array) shareOut(views []Array) {
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

// RetainAll calls Retain for many tensors.
func RetainAll[T Tensor](ts []T) []T {
	refs, out := make([]reference, len(ts)), slices.Clone(ts)
	for i := range out {
		x := &arrays(out)[i]
		*x = x.retain(&refs[i])
	}
	return out
}
