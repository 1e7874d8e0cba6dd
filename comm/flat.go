package comm

import (
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
	for i, t := range ts {
		b := byType[t.DType()]
		if b == nil {
			b = &open{}
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

func pick[E any](xs []E, indexes []int) []E {
	part := make([]E, len(indexes))
	for k, i := range indexes {
		part[k] = xs[i]
	}
	return part
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
	n := 0
	for _, t := range ts {
		n += t.Len()
	}
	s := g.streamOf(ts[0])
	if flat, err = tensor.Make(s, ts[0].DType(), n); err != nil {
		return flat, err
	}
	parts, err := flat.Unflatten(ts)
	if err == nil {
		err = tensor.CopyAll(s, parts, ts)
	}
	if err != nil {
		_ = flat.Close()
		return tensor.Tensor{}, err
	}
	return flat, nil
}

// unflatten returns the parts of a flat tensor with the shapes of others, each with
// a share in the memory.
func unflatten(flat tensor.Tensor, like []tensor.Tensor) ([]tensor.Tensor, error) {
	parts, err := flat.Unflatten(like)
	for i, p := range parts {
		parts[i] = p.Retain()
	}
	return parts, err
}
