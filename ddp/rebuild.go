package ddp

import (
	"context"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
)

// Rebuild makes new buckets. Gradients are in the order of rank 0's last step, so that the
// bucket that is complete first is reduced first; unused gradients come last. torch rebuilds
// by itself after the first step. Here the program decides when, because all ranks wait for
// rank 0's order. Call Rebuild between steps. It returns when the group's streams have passed
// the earlier steps. If ctx ends first, Rebuild returns the cause and keeps the buckets. It
// also keeps them if the order is the same. Collective.
//
// Gradients of memory.MakeFlat are reduced in place as long as the gradients of a bucket are
// neighbours. New buffers are allocated before the old ones are freed.
func (r *Reducer) Rebuild(ctx context.Context) error {
	const op = "ddp: rebuild buckets"
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
func (r *Reducer) firstOrder(ctx context.Context) ([]int, error) {
	order := slices.Clone(r.queue.last)
	for _, i := range backwards(len(r.grads[0])) {
		if !slices.Contains(order, i) {
			order = append(order, i)
		}
	}
	err := comm.BroadcastValue(ctx, r.g, 0, &order, nil)
	return order, err
}
