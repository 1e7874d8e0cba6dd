package memtrace

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// fixtures returns the files of a kind, also those of CHORUS_FIXTURES.
func fixtures(t *testing.T, glob string) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("testdata", glob))
	require.NoError(t, err)
	require.NotEmpty(t, files)
	if env.Fixtures.IsSet() {
		more, err := filepath.Glob(filepath.Join(env.Fixtures.Value(), glob))
		require.NoError(t, err)
		files = append(files, more...)
		if ok, _ := filepath.Match(glob, filepath.Base(env.Fixtures.Value())); ok {
			files = append(files, env.Fixtures.Value())
		}
	}
	return files
}

func open(t *testing.T, file string) *os.File {
	t.Helper()
	f, err := os.Open(file)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// readAll returns the traces of a file.
func readAll(t *testing.T, r io.ReadSeeker) []*Trace {
	t.Helper()
	rec, err := Read(r)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, rec.Close()) })
	return rec.Traces
}

// eventsOf returns all events of a trace.
func eventsOf(t *testing.T, tr *Trace) (all []Event) {
	t.Helper()
	require.NoError(t, tr.Each(func(part []Event) error {
		all = append(all, part...)
		return nil
	}))
	require.Len(t, all, tr.Ops)
	return all
}

// traceOf returns a trace of events.
func traceOf(t *testing.T, name string, blocks, streams int, events ...Event) *Trace {
	t.Helper()
	s := &spool{}
	last := -1
	for i := range events {
		require.NoError(t, s.write(&events[i], last))
		last = events[i].Number
	}
	return &Trace{Name: name, Ops: len(events), Blocks: blocks, Streams: streams, events: section{s, 0, s.n, len(events)}}
}

// A valid trace frees each block once after its allocation, and then may use its number
// again.
func requireValid(t *testing.T, tr *Trace) {
	t.Helper()
	live := make([]bool, tr.Blocks)
	for _, e := range eventsOf(t, tr) {
		switch e.Op {
		case Alloc:
			require.False(t, live[e.Block], "event %d", e.Number)
			require.Positive(t, e.Bytes)
			require.Less(t, e.Stream, tr.Streams)
			live[e.Block] = true
		case Free:
			require.True(t, live[e.Block], "event %d", e.Number)
			live[e.Block] = false
		}
	}
}

func TestReadTraceFixtures(t *testing.T) {
	for _, file := range fixtures(t, "trace_*.json.gz") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			traces := readAll(t, open(t, file))
			require.Len(t, traces, 1)
			requireValid(t, traces[0])
			require.Positive(t, traces[0].Recorded.Allocated)
			require.GreaterOrEqual(t, traces[0].Recorded.Reserved, traces[0].Recorded.Allocated)
		})
	}
	train := readAll(t, open(t, filepath.Join("testdata", "trace_train.json.gz")))[0]
	require.Equal(t, "train", train.Name)
	require.Equal(t, 9003+8554, train.Ops)
	require.Less(t, train.Blocks, 1000, "numbers of freed blocks are used again")
	require.Equal(t, 1, train.Streams)
	require.Equal(t, Peaks{7_734_391_296, 8_321_499_136}, train.Recorded)
}

func TestReadStatsFixtures(t *testing.T) {
	for _, file := range fixtures(t, "alloc_stats*.json.gz") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			list, err := ReadStats(open(t, file))
			require.NoError(t, err)
			require.NotEmpty(t, list)
			for _, q := range list {
				checkSteps(t, &q)
			}
			traces := readAll(t, open(t, file))
			require.Len(t, traces, len(list))
			for i, tr := range traces {
				requireValid(t, tr)
				require.Equal(t, list[i].Streams, tr.Streams)
				require.Equal(t, list[i].name(), tr.Name)
			}
		})
	}
}

