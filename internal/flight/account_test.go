package flight

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/status"
	"github.com/gochorus/chorus/internal/timeline"
)

// TestAccountIsInTheStatus counts failures and durations, and reads them from the status of the process.
func TestAccountIsInTheStatus(t *testing.T) {
	account.errors, account.durations = nil, nil
	r := NewRecorder(0)
	r.CountError(ReasonTimeout)
	r.Name = "data"
	r.CountError(ReasonPeerLost)
	r.CountError(ReasonPeerLost)
	for _, d := range []time.Duration{10 * time.Microsecond, 11 * time.Microsecond, time.Minute} {
		countDuration(&timeline.Record{Bytes: 4096, End: int64(d), Ops: []timeline.Op{{Name: "ncclAllReduce"}}})
	}
	countDuration(&timeline.Record{End: 5, Ops: make([]timeline.Op, 2)})
	p, err := status.Decode(status.Take(time.Minute))
	require.NoError(t, err)
	require.Equal(t, []status.Errors{{Group: "data", Reason: "peer_lost", Count: 2}, {Group: "world", Reason: "timeout", Count: 1}}, p.Errors)
	want := status.Durations{Op: "all_reduce", Size: "le_32KiB", Sum: 60.000021}
	want.Buckets[0], want.Buckets[1], want.Buckets[len(status.DurationBounds)] = 1, 1, 1
	require.Len(t, p.Durations, 1)
	require.InDelta(t, want.Sum, p.Durations[0].Sum, 1e-9)
	p.Durations[0].Sum = want.Sum
	require.Equal(t, want, p.Durations[0])
	for i := range 2 * mostGroups {
		r.Name = fmt.Sprint(i)
		r.CountError(ReasonAsync)
	}
	require.LessOrEqual(t, len(account.errors), mostGroups+1)
	account.errors, account.durations = nil, nil
}
