package comm

import (
	"slices"

	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A limit is the maximum size of a bucket.
type limit struct {
	bytes int
	reach bool // the last tensor of a bucket reaches the limit; otherwise only a single tensor exceeds it
}

// buckets groups tensors of one type into buckets. The last, incomplete buckets come at
// the end, ordered by the first tensor of each type.
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

// selectAt returns the elements of xs at the indexes. The result may be xs itself.
func selectAt[E any](xs []E, indexes []int) []E {
	if len(indexes) == len(xs) && slices.IsSorted(indexes) {
		return xs // all elements in order
	}
	part := make([]E, len(indexes))
	for k, i := range indexes {
		part[k] = xs[i]
	}
	return part
}

// storeAt is the inverse of selectAt: it stores parts at the indexes of all, and returns the
// result, which may be parts itself.
func storeAt[E any](all []E, indexes []int, parts []E) []E {
	if len(indexes) == len(all) && slices.IsSorted(indexes) {
		return parts // all elements in order
	}
	for k, i := range indexes {
		all[i] = parts[k]
	}
	return all
}

// flatten returns the elements of tensors of one type and device in one flat tensor. A
// single contiguous tensor is not copied.
func (g *Group) flatten(ts []tensor.Tensor) (flat tensor.Tensor, err error) {
	if len(ts) == 1 && ts[0].Contiguous() {
		flat, err := ts[0].View(-1)
		return flat.Retain(), err
	}
	if err := g.recordStreams(ts...); err != nil {
		return flat, err
	}
	s := g.streamOf(ts[0])
	if flat, err = tensor.Make(s, ts[0].DType(), lengthOf(ts)); err != nil {
		return flat, err
	}
	if err := strided.Flatten(s, []tensor.Tensor{flat}, ts); err != nil {
		_ = flat.Close()
		return tensor.Tensor{}, err
	}
	return flat, nil
}

// lengthOf returns the total number of elements.
func lengthOf(ts []tensor.Tensor) int {
	n := 0
	for i := range ts {
		n += ts[i].Len()
	}
	return n
}
