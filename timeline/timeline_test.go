package timeline_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	records "github.com/gochorus/chorus/internal/timeline"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nvtx"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
	"github.com/gochorus/chorus/timeline"
)

// recorded returns the records of fn.
func recorded(t *testing.T, fn func()) (list []records.Record) {
	t.Helper()
	dir := t.TempDir()
	r, err := timeline.Start(dir)
	require.NoError(t, err)
	defer r.Close()
	fn()
	require.NoError(t, r.Close())
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, files, 1)
	f, err := os.Open(filepath.Join(dir, files[0].Name()))
	require.NoError(t, err)
	defer f.Close()
	lines := bufio.NewScanner(f)
	require.True(t, lines.Scan())
	for lines.Scan() {
		var x records.Record
		require.NoError(t, json.Unmarshal(lines.Bytes(), &x))
		list = append(list, x)
	}
	return list
}

// find returns the records of a kind, in call order.
func find(list []records.Record, kind string) (out []records.Record) {
	for _, x := range list {
		if x.Kind == kind {
			out = append(out, x)
		}
	}
	slices.SortFunc(out, func(a, b records.Record) int { return int(a.Order) - int(b.Order) })
	return out
}

// TestTimesOfOperations has two kernels whose durations are known, a copy and a product on one
// stream, and a wait of the host.
func TestTimesOfOperations(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		const long = 5 * time.Millisecond
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, s.Close()) })
		spinner := streamtest.NewSpinner(t, devs[0])
		x, err := memory.Make[float32](s, 64)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, x.Close()) })
		m, err := tensor.Of(x, 8, 8)
		require.NoError(t, err)
		y, err := tensor.Make(s, memory.Float32, 8, 8)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, y.Close()) })
		require.NoError(t, tensor.MatMul(s, y, m, m, nil)) // chooses the algorithm
		require.NoError(t, s.Sync(testgpu.Context(t)))
		list := recorded(t, func() {
			spinner.On(s, long)
			spinner.On(s, 2*long)
			require.NoError(t, x.CopyFrom(s, make([]float32, 64)))
			require.NoError(t, tensor.MatMul(s, y, m, m, nil))
			nvtx.Range("step", func() { require.NoError(t, s.Sync(testgpu.Context(t))) })
		})
		kernels, copies := find(list, records.Kernel), find(list, records.Copy)
		require.GreaterOrEqual(t, len(kernels), 3)
		require.Equal(t, []string{"spin", "spin"}, []string{kernels[0].Name, kernels[1].Name})
		const error = time.Millisecond / 2 // of the GPU's two clocks
		require.GreaterOrEqual(t, time.Duration(kernels[0].End-kernels[0].Begin), long-error)
		require.GreaterOrEqual(t, time.Duration(kernels[1].End-kernels[1].Begin), 2*long-error)
		require.GreaterOrEqual(t, kernels[1].Begin, kernels[0].End-int64(error))
		require.Len(t, copies, 1)
		require.EqualValues(t, 256, copies[0].Bytes)
		require.GreaterOrEqual(t, copies[0].Begin, kernels[1].End-int64(error))
		require.GreaterOrEqual(t, kernels[2].Begin, copies[0].End-int64(error))
		step := find(list, records.Range)[0]
		require.GreaterOrEqual(t, step.End, kernels[2].End-int64(error), "the host has waited, by the same clock")
		require.NotEmpty(t, find(list, records.Wait))
		require.Empty(t, find(list, records.Dropped))
	})
}

// TestGraphIsRecorded captures a kernel during a recording and launches it twice. The capture itself
// does no work.
func TestGraphIsRecorded(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, s.Close()) })
		spinner := streamtest.NewSpinner(t, devs[0])
		spinner.On(s, time.Microsecond)
		list := recorded(t, func() {
			g, err := graph.Capture([]*stream.Stream{s}, func() error { spinner.On(s, time.Millisecond); return nil }, nil)
			require.NoError(t, err)
			require.NoError(t, errors.Join(g.Launch(s), g.Launch(s), s.Sync(testgpu.Context(t)), g.Close()))
		})
		launches := find(list, records.Graph)
		require.Len(t, launches, 2)
		require.GreaterOrEqual(t, launches[1].Begin, launches[0].Begin)
		nodes := find(list, records.Kernel)
		if devs[0].System().Backend() == "cuda" {
			require.Empty(t, nodes)
			return
		}
		require.Len(t, nodes, 2)
		for i, n := range nodes {
			require.True(t, n.Branch)
			require.GreaterOrEqual(t, n.Begin, launches[i].Begin)
			require.LessOrEqual(t, n.End, launches[i].End)
		}
	})
}

// TestCollectivesHaveNumbers reduces on two ranks, alone and in a batch.
func TestCollectivesHaveNumbers(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g, err := comm.Local(testgpu.Context(t), devs, nil)
		require.NoError(t, err)
		xs, err := comm.MakeFrom(g, make([]float32, 32))
		require.NoError(t, err)
		ys, err := comm.MakeFrom(g, make([]float32, 32))
		require.NoError(t, err)
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		require.NoError(t, g.Wait(testgpu.Context(t)))
		list := recorded(t, func() {
			require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
			require.NoError(t, g.Batch(func(b *comm.Batch) error {
				return errors.Join(comm.AllReduce(b, comm.Sum, xs...), comm.BroadcastFrom(b, 0, ys...))
			}))
			require.NoError(t, g.Wait(testgpu.Context(t)))
		})
		require.NoError(t, errors.Join(xs.Close(), ys.Close(), g.Close()))
		members := find(list, records.Member)
		require.Len(t, members, 2)
		for dev := range devs {
			var ops [][]records.Op
			for _, x := range find(list, records.Collective) {
				require.Positive(t, x.End-x.Begin)
				if x.Device == dev {
					ops = append(ops, x.Ops)
				}
			}
			require.Len(t, ops, 2, "the batch is one")
			reduce := records.Op{Group: members[0].Member.Group, Name: "ncclAllReduce", Sequence: 2, Bytes: 128, Rank: dev, Peer: -1}
			require.Equal(t, []records.Op{reduce}, ops[0])
			require.Len(t, ops[1], 2)
			require.EqualValues(t, 3, ops[1][0].Sequence)
			require.Equal(t, records.Op{Group: reduce.Group, Name: "ncclBroadcast", Sequence: 4, Bytes: 128, Rank: dev, Peer: 0}, ops[1][1])
		}
	})
}

// TestOneRecordingAtATime starts a second recording.
func TestOneRecordingAtATime(t *testing.T) {
	r, err := timeline.Start(t.TempDir())
	require.NoError(t, err)
	_, err = timeline.Start(t.TempDir())
	require.ErrorContains(t, err, "a recording is in progress")
	require.NoError(t, errors.Join(r.Close(), r.Close(), (*timeline.Recording)(nil).Close()))
	recorded(t, func() { nvtx.Mark("again") })
	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err = timeline.Start(file)
	require.ErrorContains(t, err, "not a directory")
}

// TestRangesOfThreads nests ranges of a thread.
func TestRangesOfThreads(t *testing.T) {
	list := recorded(t, func() {
		require.Equal(t, 0, nvtx.RangePush("outer"))
		require.Equal(t, 1, nvtx.RangePush("inner"))
		require.Equal(t, 1, nvtx.RangePop())
		require.Equal(t, 0, nvtx.RangePop())
	})
	require.Equal(t, "inner", list[0].Name)
	require.Equal(t, "outer", list[1].Name)
	require.LessOrEqual(t, list[1].Begin, list[0].Begin)
}
