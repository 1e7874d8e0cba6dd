package comm

import (
	"slices"

	"github.com/gochorus/chorus/memory"
)

// A bucket is gradients that are reduced together, by their numbers, in the order
// in which they lie on the wire.
type bucket struct {
	grads []int
	at    []int // the element at which each begins
	len   int   // elements in all
}

// wireAlign is the alignment of each gradient in a bucket, in bytes, that of
// memory.MakeFlat. The layout depends on the lengths only, so that all ranks
// have the same.
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

// split cuts the gradients, in the order in which backward makes them, into
// buckets of at most size bytes. The first bucket is smaller, so that reducing
// starts early. Within a bucket they are in the order of their numbers, in which
// they may lie in memory already.
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

// backwards is the order in which backward makes n gradients, as far as one can
// tell before: from the last to the first.
func backwards(n int) []int {
	order := make([]int, n)
	for i := range order {
		order[i] = n - 1 - i
	}
	return order
}

// adjacent returns the memory over the gradients of a bucket if they lie in it
// exactly as on the wire, as those of memory.MakeFlat do: then nothing has to be
// gathered.
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