// checkSteps goes through the statistics by what the calls themselves say.
func checkSteps(t *testing.T, q *Sequence) {
	t.Helper()
	live := map[int]int{}
	requested := int64(0)
	for i, s := range q.Steps {
		switch {
		case s.End:
			clear(live)
			requested = 0
		case s.Op == Alloc:
			live[s.Block] = s.Bytes
			requested += int64(s.Bytes)
		case s.Op == Free:
			requested -= int64(live[s.Block])
			delete(live, s.Block)
		}
		require.EqualValues(t, len(live), s.Stats.Allocation.All.Current, "step %d", i)
		require.EqualValues(t, requested, s.Stats.RequestedBytes.All.Current, "step %d", i)
		for _, p := range []memory.PoolStats{s.Stats.AllocatedBytes, s.Stats.ReservedBytes, s.Stats.ActiveBytes, s.Stats.InactiveSplitBytes,
			s.Stats.RequestedBytes, s.Stats.Allocation, s.Stats.Segment, s.Stats.Active, s.Stats.InactiveSplit} {
			require.Equal(t, p.All.Current, p.Small.Current+p.Large.Current, "step %d", i)
		}
		require.LessOrEqual(t, s.Stats.AllocatedBytes.All.Current, s.Stats.AllocatedBytes.All.Peak)
		require.LessOrEqual(t, s.Stats.ReservedBytes.All.Current, s.Stats.ReservedBytes.All.Peak)
	}
}

func events(lines ...string) string { return `{"events": [` + strings.Join(lines, ",") + `]}` }

func TestReadEvents(t *testing.T) {
	traces := readAll(t, strings.NewReader(events(
		`["segment_alloc", 4096, 2097152, 0, 1]`,
		`["alloc", 4096, 100, 0, 2]`,
		`["alloc", 8192, 50, 70000, 3]`,
		`["free_requested", 4096, 100, 0, 4]`,
		`["alloc", 5000, 10, 0, 5]`,
		`["free_completed", 4096, 100, 0, 6]`,
		`["alloc", 4096, 7, 70000, 7]`,
		`["segment_free", 9, 9, 0, 8]`,
	)))
	require.Len(t, traces, 1)
	requireTrace(t, Trace{Name: "trace", Ops: 5, Blocks: 3, Streams: 2, Recorded: Peaks{150, 2097152}}, []Event{
		{Op: Alloc, Block: 0, Bytes: 100, Number: 1},
		{Op: Alloc, Block: 1, Bytes: 50, Stream: 1, Number: 2},
		{Op: Alloc, Block: 2, Bytes: 10, Number: 4},
		{Op: Free, Block: 0, Number: 5},
		{Op: Alloc, Block: 0, Bytes: 7, Stream: 1, Number: 6},
	}, traces[0])
}

// requireTrace compares a trace, and its events.
func requireTrace(t *testing.T, want Trace, events []Event, got *Trace) {
	t.Helper()
	require.Equal(t, events, eventsOf(t, got))
	plain := *got
	plain.prologue, plain.events = nil, section{}
	require.Equal(t, want, plain)
}

