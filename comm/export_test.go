package comm

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/tensor"
)

// Gaps reads what lies in the buckets of a local rank, before any gradient is
// ready.
func (r *Reducer[T]) Gaps(t *testing.T, local int) []T {
	t.Helper()
	var all []T
	for k := range r.parts {
		flat := r.parts[k][local].wire.(copied[T]).flat
		h := make([]T, flat.Len())
		require.NoError(t, flat.CopyTo(r.g.members[local].stream, h))
		all = append(all, h...)
	}
	return all
}

// How the coalesced functions divide tensors.
var (
	BucketsThatReach = func(ts []tensor.Tensor, n int) [][]int { return limit{n, true}.buckets(ts) }
	BucketsWithin    = func(ts []tensor.Tensor, n int) [][]int { return limit{n, false}.buckets(ts) }
)

// BucketGrads returns the gradients of each bucket.
func (r *Reducer[T]) BucketGrads() [][]int {
	var all [][]int
	for _, b := range r.queue.buckets {
		all = append(all, b.grads)
	}
	return all
}

// Launched returns how many buckets are reduced in this step so far.
func (r *Reducer[T]) Launched() int { return r.queue.next }

// SetDirectBytes lets copies by themselves and NCCL take over from one kernel at another
// size, for a test; -1 is at once.
func SetDirectBytes(t testing.TB, n int) {
	old := directBytes
	directBytes = n
	t.Cleanup(func() { directBytes = old })
}

// SetPairBytes does so for operations with one other device.
func SetPairBytes(t testing.TB, n int) {
	old := pairBytes
	pairBytes = n
	t.Cleanup(func() { pairBytes = old })
}

// SetOwnBytes lets NCCL take over from own kernels at other sizes, for a test.
func SetOwnBytes(t *testing.T, all, part int) {
	old := [2]int{ownBytes, ownPartBytes}
	ownBytes, ownPartBytes = all, part
	t.Cleanup(func() { ownBytes, ownPartBytes = old[0], old[1] })
}

// Choice returns what carries a collective of local rank i out.
func (g *Group) Choice(i int, x nccl.Collective) Strategy { return g.members[i].ways.choose(x) }

// Measure is the part of Tune that measures.
func (g *Group) Measure(ctx context.Context, plan []Choice) error {
	var eg errgroup.Group
	for i := range g.members {
		eg.Go(func() error {
			_, err := g.members[i].tune(ctx, plan)
			return err
		})
	}
	if err := eg.Wait(); err != nil {
		return err
	}
	return g.tuneEngines(ctx, &Tuning{Choices: plan})
}

// Check reads the choices of a Tuning, as a file's are.
func (t *Tuning) Check() error { return t.check() }

// Fill takes the times of all ranks, in the order of the choices and their strategies.
func (t *Tuning) Fill(all [][]float64) {
	t.fill(all)
	t.sort()
}
