package memory_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
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
				open := streamtest.Hold(t, o)
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

// usesOf returns the bytes of the ledger by owner.
func usesOf(t *testing.T, d *device.Device) map[string]int {
	t.Helper()
	u, err := memory.Ledger(d)
	require.NoError(t, err)
	require.Equal(t, d.String(), u.Device)
	by, sum := map[string]int{}, uint64(0)
	for _, x := range u.Uses {
		require.Zero(t, by[x.Owner], "%s comes twice", x.Owner)
		by[x.Owner] = int(x.Bytes)
		sum += x.Bytes
	}
	require.LessOrEqual(t, u.Total-u.Free, sum, "all used memory has an owner")
	return by
}

// The ledger divides what the allocator has reserved, and what others have accounted.
func TestLedger(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s, p := newStream(t, d), newPool(t, nil)
		x, err := memory.Make[byte](s, 30*mib)
		require.NoError(t, err)
		y := makeIn(t, p, s, 20*mib)
		var z memory.Slice[byte]
		g, err := graph.Capture([]*stream.Stream{s}, func() (err error) {
			if z, err = memory.Make[byte](s, 4*mib); err != nil {
				return err
			}
			return z.Zero(s)
		}, nil)
		require.NoError(t, err)
		by := usesOf(t, d)
		reserved, err := memory.Reserved(d)
		require.NoError(t, err)
		require.Equal(t, []int{30 * mib, 20 * mib, 4 * mib}, []int{by["buffers"], by["buffers in pools"], by["buffers of graphs"]})
		const cached = "free memory that the caching allocator keeps"
		require.Equal(t, int(reserved)-54*mib, by[cached])

		stopInside := inside.Account(d, func() (inside.Use, bool) { return inside.Use{Owner: "scratch", Bytes: 8 * mib, Inside: true}, true })
		stop := inside.Account(d, func() (inside.Use, bool) { return inside.Use{Owner: "a library", Bytes: 3 * mib}, true })
		stopAgain := inside.Account(d, func() (inside.Use, bool) { return inside.Use{Owner: "a library", Bytes: 2 * mib}, true })
		stopUnknown := inside.Account(d, func() (inside.Use, bool) { return inside.Use{Owner: "busy", Bytes: 1}, false })
		by = usesOf(t, d)
		require.Equal(t, []int{22 * mib, 8 * mib, 5 * mib}, []int{by["buffers"], by["scratch"], by["a library"]})
		require.NotContains(t, by, "busy")
		for _, f := range []func(){stopInside, stop, stopAgain, stopUnknown} {
			f()
		}
		require.NotContains(t, usesOf(t, d), "a library")
		require.NoError(t, errors.Join(z.Close(), g.Close(), x.Close(), y.Close()))
		require.NotContains(t, usesOf(t, d), "buffers")
	})
}

// Memory of an Allocator without a cache is in the ledger too.
func TestLedgerWithoutCache(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		require.NoError(t, memory.EnableCaching(d, false))
		x, err := memory.Make[byte](newStream(t, d), 30*mib)
		require.NoError(t, err)
		require.GreaterOrEqual(t, usesOf(t, d)["buffers"], 30*mib)
		require.NoError(t, x.Close())
	})
}

// The error of an allocation names large uses outside of the allocator.
func TestOutOfMemoryNamesOtherUses(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		_, total, err := d.MemoryInfo()
		require.NoError(t, err)
		defer inside.Account(d, func() (inside.Use, bool) { return inside.Use{Owner: "a library", Bytes: total / 2}, true })()
		limit(t, d, 100*mib)
		_, err = memory.Make[byte](newStream(t, d), 200*mib)
		oom, ok := errors.AsType[*memory.OutOfMemoryError](err)
		require.True(t, ok, "%v", err)
		require.Contains(t, oom.Uses, memory.Use{Owner: "a library", Bytes: total / 2})
		_, after, ok := strings.Cut(err.Error(), "; memory outside of the allocator: ")
		require.True(t, ok, "%v", err)
		require.Regexp(t, `GiB for a library`, after)
	})
}