func TestReadRefuses(t *testing.T) {
	const alloc = `["alloc", 4096, 100, 0, 2]`
	for _, c := range []struct{ file, want string }{
		{"", "the file is empty"},
		{"{", "the file is truncated: record or copy it again"},
		{"[]", "neither a trace nor a snapshot: the value is a JSON array: want an object"},
		{`{"events": {}}`, `"events" is a JSON object, at byte 12`},
		{events(`["alloc", 1, 2, 3, 4`), "the file is truncated"},
		{`{"events": [`, "the file is truncated"},
		{events(), "the trace has no allocations: record the history"},
		{events(`["segment_alloc", 4096, 2097152, 0, 1]`), "the trace has no allocations"},
		{sequence(), "seed 5: the trace has no allocations"},
		{`{"segments": [], "device_traces": [[{"action": "snapshot"}]]}`, "the trace has no allocations"},
		{`{"events": [` + alloc + `], "peak_reserved": -1}`, "the recorded peaks are 0 bytes allocated and -1 reserved"},
		{`{"events": [` + alloc + `], "peak_allocated": -1}`, "the recorded peaks are -1 bytes allocated and 0 reserved"},
		{sequence(`["free", 7`+strings.Repeat(",0", 28)+`,-1,0]`, step), "event 0"},
		{sequence(`["alloc", 7, 1, 0` + strings.Repeat(",0", 28) + `,-1,0]`), "seed 5: event 0: the recorded peaks are -1 bytes"},
		{compressed(t, events(alloc))[:30], "the file is truncated: record or copy it again"},
		{compressed(t, events(alloc))[:3], "the file is truncated"},
		{"{}", `no "events", "sequences" or "segments"`},
		{"\x80\x02N.", "want a dictionary"},
		{events(`["leap", 1, 2, 3, 4]`), `trace: event 0: unknown action "leap"`},
		{events(alloc, `["alloc", 1, 2]`), "trace: event 1: the event is [\"alloc\", 1, 2]: want [action, address, size, stream, time]"},
		{events(`["alloc", -1, 2, 3, 4]`), "want [action, address, size, stream, time]"},
		{events(`3`), "want [action, address, size, stream, time]"},
		{events(`["alloc", 1, 0, 0, 1]`), "event 0: allocates the block at 0x1, of 0 bytes"},
		{events(alloc, alloc), "event 1: allocates the block at 0x1000, which event 0 allocated and no event freed"},
		{events(`["free_completed", 4096, 1, 0, 1]`), "event 0: frees the block at 0x1000, which is not allocated"},
		{events(`["free_requested", 4096, 1, 0, 1]`), "event 0: frees the block at 0x1000, which is not allocated"},
		{events(alloc, `["free_requested", 4096, 100, 0, 1]`, `["free_requested", 4096, 100, 0, 1]`), "event 2: frees the block at 0x1000, which is being freed"},
		{events(alloc, `["free_completed", 4096, 100, 0, 1]`, `["free_completed", 4096, 100, 0, 1]`), "event 2: frees the block at 0x1000, which event 1 already freed"},
		{`{"sequences": [], "columns": "x"}`, `the columns are "x"`},
		{sequence(step, `["leap"]`), `seed 5: event 1: unknown action "leap"`},
		{sequence(`3`), "want a list"},
		{sequence(`[3]`), "want the name of a call"},
		{sequence(`["alloc", 1, 2, 3]`), "alloc has 3 numbers: want 33"},
		{sequence(`["free", "x"` + strings.Repeat(",0", 30) + `]`), "free: json"},
		{sequence(`["free", 7` + strings.Repeat(",0", 30) + `]`), "seed 5: event 0: frees block 7, which is not allocated"},
		{sequence(`["alloc", 7, -1, 0` + strings.Repeat(",0", 30) + `]`), "event 0: allocates -1 bytes on stream 0"},
		{`{"segments": [], "device_traces": [[]]}`, "the snapshot has no trace"},
	} {
		_, err := Read(strings.NewReader(c.file))
		require.ErrorContains(t, err, c.want, "%q", c.file)
	}
}

const step = `["empty_cache",0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]`

func compressed(t *testing.T, text string) string {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, err := z.Write([]byte(text))
	require.NoError(t, errors.Join(err, z.Close()))
	return b.String()
}

func sequence(steps ...string) string {
	return fmt.Sprintf(`{"columns": %q, "sequences": [{"seed": 5, "ops": [%s]}]}`, columns, strings.Join(steps, ","))
}

