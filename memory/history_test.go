package memory_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu/spin"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// allocateHere is a name to be found in stacks.
func allocateHere(t *testing.T, s *stream.Stream) memory.Slice[float32] {
	x, err := memory.Make[float32](s, 311*411)
	require.NoError(t, err)
	return x
}

func named(s memory.Stack, name string) bool {
	for _, f := range s {
		if strings.HasSuffix(f.Name, "."+name) {
			return strings.HasSuffix(f.Filename, "history_test.go") && f.Line > 0
		}
	}
	return false
}

// A snapshot has the block, what was asked for, where, and how it came there
// (test_memory_snapshot, test_cpp_memory_snapshot_pickle).
func TestSnapshotOfAProgram(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True"} {
		t.Run(conf, func(t *testing.T) {
			eachFresh(t, conf, func(t *testing.T, d *device.Device) {
				require.NoError(t, memory.RecordHistory(d, &memory.HistoryConfig{Entries: 100, Stacks: true}))
				s, o := newStream(t, d), newStream(t, d)
				x := allocateHere(t, s)
				y := allocateHere(t, s)
				require.NoError(t, o.WaitStream(s))
				require.NoError(t, y.RecordStream(o))
				open := spin.Hold(t, o)
				require.NoError(t, y.Close())
				snap, err := memory.TakeSnapshot(d)
				require.NoError(t, err)
				open()
				require.Equal(t, conf, snap.Settings.Conf)
				require.Equal(t, conf != "", snap.Settings.ExpandableSegments)
				var states []string
				for _, g := range snap.Segments {
					at, active := g.Address, uint64(0)
					for _, b := range g.Blocks {
						require.Equal(t, at, b.Address, "blocks lie side by side")
						at += b.Size
						states = append(states, b.State)
						if b.State == "inactive" {
							continue
						}
						active += b.Size
						require.EqualValues(t, 311*411*4, b.RequestedSize)
						require.True(t, named(b.Frames, "allocateHere"), "%v", b.Frames)
						require.True(t, named(b.Frames, "TestSnapshotOfAProgram.func1.1"), "%v", b.Frames)
					}
					require.Equal(t, g.Address+g.TotalSize, at)
					require.Equal(t, g.ActiveSize, active)
					require.EqualValues(t, gpu.StreamOf(s).Raw(), g.Stream)
				}
				require.Contains(t, states, "active_allocated")
				require.Contains(t, states, "inactive")
				if d.System().Backend() == "virtual" || conf == "" {
					require.Contains(t, states, "active_pending_free")
				}
				var actions []string
				for _, e := range snap.Traces[d.Ordinal()] {
					actions = append(actions, string(e.Action))
					require.Positive(t, e.Time)
					switch e.Action {
					case "alloc", "free_requested":
						require.EqualValues(t, 311*411*4, e.Size)
						require.NotEmpty(t, e.Frames)
					}
				}
				text := strings.Join(actions, " ")
				for _, part := range []string{"alloc alloc free_requested snapshot"} {
					require.Contains(t, text, part)
				}
				require.Contains(t, text, map[bool]string{true: "segment_map", false: "segment_alloc"}[conf != ""])
				require.NoError(t, x.Close())
				require.NoError(t, memory.EmptyCache(d))
				snap, err = memory.TakeSnapshot(d)
				require.NoError(t, err)
				require.Empty(t, snap.Segments)
				var buf bytes.Buffer
				require.NoError(t, snap.WritePickle(&buf))
				require.NoError(t, snap.WriteJSON(&buf))
				last := snap.Traces[d.Ordinal()]
				text = ""
				for _, e := range last {
					text += string(e.Action) + " "
				}
				require.Contains(t, text, "free_completed")
				require.Contains(t, text, map[bool]string{true: "segment_unmap", false: "segment_free"}[conf != ""])
			})
		})
	}
}

// The history keeps its last entries, and nothing once it has ended.
func TestHistoryIsBounded(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		churn := func(n int) {
			for i := range n {
				p, err := memory.AllocRaw(s, 1000+i)
				require.NoError(t, err)
				require.NoError(t, memory.FreeRaw(d, p))
			}
		}
		trace := func() []memory.TraceEntry {
			snap, err := memory.TakeSnapshot(d)
			require.NoError(t, err)
			return snap.Traces[d.Ordinal()]
		}
		churn(3)
		require.Empty(t, trace(), "nothing was asked for")
		require.NoError(t, memory.RecordHistory(d, &memory.HistoryConfig{Entries: 10}))
		churn(100)
		list := trace()
		require.Len(t, list, 10)
		require.Equal(t, "snapshot", list[9].Action)
		require.Equal(t, "free_completed", list[8].Action)
		require.EqualValues(t, 1099, list[8].Size)
		for i, e := range list {
			require.Empty(t, e.Frames)
			require.GreaterOrEqual(t, e.Time, list[max(i-1, 0)].Time)
		}
		require.NoError(t, memory.RecordHistory(d, &memory.HistoryConfig{Entries: 10}))
		require.Len(t, trace(), 1, "begins anew")
		_, err := memory.AllocRaw(s, 1<<50)
		require.Error(t, err)
		list = trace()
		oom := list[len(list)-2]
		require.Equal(t, "oom", oom.Action)
		require.EqualValues(t, 1<<50, oom.Size)
		require.Positive(t, oom.DeviceFree)
		require.Zero(t, oom.Address)
		require.NoError(t, memory.RecordHistory(d, &memory.HistoryConfig{Stacks: true}))
		x := allocateHere(t, s)
		snap, err := memory.TakeSnapshot(d)
		require.NoError(t, err)
		require.Empty(t, snap.Traces[d.Ordinal()], "only the state")
		found := false
		for _, g := range snap.Segments {
			for _, b := range g.Blocks {
				found = found || named(b.Frames, "allocateHere")
			}
		}
		require.True(t, found)
		require.NoError(t, x.Close())
		require.NoError(t, memory.RecordHistory(d, nil))
		churn(5)
		require.Empty(t, trace())
		require.ErrorContains(t, memory.RecordHistory(d, &memory.HistoryConfig{Entries: -1}), "record -1 entries of the history of "+d.String()+": the number is negative")
	})
}
