package collective

import (
	"fmt"
	"path"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/status"
	"github.com/gochorus/chorus/internal/timeline"
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

// A rank waits for the others in a dispatch also without tokens, as it does not in an empty collective of NCCL.
func TestWaitsWithoutElements(t *testing.T) {
	other := []*Recorder{NewRecorder(0)}
	for k, waits := range map[Kind]bool{Dispatch: true, Combine: true, AllToAll: false, AllToAllV: false} {
		require.Equal(t, waits, NewRecorder(0).waitsFor(Entry{Request: Request{Kind: k}}, other), k.Plain())
	}
}

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

// Readers of a dump look for the first function whose name is not of Chorus: the program's line.
func TestInlinedClosuresHaveTheNameOfTheirPackage(t *testing.T) {
	at := path.Dir(folder())
	require.Equal(t, "github.com/gochorus/chorus/comm.train.Send[...].func1", nameOf(runtime.Frame{Function: "main.train.Send[...].func1", File: at + "/comm/collective.go"}))
	require.Equal(t, "github.com/gochorus/chorus/gds/safetensors.step.func1", nameOf(runtime.Frame{Function: "example.org/a.b/train.step.func1", File: at + "/gds/safetensors/file.go"}))
	require.Equal(t, "main.train", nameOf(runtime.Frame{Function: "main.train", File: "/home/user/main.go"}))
	require.Equal(t, "github.com/gochorus/chorus/comm.Send[...]", nameOf(runtime.Frame{Function: "github.com/gochorus/chorus/comm.Send[...]", File: at + "/comm/collective.go"}))
}