// TestReadIsBounded reads files that would take far more memory than they have bytes.
func TestReadIsBounded(t *testing.T) {
	lots := func(head, piece, tail string, n int) string { return head + strings.Repeat(piece, n) + tail }
	var streams strings.Builder
	for i := range mostStreams + 1 {
		fmt.Fprintf(&streams, `["alloc",%d,512,%d,0],`, 512*(i+1), i)
	}
	bombs := map[string]string{
		"trace has 1025 streams: want at most 1024": `{"events":[` + strings.TrimSuffix(streams.String(), ",") + `]}`,
	}
	turns := testgpu.TurnsRaced(t, 2) // each of the next takes seconds
	if turns(0, 0) {
		bombs["compressed bytes expand to more than"] = compressed(t, lots("\x80\x04(", "}", "l.", 30<<20))
	}
	if turns(0, 1) {
		bombs["decompress it with gunzip"] = compressed(t, lots(`{"events":[`, " ", "]}", 30<<20))
	}
	for want, file := range bombs {
		before := allocated()
		_, err := Read(strings.NewReader(file))
		require.ErrorContains(t, err, want)
		require.Less(t, allocated()-before, uint64(64<<20), want)
		if _, err = memory.ReadSnapshot(strings.NewReader(file)); strings.Contains(want, "gunzip") {
			require.ErrorContains(t, err, want)
		}
	}
}

// allocated returns how many bytes the process has allocated since its start.
func allocated() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.TotalAlloc
}

// A snapshot's trace begins in the midst of things: one block was there before
// and is freed, one was there and stays, one is being freed at the end.
func TestReadSnapshot(t *testing.T) {
	s := &memory.Snapshot{
		Segments: []memory.Segment{{Address: 4096, TotalSize: 8192, AllocatedSize: 4096, ActiveSize: 6144, RequestedSize: 4030, Device: 1,
			Blocks: []memory.Block{
				{Address: 4096, Size: 1024, RequestedSize: 1000, State: "active_allocated"},
				{Address: 5120, Size: 2048, RequestedSize: 30, State: "active_pending_free"},
				{Address: 7168, Size: 3072, RequestedSize: 3000, State: "active_allocated"},
				{Address: 10240, Size: 2048, State: "inactive"},
			}}},
		Traces: [][]memory.TraceEntry{nil, {
			{Action: "alloc", Address: 5120, Size: 30, Stream: 9},
			{Action: "free_requested", Address: 6000, Size: 500},
			{Action: "free_completed", Address: 6000, Size: 500},
			{Action: "segment_free", Address: 1, Size: 4096},
			{Action: "oom", DeviceFree: 1, Size: 1 << 40},
			{Action: "free_requested", Address: 5120, Size: 30, Stream: 9},
			{Action: "alloc", Address: 7168, Size: 3000},
			{Action: "snapshot"},
		}},
	}
	writers := []func(*bytes.Buffer) error{
		func(b *bytes.Buffer) error { return s.WritePickle(b) },
		func(b *bytes.Buffer) error { return s.WriteJSON(b) },
	}
	for _, write := range writers {
		var b bytes.Buffer
		require.NoError(t, write(&b))
		traces := readAll(t, bytes.NewReader(b.Bytes()))
		require.Len(t, traces, 1)
		requireTrace(t, Trace{Name: "device 1", Ops: 5, Blocks: 3, Streams: 2, Recorded: Peaks{4000, 8192 + 4096}}, []Event{
			{Op: Alloc, Block: 1, Bytes: 500, Stream: 1, Number: -1},
			{Op: Alloc, Block: 2, Bytes: 1000, Stream: 1, Number: -1},
			{Op: Alloc, Block: 0, Bytes: 30, Number: 0},
			{Op: Free, Block: 1, Number: 2},
			{Op: Alloc, Block: 1, Bytes: 3000, Stream: 1, Number: 6},
		}, traces[0])
	}
	s.Traces[1] = append(s.Traces[1], s.Traces[1][2])
	for _, write := range writers {
		var b bytes.Buffer
		require.NoError(t, write(&b))
		_, err := Read(bytes.NewReader(b.Bytes()))
		require.EqualError(t, err, "device 1: event 8: frees the block at 0x1770, which event 2 already freed")
	}
}

