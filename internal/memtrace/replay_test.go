package memtrace_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/memtrace"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// Training as it was recorded takes no more memory than it took torch; with
// expandable segments hardly more than what is allocated.
func TestReplayTraining(t *testing.T) {
	turns := testgpu.TurnsRaced(t, 2)
	f, err := os.Open(filepath.Join("testdata", "trace_train.json.gz"))
	require.NoError(t, err)
	defer f.Close()
	rec, err := memtrace.Read(f)
	require.NoError(t, err)
	defer rec.Close()
	train := rec.Traces[0]
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		if turns(0, 0) {
			r := replayOn(t, devs[0], train)
			require.LessOrEqual(t, r.Peaks.Reserved, train.Recorded.Reserved)
			require.InEpsilon(t, train.Recorded.Allocated, r.Peaks.Allocated, 0.01)
		}
		if !turns(0, 1) {
			return
		}
		require.NoError(t, memory.SetAllocatorSettings("expandable_segments:True"))
		defer func() { require.NoError(t, memory.SetAllocatorSettings("expandable_segments:False")) }()
		r := replayOn(t, devs[0], train)
		require.LessOrEqual(t, float64(r.Peaks.Reserved), 1.03*float64(r.Peaks.Allocated))
	})
}

func replayOn(t *testing.T, dev *device.Device, tr *memtrace.Trace) *memtrace.Result {
	t.Helper()
	a, err := memtrace.OnDevice(dev, tr.Streams)
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	r, err := memtrace.Replay(tr, a, nil)
	require.NoError(t, err)
	s, err := memory.StatsOf(dev)
	require.NoError(t, err)
	require.Zero(t, s.AllocatedBytes.All.Current, "what the trace leaves is freed")
	require.NoError(t, memory.EmptyCache(dev))
	t.Logf("%d calls, %.0f ns each on an empty cache; allocated %d, reserved %d bytes at most", r.Ops, r.ColdPerOp(), r.Peaks.Allocated, r.Peaks.Reserved)
	return r
}
