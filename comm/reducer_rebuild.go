package comm

import (
	"context"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
)

// Rebuild makes the buckets anew, of gradients in the order in which they became
// ready on rank 0 in the last step, so that the bucket that is complete first is
// reduced first; those that were not used come last. torch does so by itself after
// the first step; here the program says when, because all ranks have to wait for
// rank 0's answer: Rebuild is collective, it is called between steps, and it
// returns when the group's streams are past the steps before. When ctx ends first
// it returns the cause, and the buckets stay as they are, as they do where the
// order is the same.
//
// Gradients of memory.MakeFlat are reduced where they are as long as those of a
// bucket are neighbours; the buffers of others are allocated before the old ones
// are freed.
func (r *Reducer[T]) Rebuild(ctx context.Context) error {
	const op = "comm: rebuild buckets"
	if r.owner.Closed() {
		return fmt.Errorf("%s: %w", op, device.ErrClosed)
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
	if slices.EqualFunc(r.split(order), r.queue.buckets, func(a, b bucket) bool { return slices.Equal(a.grads, b.grads) }) {
		return nil
	}
	if err := r.arrange(order); err != nil {
		return fmt.Errorf("%s: %w", op, err)
	}
	return nil
}

// firstOrder returns rank 0's order of all gradients.
func (r *Reducer[T]) firstOrder(ctx context.Context) ([]int, error) {
	order := slices.Clone(r.queue.last)
	for _, i := range backwards(len(r.grads[0])) {
		if !slices.Contains(order, i) {
			order = append(order, i)
		}
	}
	err := BroadcastValue(ctx, r.g, 0, &order, nil)
	return order, err
}
