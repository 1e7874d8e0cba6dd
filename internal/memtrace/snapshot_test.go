package memtrace_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/memtrace"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// What an allocator has done comes back from its snapshot as the same trace, and
// viewers can read the snapshot, also where the record has lost its beginning.
func TestSnapshotIsTrace(t *testing.T) {
	f, err := os.Open(filepath.Join("testdata", "alloc_stats.json.gz"))
	require.NoError(t, err)
	defer f.Close()
	rec, err := memtrace.Read(f)
	require.NoError(t, err)
	defer rec.Close()
	streams, want := rec.Traces[2].Streams, eventsOf(t, rec.Traces[2])[:1000] // of three streams
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		for _, conf := range []string{"expandable_segments:False", "expandable_segments:True"} {
			for _, entries := range []int{1 << 16, 300} {
				s := snapshotOf(t, devs[0], want, streams, conf, entries)
				requireViewable(t, s)
				var b bytes.Buffer
				require.NoError(t, s.WritePickle(&b))
				got, err := memtrace.Read(bytes.NewReader(b.Bytes()))
				require.NoError(t, err)
				defer got.Close()
				require.Len(t, got.Traces, 1)
				if entries > len(s.Traces[0]) {
					require.Equal(t, calls(want), calls(eventsOf(t, got.Traces[0])))
				} else {
					require.Len(t, s.Traces[0], entries)
				}
			}
		}
	})
}

// snapshotOf plays the events with the history recorded, and takes a snapshot
// before what is left is freed.
func snapshotOf(t *testing.T, dev *device.Device, events []memtrace.Event, streams int, conf string, entries int) *memory.Snapshot {
	t.Helper()
	require.NoError(t, memory.SetAllocatorSettings(conf))
	defer func() { require.NoError(t, memory.SetAllocatorSettings("expandable_segments:False")) }()
	require.NoError(t, memory.RecordHistory(dev, &memory.HistoryConfig{Entries: entries, Stacks: true}))
	defer func() { require.NoError(t, memory.RecordHistory(dev, nil)) }()
	a, err := memtrace.OnDevice(dev, streams)
	require.NoError(t, err)
	defer func() { require.NoError(t, a.Close()) }()
	ptrs := map[int]uint64{}
	for _, e := range events {
		switch e.Op {
		case memtrace.Alloc:
			ptrs[e.Block], err = a.Alloc(e.Stream, e.Bytes)
		case memtrace.Free:
			err = a.Free(ptrs[e.Block])
			delete(ptrs, e.Block)
		case memtrace.EmptyCache:
			err = a.EmptyCache()
		}
		require.NoError(t, err)
	}
	s, err := memory.TakeSnapshot(dev)
	require.NoError(t, err)
	require.NotEmpty(t, ptrs)
	for _, p := range ptrs {
		require.NoError(t, a.Free(p))
	}
	require.NoError(t, a.EmptyCache())
	return s
}

// calls are the events without what a snapshot does not record. Streams and
// blocks are numbered as they come.
func calls(events []memtrace.Event) (list []memtrace.Event) {
	streams, blocks := map[int]int{}, map[int]int{}
	number := func(of map[int]int, n int) int {
		if _, ok := of[n]; !ok {
			of[n] = len(of)
		}
		return of[n]
	}
	for _, e := range events {
		if e.Op == memtrace.EmptyCache {
			continue
		}
		e.Number, e.Block = 0, number(blocks, e.Block)
		if e.Op == memtrace.Alloc {
			e.Stream = number(streams, e.Stream)
		}
		list = append(list, e)
	}
	return list
}

// requireViewable goes through the snapshot as torch's viewers do, where there is
// Python.
func requireViewable(t *testing.T, s *memory.Snapshot) {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, s.WritePickle(&b))
	back, err := memory.ReadSnapshot(bytes.NewReader(b.Bytes()))
	require.NoError(t, err)
	require.Len(t, back.Segments, len(s.Segments))
	python, err := exec.LookPath("python3")
	script := filepath.Join("..", "..", "memory", "testdata", "snapshot.py")
	if _, missing := os.Stat(script); err != nil || missing != nil {
		t.Log("no python3 or no source here: only Chorus has read the snapshot")
		return
	}
	file := filepath.Join(t.TempDir(), "snapshot.pickle")
	require.NoError(t, os.WriteFile(file, b.Bytes(), 0o600))
	out, err := exec.Command(python, script, "check", file).CombinedOutput()
	require.NoError(t, err, "%s", out)
}

// eventsOf returns all events of a trace.
func eventsOf(t *testing.T, tr *memtrace.Trace) (all []memtrace.Event) {
	t.Helper()
	require.NoError(t, tr.Each(func(part []memtrace.Event) error {
		all = append(all, part...)
		return nil
	}))
	return all
}
