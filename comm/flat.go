package comm

import (
	"slices"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A limit is how many bytes of tensors are put together.
type limit struct {
	bytes int
	reach bool // the last tensor of a bucket reaches it; otherwise none exceeds it but alone
}

// buckets puts tensors of one type together. Those that are left over come last, by
// type, in the order in which the types came.
func (l limit) buckets(ts []tensor.Tensor) (buckets [][]int) {
	type open struct {
		indexes []int
		bytes   int
	}
	byType := map[memory.DType]*open{}
	var types []memory.DType
	var b *open
	for i := range ts {
		t := &ts[i]
		if i == 0 || t.DType() != ts[i-1].DType() {
			b = byType[t.DType()]
		}
		if b == nil {
			b = &open{indexes: make([]int, 0, len(ts)-i)}
			byType[t.DType()] = b
			types = append(types, t.DType())
		}
		if !l.reach && b.bytes > 0 && b.bytes+t.Bytes() > l.bytes {
			buckets = append(buckets, b.indexes)
			*b = open{}
		}
		b.indexes = append(b.indexes, i)
		if b.bytes += t.Bytes(); l.reach && b.bytes >= l.bytes {
			buckets = append(buckets, b.indexes)
			*b = open{}
		}
	}
	for _, d := range types {
		if b := byType[d]; len(b.indexes) > 0 {
			buckets = append(buckets, b.indexes)
		}
	}
	return buckets
}

// pick returns those of xs with the indexes, which it may share with xs.
func pick[E any](xs []E, indexes []int) []E {
	if len(indexes) == len(xs) && slices.IsSorted(indexes) {
		return xs // each once
	}
	part := make([]E, len(indexes))
	for k, i := range indexes {
		part[k] = xs[i]
	}
	return part
}

// putBack is pick the other way round: it puts the parts to where they belong in all, which
// may become the parts.
func putBack[E any](all []E, indexes []int, parts []E) []E {
	if len(indexes) == len(all) && slices.IsSorted(indexes) {
		return parts // each once
	}
	for k, i := range indexes {
		all[i] = parts[k]
	}
	return all
}

// flatten returns the elements of tensors of one type and device one after the other.
// Those of a single contiguous tensor are where they are.
func (g *Group) flatten(ts []tensor.Tensor) (flat tensor.Tensor, err error) {
	if len(ts) == 1 && ts[0].Contiguous() {
		flat, err := ts[0].View(-1)
		return flat.Retain(), err
	}
	if err := g.record(ts...); err != nil {
		return flat, err
	}
	s := g.streamOf(ts[0])
	if flat, err = tensor.Make(s, ts[0].DType(), lengthOf(ts)); err != nil {
		return flat, err
	}
	if err := tensor.Flatten(s, []tensor.Tensor{flat}, ts); err != nil {
		_ = flat.Close()
		return tensor.Tensor{}, err
	}
	return flat, nil
}

// lengthOf is how many elements tensors have together.
func lengthOf(ts []tensor.Tensor) int {
	n := 0
	for i := range ts {
		n += ts[i].Len()
	}
	return n
}
