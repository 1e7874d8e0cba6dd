package ddp

import (
	"slices"

	"github.com/gochorus/chorus/memory"
)

// A bucket is the numbers of gradients that are reduced together, in the order of the wire.
type bucket struct {
	grads []int
	at    []int // the first element of each
	len   int   // elements in all
}

// wireAlign is the alignment of each gradient in a bucket, in bytes. memory.MakeFlat uses
// the same. The layout depends on the lengths only, so that it is the same on all ranks.
const wireAlign = 16

// layout places gradients of the given lengths in a bucket.
func layout[T memory.Element](lens []int) (at []int, total int) {
	align := wireAlign / memory.DTypeOf[T]().Size()
	for _, n := range lens {
		at = append(at, total)
		total += roundUp(n, align)
	}
	return at, total
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// split cuts the gradients, in the order of the backward pass, into buckets of at most
// bytes bytes. The first bucket is smaller, so that reducing starts early. Within a bucket
// gradients are in the order of their numbers, because they may lie in memory like that.
func split[T memory.Element](lens, order []int, firstBytes, bytes int) []bucket {
	var bs []bucket
	size := memory.DTypeOf[T]().Size()
	limit := firstBytes
	for len(order) > 0 {
		n, sum := 1, lens[order[0]]*size
		for n < len(order) && sum+lens[order[n]]*size <= limit {
			sum += lens[order[n]] * size
			n++
		}
		b := bucket{grads: slices.Sorted(slices.Values(order[:n]))}
		b.at, b.len = layout[T](pick(lens, b.grads))
		bs = append(bs, b)
		order, limit = order[n:], bytes
	}
	return bs
}

// backwards is the expected order of n gradients in the backward pass: from the last to the
// first.
func backwards(n int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = n - 1 - i
	}
	return order
}

// adjacent returns the memory over the gradients of a bucket if they lie in it exactly as
// on the wire. Gradients of memory.MakeFlat do, and need no copies.
func adjacent[T memory.Element](b *bucket, grads []memory.Slice[T]) (memory.Slice[T], bool) {
	first := grads[b.grads[0]]
	root := first.Buffer()
	size := memory.DTypeOf[T]().Size()
	for j, i := range b.grads {
		if x := grads[i]; root == nil || x.Buffer() != root || x.Offset() != first.Offset()+b.at[j]*size {
			return memory.Slice[T]{}, false
		}
	}
	flat, err := memory.View[T](root, first.Offset(), b.len)
	return flat, err == nil
}

func lengths[T memory.Element](xs []memory.Slice[T]) []int {
	n := make([]int, len(xs))
	for i, x := range xs {
		n[i] = x.Len()
	}
	return n
}

// pick returns the elements of xs with the indexes.
func pick(xs, indexes []int) []int {
	part := make([]int, len(indexes))
	for k, i := range indexes {
		part[k] = xs[i]
	}
	return part
}
