package flight

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A short dump has the operation in which the ranks wait, also if many more were issued since.
func TestShortDump(t *testing.T) {
	trace := func(completed, issued int) (list []Operation) {
		for i := 1; i <= issued; i++ {
			o := Operation{Record: uint64(i), State: Scheduled.String()}
			if i <= completed {
				o.State = Completed.String()
			}
			list = append(list, o)
		}
		return list
	}
	records := func(list []Operation) (out []uint64) {
		for _, o := range list {
			out = append(out, o.Record)
		}
		return out
	}
	require.Equal(t, []uint64{1, 2, 3}, records(shorten(trace(1, 3), 4)))
	require.Equal(t, []uint64{10, 11, 99, 100}, records(shorten(trace(10, 100), 4)))
	require.Equal(t, []uint64{1, 2, 99, 100}, records(shorten(trace(0, 100), 4)))
	require.Equal(t, []uint64{97, 98, 99, 100}, records(shorten(trace(98, 100), 4)))
	require.Equal(t, []uint64{97, 98, 99, 100}, records(shorten(trace(97, 100), 4)))
	require.Equal(t, []uint64{97, 98, 99, 100}, records(shorten(trace(100, 100), 4)))
	require.Equal(t, []uint64{100}, records(shorten(trace(100, 100), 1)))
	closed := trace(100, 100)
	closed[5].State = Unknown.String()
	require.Equal(t, []uint64{99, 100}, records(shorten(closed, 2)), "nothing is known of a closed stream")
	captured := trace(100, 100)
	captured[5] = Operation{Record: 6, State: Scheduled.String(), Captured: true}
	require.Equal(t, []uint64{99, 100}, records(shorten(captured, 2)), "a captured operation does not run")
}
