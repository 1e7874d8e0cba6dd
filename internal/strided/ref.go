package strided

import "unsafe"

// A Ref has the array of a tensor. The public tensor embeds it and has no other field.
type Ref struct{ a Array }

// New returns the Ref of a new tensor.
func New(a Array) Ref { return Ref{a} }

// At returns the array of a Ref, which package tensor has.
func At(r *Ref) *Array { return &r.a }

func (r Ref) array() Array { return r.a }

// A Tensor is the public tensor.
type Tensor interface{ array() Array }

// Of returns the array of a tensor.
func Of[T Tensor](t T) Array { return t.array() }

// arrays returns the arrays of tensors, in place: a tensor consists of its Ref, and a Ref
// of its Array.
func arrays[T Tensor](ts []T) []Array {
	return unsafe.Slice((*Array)(unsafe.Pointer(unsafe.SliceData(ts))), len(ts))
}

// arrayLists is arrays for lists of tensors.
func arrayLists[T Tensor](lists [][]T) [][]Array {
	return unsafe.Slice((*[]Array)(unsafe.Pointer(unsafe.SliceData(lists))), len(lists))
}

// tensors is the inverse of arrays.
func tensors[T Tensor](as []Array) []T {
	return unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(as))), len(as))
}