func TestReplay(t *testing.T) {
	tr := traceOf(t, "a", 4, 2,
		Event{Op: Alloc, Block: 0, Bytes: 1000}, Event{Op: Alloc, Block: 1, Bytes: 5000, Stream: 1}, Event{Op: Free, Block: 1},
		Event{Op: Alloc, Block: 2, Bytes: 3000}, Event{Op: Free, Block: 2}, Event{Op: EmptyCache}, Event{Op: Free, Block: 0},
		Event{Op: Alloc, Block: 3, Bytes: 1000})
	f := newFake()
	f.record = true
	r, err := Replay(tr, f, &Config{Repeat: 3, Curve: true})
	require.NoError(t, err)
	require.Empty(t, f.live, "what the trace leaves is freed")
	run := []string{"alloc 1000 on 0", "alloc 5000 on 1", "free", "alloc 3000 on 0", "free", "empty", "free", "alloc 1000 on 0", "free"}
	want := append([]string{"empty"}, run...)
	for range 3 {
		want = append(want, run...)
	}
	want = append(append(want, "empty"), run...)
	require.Equal(t, want, f.calls)
	require.Equal(t, 8, r.Ops)
	require.Len(t, r.Warm, 3)
	require.Equal(t, Peaks{6144, 9216}, r.Peaks)
	require.EqualValues(t, 4096, r.AllocatedAtPeak)
	require.InDelta(t, 1-4096.0/9216, r.Fragmentation(), 1e-12)
	require.Equal(t, []Peaks{{1024, 1024}, {6144, 6144}, {1024, 6144}, {4096, 9216}, {1024, 9216}, {1024, 1024}, {0, 1024}, {1024, 1024}}, r.Curve)
}

func TestReplayErrors(t *testing.T) {
	first := Event{Op: Alloc, Bytes: 1000, Number: 4}
	tr := traceOf(t, "a", 2, 1, first, Event{Op: Alloc, Block: 1, Bytes: 3000, Number: 7})
	f := newFake()
	f.limit = 2048
	_, err := Replay(tr, f, nil)
	require.ErrorIs(t, err, errFull)
	require.ErrorContains(t, err, "a: event 7: allocate 3000 bytes on stream 0")
	require.Empty(t, f.live, "also after an error")
	tr.prologue = []Event{{Op: Alloc, Block: 1, Bytes: 3000, Number: -1}}
	_, err = Replay(tr, f, nil)
	require.ErrorContains(t, err, "a: before the first event: allocate")
	_, err = Replay(traceOf(t, "a", 2, 1, first, Event{Op: Free, Block: 1, Number: 9}), f, nil)
	require.ErrorContains(t, err, "a: event 9: free block 1: free of 0x0")
}

func TestTimes(t *testing.T) {
	r := &Result{Ops: 10, Cold: 1000, Warm: []time.Duration{300, 100, 200}}
	require.Equal(t, 20.0, r.PerOp())
	require.Equal(t, 100.0, r.ColdPerOp())
	r.Warm = append(r.Warm, 500)
	require.Equal(t, 25.0, r.PerOp())
	r.Warm = nil
	require.Equal(t, 100.0, r.PerOp())
	require.Zero(t, (&Result{}).PerOp())
	require.Zero(t, (&Result{}).Fragmentation())
}

// Fixtures replay on an allocator that never splits.
func TestReplayFixtures(t *testing.T) {
	for _, file := range append(fixtures(t, "trace_*.json.gz"), fixtures(t, "alloc_stats*.json.gz")...) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			for _, tr := range readAll(t, open(t, file)) {
				r, err := Replay(tr, newFake(), nil)
				require.NoError(t, err)
				require.InEpsilon(t, tr.Recorded.Allocated, r.Peaks.Allocated, 0.05)
			}
		})
	}
}
