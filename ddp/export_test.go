package ddp

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// Gaps reads what lies in the buckets of a local rank, before any gradient is
// ready.
func Gaps[T memory.Element](t *testing.T, r *Reducer, local int) []T {
	t.Helper()
	var all []T
	for _, part := range r.parts {
		flat := part.(*holding[T]).wire.(plain[T]).flat[local]
		h := make([]T, flat.Len())
		require.NoError(t, flat.CopyTo(r.g.Stream(local), h))
		all = append(all, h...)
	}
	return all
}

// BucketGrads returns the gradients of each bucket.
func (r *Reducer) BucketGrads() [][]int {
	var all [][]int
	for _, b := range r.queue.buckets {
		all = append(all, b.grads)
	}
	return all
}

// Launched returns how many buckets are reduced in this step so far.
func (r *Reducer) Launched() int { return r.queue.next }

// Buckets returns how many buckets there are.
func (r *Reducer) Buckets() int { return len(r.parts) }

// CompressedRank returns the rank of a gradient's product, or 0 if p does not compress it.
func (p *PowerSGD) CompressedRank(grad tensor.Tensor) int {
	_, _, rank := (&power[float32]{cfg: p.filled()}).factors(grad)
	return rank
}
