package ddp

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
)

// A bucket is the numbers of gradients of one type that are reduced together, as they are on
// the wire.
type bucket struct {
	dtype memory.DType
	grads []int
	at    []int // the first element of each
	len   int   // elements in all
}

// wireAlign is the alignment of each gradient in a bucket, in bytes. memory.MakeFlat uses
// the same. The layout depends on the lengths only, so that it is the same on all ranks.
const wireAlign = 16

// layout places gradients of the given type and lengths in a bucket.
func layout(t memory.DType, lens []int) (at []int, total int) {
	align := wireAlign / t.Size()
	for _, n := range lens {
		at = append(at, total)
		total += roundUp(n, align)
	}
	return at, total
}

func roundUp(n, to int) int { return (n + to - 1) / to * to }

// split cuts the gradients, as the backward pass computes them, into buckets of one type and of
// at most bytes bytes. The first bucket of each type is smaller, so that reducing starts early.
// Buckets are in the order that they become complete. Within a bucket, gradients are
// sorted by number, because this may be their order in memory.
func split(lens []int, types []memory.DType, order []int, firstBytes, bytes int) []bucket {
	type run struct {
		dtype              memory.DType
		grads              []int
		bytes, limit, last int
	}
	var open, done []run
	for turn, i := range order {
		k := slices.IndexFunc(open, func(r run) bool { return r.dtype == types[i] })
		if k < 0 {
			k, open = len(open), append(open, run{dtype: types[i], limit: firstBytes})
		}
		r, n := &open[k], lens[i]*types[i].Size()
		if len(r.grads) > 0 && r.bytes+n > r.limit {
			done = append(done, *r)
			*r = run{dtype: types[i], limit: bytes}
		}
		r.grads, r.bytes, r.last = append(r.grads, i), r.bytes+n, turn
	}
	done = append(done, open...)
	slices.SortFunc(done, func(a, b run) int { return cmp.Compare(a.last, b.last) })
	var bs []bucket
	for _, r := range done {
		b := bucket{dtype: r.dtype, grads: slices.Sorted(slices.Values(r.grads))}
		b.at, b.len = layout(r.dtype, pick(lens, b.grads))
		bs = append(bs, b)
	}
	return bs
}

// sameBuckets reports whether the buckets have the same gradients in the same order.
func sameBuckets(a, b []bucket) bool {
	return slices.EqualFunc(a, b, func(x, y bucket) bool { return slices.Equal(x.grads, y.grads) })
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

// adjacent returns the memory over the gradients of a bucket if they lie in it
// exactly as on the wire, as those of memory.MakeFlat do, so that they need no
// copies.
func adjacent[T memory.Element](b *bucket, grads []gradient) (memory.Slice[T], bool) {
	first := &grads[b.grads[0]]
	size := b.dtype.Size()
	for j, i := range b.grads {
		if x := &grads[i]; x.buffer == nil || x.buffer != first.buffer || x.offset != first.offset+b.at[j]*size {
			return memory.Slice[T]{}, false
		}
	}
	flat, err := memory.View[T](first.buffer, first.offset, b.len)
	return flat, err == nil
}

// pick returns the elements of xs with the indexes.
func pick(xs, indexes []int) []int {
	part := make([]int, len(indexes))
	for k, i := range indexes {
		part[k] = xs[i]
	}
	return part
}

// Rebuild replaces the buckets. Gradients are ordered as in rank 0's last step,
// so that the bucket that is complete first is reduced first; unused gradients
// come last. torch rebuilds by itself after the first step. Here the program
// decides when, because all ranks wait for rank 0's order. Call Rebuild between
// steps. It returns when the group's streams have passed the earlier steps.
// Rebuild keeps the buckets if the order is the same. If ctx ends first, it
// also keeps them, and returns the cause. Collective.
//
// Gradients of memory.MakeFlat are reduced in place as long as the gradients of a bucket are
// neighbours. New buffers are allocated before the old ones are freed. If a graph has captured a step, the old buffers stay until Close,
// so that the graph can still be launched.
func (r *Reducer) Rebuild(ctx context.Context) error {
	const op = "ddp: rebuild buckets"
	if r == nil || r.owner.Closed() {
		return fmt.Errorf("%s: the reducer: %w", op, device.ErrClosed)
	}
	r.queue.mu.Lock()
	defer r.queue.mu.Unlock()
	if r.queue.begun() {
		return fmt.Errorf("%s: in the middle of a step: call Finish before", op)
	}
	if !r.queue.ended {
		return fmt.Errorf("%s: there was no step yet whose order could be taken", op)
	}
	order, err := r.firstOrder(ctx)
	if err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	if sameBuckets(r.split(order, r.cfg.BucketBytes), r.queue.buckets) {
		return nil
	}
	if err := r.arrange(order); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// firstOrder returns rank 0's order of all gradients.
func (r *Reducer) firstOrder(ctx context.Context) ([]int, error) {
	order := slices.Clone(r.queue.last)
	for _, i := range backwards(len(r.grads[0])) {
		if !slices.Contains(order, i) {
			order = append(order, i)
		}
	}
	if err := comm.BroadcastValue(ctx, r.g, 0, &order, nil); err != nil {
		return nil, err
	}
	if !isOrder(order, len(r.grads[0])) {
		return nil, fmt.Errorf("rank 0 has sent an order that is not of the %d gradients of this rank: %w", len(r.grads[0]), comm.ErrMismatch)
	}
	return order, nil
}

// isOrder reports whether order has each of the numbers 0 to n-1 once.
func isOrder(order []int, n int) bool {
	sorted := slices.Sorted(slices.Values(order))
	for i, k := range sorted {
		if i != k {
			return false
		}
	}
	return len(order) == n
}
