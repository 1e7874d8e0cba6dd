package ddp

import (
	"slices"
	"testing"
	"time"

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

// Setting returns the setting in use.
func (r *Reducer) Setting() Measurement {
	return Measurement{Group: slices.Index(r.queue.trial.groups, r.g), BucketBytes: r.cfg.BucketBytes}
}

// Setting returns the setting in use.
func (u *Units[M, P]) Setting() Measurement {
	return Measurement{Group: slices.Index(u.queue.trial.groups, u.g), Prefetch: u.prefetch}
}

// OpenEvents returns the number of steps whose ends have events.
func (r *Reducer) OpenEvents() int { return len(r.queue.trial.marks) }

// TrialSteps returns the number of steps before the choice.
func (r *Reducer) TrialSteps() int { return r.queue.trial.plan.end() }

// TrialSteps returns the number of passes before the choice.
func (u *Units[M, P]) TrialSteps() int { return u.queue.trial.plan.end() }

// InjectTimes replaces the times of steps by those of their settings.
func (r *Reducer) InjectTimes(times func(m Measurement) time.Duration) { r.queue.trial.inject(times) }

// InjectTimes replaces the times of steps by those of their settings.
func (u *Units[M, P]) InjectTimes(times func(m Measurement) time.Duration) {
	u.queue.trial.inject(times)
}

func (t *trial) inject(times func(m Measurement) time.Duration) {
	t.elapsed = func(step, _ int) (time.Duration, error) {
		return times(t.settings[t.plan.next(warmUp+step)]), nil
	}
}
