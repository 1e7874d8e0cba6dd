package comm

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Gaps reads what lies in the buckets of a local rank, before any gradient is
// ready.
func (r *Reducer[T]) Gaps(t *testing.T, local int) []T {
	t.Helper()
	var all []T
	for k := range r.buckets {
		flat := r.buckets[k].locals[local].flat
		h := make([]T, flat.Len())
		require.NoError(t, flat.CopyTo(r.g.members[local].stream, h))
		all = append(all, h...)
	}
	return all
}

// How the coalesced functions divide tensors.
var (
	BucketsThatReach = bucketsThatReach
	BucketsWithin    = bucketsWithin
)
