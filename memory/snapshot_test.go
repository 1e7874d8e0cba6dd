package memory_test

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
)

const mib = 1 << 20

// snapshot returns one of two devices that are not neighbours.
func snapshot() *memory.Snapshot {
	const small, large, other = 0x7f00_0000_0000, 0x7f00_0040_0000, 0x7f10_0000_0000
	frames := memory.Stack{{Name: "main.train", Filename: "/src/train.go", Line: 31}, {Name: "main.main", Filename: "/src/main.go", Line: 7}}
	trace := []memory.TraceEntry{
		{Action: "segment_alloc", Address: small, Size: 2 * mib},
		{Action: "alloc", Address: small, Size: 12, Frames: frames},
		{Action: "alloc", Address: small + 512, Size: 1000, Frames: frames},
		{Action: "segment_alloc", Address: large, Size: 20 * mib, Stream: 7, Pool: [2]uint64{0, 3}},
		{Action: "alloc", Address: large, Size: 3 * mib, Stream: 7},
		{Action: "free_requested", Address: large, Size: 3 * mib, Stream: 7},
		{Action: "free_completed", Address: large, Size: 3 * mib, Stream: 7},
		{Action: "segment_free", Address: large, Size: 20 * mib, Stream: 7},
		{Action: "oom", DeviceFree: 5 * mib, Size: 1 << 40},
		{Action: "free_requested", Address: small + 512, Size: 1000, Frames: frames},
		{Action: "snapshot", Size: 1536},
	}
	for i := range trace {
		trace[i].Time = 1_700_000_000_000_000 + int64(i)
	}
	return &memory.Snapshot{
		Segments: []memory.Segment{{
			Address: small, TotalSize: 2 * mib, AllocatedSize: 512, ActiveSize: 1536, RequestedSize: 1012, Type: "small",
			Blocks: []memory.Block{
				{Address: small, Size: 512, RequestedSize: 12, State: "active_allocated", Frames: frames},
				{Address: small + 512, Size: 1024, RequestedSize: 1000, State: "active_pending_free", Frames: frames},
				{Address: small + 1536, Size: 2*mib - 1536, State: "inactive"},
			},
		}, {
			Device: 2, Address: other, TotalSize: 40 * mib, AllocatedSize: 40 * mib, ActiveSize: 40 * mib, RequestedSize: 40 * mib,
			Stream: 1 << 46, Type: "large", Pool: [2]uint64{0, 3}, Expandable: true, Frames: frames,
			Blocks: []memory.Block{{Address: other, Size: 40 * mib, RequestedSize: 40 * mib, State: "active_allocated"}},
		}},
		Traces: [][]memory.TraceEntry{trace},
		Settings: memory.SnapshotSettings{Conf: "expandable_segments:True", MaxSplitSize: -1, GarbageCollectionThreshold: 0.5,
			ExpandableSegments: true, PinnedRegisterThreads: 1, ReleaseLockOnMalloc: true, PinnedHostRegister: true,
			RecordStreamReuse: true, Divisions: [16]uint64{0, 2, 4}},
	}
}

// writers are the two forms of a file.
var writers = map[string]func(*memory.Snapshot, *bytes.Buffer) error{
	"pickle": func(s *memory.Snapshot, b *bytes.Buffer) error { return s.WritePickle(b) },
	"json":   func(s *memory.Snapshot, b *bytes.Buffer) error { return s.WriteJSON(b) },
}

func TestSnapshotReadsWhatItWrites(t *testing.T) {
	for form, write := range writers {
		t.Run(form, func(t *testing.T) {
			var b, z bytes.Buffer
			require.NoError(t, write(snapshot(), &b))
			zw := gzip.NewWriter(&z)
			_, err := zw.Write(b.Bytes())
			require.NoError(t, err)
			require.NoError(t, zw.Close())
			for _, in := range []*bytes.Buffer{&b, &z} {
				got, err := memory.ReadSnapshot(in)
				require.NoError(t, err)
				require.Len(t, got.Traces, 3, "a trace for each device")
				want := snapshot()
				want.Traces = append(want.Traces, nil, nil)
				require.Equal(t, plain(want), plain(got))
			}
		})
	}
}

// plain replaces empty lists by nil.
func plain(s *memory.Snapshot) *memory.Snapshot {
	stack := func(f memory.Stack) memory.Stack { return append(memory.Stack(nil), f...) }
	for i := range s.Segments {
		g := &s.Segments[i]
		g.Frames = stack(g.Frames)
		for k := range g.Blocks {
			g.Blocks[k].Frames = stack(g.Blocks[k].Frames)
		}
	}
	for i := range s.Traces {
		s.Traces[i] = append([]memory.TraceEntry(nil), s.Traces[i]...)
		for k := range s.Traces[i] {
			s.Traces[i][k].Frames = stack(s.Traces[i][k].Frames)
		}
	}
	return s
}

// python runs testdata/snapshot.py.
func python(t *testing.T, args ...string) []byte {
	t.Helper()
	path, err := exec.LookPath("python3")
	if err != nil {
		t.Skip("no python3 here: ", err)
	}
	var stderr bytes.Buffer
	cmd := exec.Command(path, append([]string{filepath.Join("testdata", "snapshot.py")}, args...)...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	require.NoError(t, err, "%s", &stderr)
	return out
}

func TestPythonReadsSnapshots(t *testing.T) {
	for form, write := range writers {
		t.Run(form, func(t *testing.T) {
			var b bytes.Buffer
			require.NoError(t, write(snapshot(), &b))
			file := filepath.Join(t.TempDir(), "snapshot."+form)
			require.NoError(t, os.WriteFile(file, b.Bytes(), 0o600))
			var got struct {
				Segments            [][3]uint64
				Reserved, Allocated uint64
				Traces              [][]string
				Settings            map[string]any
			}
			require.NoError(t, json.Unmarshal(python(t, "check", file), &got))
			s := snapshot()
			require.Equal(t, [][3]uint64{{0, s.Segments[0].Address, 2 * mib}, {2, s.Segments[1].Address, 40 * mib}}, got.Segments)
			require.EqualValues(t, 42*mib, got.Reserved)
			require.EqualValues(t, 40*mib+12, got.Allocated)
			require.Len(t, got.Traces, 3)
			require.Empty(t, got.Traces[1])
			var actions []string
			for _, e := range s.Traces[0] {
				actions = append(actions, string(e.Action))
			}
			require.Equal(t, actions, got.Traces[0])
			require.Equal(t, -1.0, got.Settings["max_split_size"])
			require.Equal(t, "expandable_segments:True", got.Settings["PYTORCH_CUDA_ALLOC_CONF"])
			require.Equal(t, 4.0, got.Settings["roundup_power2_divisions"].(map[string]any)["4"])
		})
	}
}

func TestReadTorchSnapshot(t *testing.T) {
	for _, protocol := range []string{"2", "4", "5"} {
		file := filepath.Join(t.TempDir(), "snapshot.pickle")
		python(t, "write", file, protocol)
		f, err := os.Open(file)
		require.NoError(t, err)
		s, err := memory.ReadSnapshot(f)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.NoError(t, s.Check())
		require.Equal(t, memory.Stack{{Name: "forward", Filename: "/x/train.py", Line: 12}}, s.Segments[0].Blocks[0].Frames)
		require.Same(t, &s.Segments[0].Blocks[0].Frames[0], &s.Traces[0][1].Frames[0], "what the file shares is shared")
		require.Len(t, s.Traces, 2)
		require.Equal(t, memory.TraceEntry{Action: "oom", DeviceFree: 4096, Size: 1 << 40, Time: 1700000000000002}, s.Traces[0][2])
		require.EqualValues(t, -1, s.Settings.MaxSplitSize)
	}
}

func TestSharedFramesAreWrittenOnce(t *testing.T) {
	s := snapshot()
	for len(s.Traces[0][1].Frames) < 32 {
		s.Traces[0][1].Frames = append(s.Traces[0][1].Frames, memory.Frame{Name: "f", Filename: "/src/f.go", Line: 1})
	}
	var one, many bytes.Buffer
	require.NoError(t, s.WritePickle(&one))
	for range 1000 {
		s.Traces[0] = append(s.Traces[0], s.Traces[0][1])
	}
	require.NoError(t, s.WritePickle(&many))
	require.Less(t, (many.Len()-one.Len())/1000, 60, "bytes for an entry")
	require.Equal(t, 1, strings.Count(many.String(), "/src/train.go"))
}

func TestSnapshotCheck(t *testing.T) {
	for want, spoil := range map[string]func(s *memory.Snapshot){
		"is of device -1":                  func(s *memory.Snapshot) { s.Segments[0].Device = -1 },
		"is of device 4096":                func(s *memory.Snapshot) { s.Segments[0].Device = 4096 },
		"threshold is NaN":                 func(s *memory.Snapshot) { s.Settings.GarbageCollectionThreshold = math.NaN() },
		"comes after one that ends":        func(s *memory.Snapshot) { slices.Reverse(s.Segments) },
		"where the last one ends":          func(s *memory.Snapshot) { s.Segments[0].Blocks[1].Address++ },
		"was requested with 513":           func(s *memory.Snapshot) { s.Segments[0].Blocks[0].RequestedSize = 513 },
		`has the state "free"`:             func(s *memory.Snapshot) { s.Segments[0].Blocks[0].State = "free" },
		"its blocks end at":                func(s *memory.Snapshot) { s.Segments[0].Blocks[2].Size-- },
		"it has no blocks":                 func(s *memory.Snapshot) { s.Segments[1].Blocks = nil },
		"allocated, active and requested:": func(s *memory.Snapshot) { s.Segments[0].AllocatedSize = 1536 },
	} {
		s := snapshot()
		require.NoError(t, s.Check())
		spoil(s)
		require.ErrorContains(t, s.Check(), want)
		require.ErrorContains(t, s.WritePickle(&bytes.Buffer{}), want)
		require.ErrorContains(t, s.WriteJSON(&bytes.Buffer{}), want)
	}
}

func TestReadSnapshotRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"":                                 "the file is empty",
		"\x1f\x8b":                         "the file ends too early: it was cut off: write or copy it again",
		"\x80\x02]q":                       "the file ends too early",
		`{"segments": [`:                   "the file ends too early",
		`{"segments": {}}`:                 `"segments" of the snapshot is a dictionary: want a list`,
		"\x80\x02cos\nabort\n":             "without classes and calls",
		"\x80\x02N.":                       "the snapshot is missing: want a dictionary",
		"{":                                "the file ends too early",
		"nonsense":                         "neither a pickle nor JSON",
		"[]":                               "the snapshot is a list: want a dictionary",
		"{}":                               `"segments" of the snapshot is missing: want a list`,
		`{"segments": [{"address": "x"}]}`: `segment 0: "address" of segment is "x": want a whole number`,
		`{"segments": [{"address": 1, "total_size": -1, "blocks": []}]}`:                             `"total_size" of segment is -1`,
		`{"segments": [{"address": 1, "total_size": 1, "blocks": [{"size": 1, "frames": [3]}]}]}`:    "segment 0: block 0: frame 0: frame is 3: want a dictionary",
		`{"segments": [{"address": 1, "total_size": 1, "blocks": [], "segment_pool_id": [1]}]}`:      "want two numbers",
		`{"segments": [{"address": 1, "total_size": 1, "blocks": [], "segment_pool_id": [1, "a"]}]}`: "want two numbers",
		`{"segments": [{"address": 1, "total_size": 1, "blocks": [], "is_expandable": 1}]}`:          "want true or false",
		`{"segments": [{"address": 1, "total_size": 1, "blocks": [], "segment_type": 1}]}`:           "want a text",
		`{"segments": [], "device_traces": [3]}`:                                                     "trace 0: it is 3: want a list",
		`{"segments": [], "device_traces": [[{"action": 1}]]}`:                                       `trace 0: entry 0: "action" of entry is 1: want a text`,
		`{"segments": [], "allocator_settings": {"garbage_collection_threshold": "x"}}`:              "want a number",
		strings.Repeat("[", 100): "more than 32 deep",
	} {
		_, err := memory.ReadSnapshot(strings.NewReader(text))
		_, walked := memory.WalkSnapshot(strings.NewReader(text), func(int, memory.TraceEntry) error { return nil })
		for _, err := range []error{err, walked} {
			require.ErrorContains(t, err, "memory: read a snapshot: ", "%q", text)
			require.ErrorContains(t, err, want, "%q", text)
		}
	}
}

// TestSnapshotMemory: the memory for a snapshot is proportional to the file.
func TestSnapshotMemory(t *testing.T) {
	for item, n := range map[string]int{"[],": 5 << 19, "0,": 3 << 19} {
		_, err := memory.ReadSnapshot(strings.NewReader(`{"segments":[` + strings.Repeat(item, n) + `0],"device_traces":[]}`))
		require.ErrorContains(t, err, "the values so far take", item)
	}
	_, err := memory.ReadSnapshot(strings.NewReader("\x80\x02](" + strings.Repeat("]", 1<<21) + "e."))
	require.ErrorContains(t, err, "its values so far take")
}

func TestSnapshotWriteErrors(t *testing.T) {
	require.ErrorIs(t, snapshot().WritePickle(full{}), errFull)
	require.ErrorIs(t, snapshot().WriteJSON(full{}), errFull)
}

var errFull = errors.New("no space left")

type full struct{}

func (full) Write([]byte) (int, error) { return 0, errFull }

// Blocks without an address, as older torch writes them, get it.
func TestReadPlacesBlocks(t *testing.T) {
	s, err := memory.ReadSnapshot(strings.NewReader(
		`{"segments": [{"address": 4096, "total_size": 1536, "blocks": [{"size": 512, "state": "inactive"}, {"size": 1024, "state": "inactive"}]}]}`))
	require.NoError(t, err)
	require.EqualValues(t, 4608, s.Segments[0].Blocks[1].Address)
	require.NoError(t, s.Check())
}

func FuzzReadSnapshot(f *testing.F) {
	for _, write := range writers {
		var b bytes.Buffer
		require.NoError(f, write(snapshot(), &b))
		f.Add(b.Bytes())
	}
	f.Add([]byte(`{"segments": [], "device_traces": [[{"action": "oom", "device_free": 1}]]}`))
	f.Fuzz(func(t *testing.T, file []byte) {
		_, _ = memory.WalkSnapshot(bytes.NewReader(file), func(int, memory.TraceEntry) error { return nil })
		s, err := memory.ReadSnapshot(bytes.NewReader(file))
		if err != nil || s.Check() != nil {
			return
		}
		for _, write := range writers {
			var b bytes.Buffer
			require.NoError(t, write(s, &b))
			got, err := memory.ReadSnapshot(&b)
			require.NoError(t, err)
			require.Equal(t, len(s.Segments), len(got.Segments))
		}
	})
}

// walk reads a snapshot by WalkSnapshot, and puts the entries into its Traces.
func walk(t *testing.T, r io.Reader) *memory.Snapshot {
	t.Helper()
	var traces [][]memory.TraceEntry
	s, err := memory.WalkSnapshot(r, func(device int, e memory.TraceEntry) error {
		for len(traces) <= device {
			traces = append(traces, nil)
		}
		traces[device] = append(traces[device], e)
		return nil
	})
	require.NoError(t, err)
	require.Nil(t, s.Traces)
	s.Traces = traces
	return s
}

func TestWalkSnapshot(t *testing.T) {
	for form, write := range writers {
		t.Run(form, func(t *testing.T) {
			want := snapshot()
			want.Traces = append(want.Traces, nil, append([]memory.TraceEntry(nil), want.Traces[0][1:]...))
			var b bytes.Buffer
			require.NoError(t, write(want, &b))
			require.Equal(t, plain(want), plain(walk(t, &b)))
		})
	}
	file := filepath.Join(t.TempDir(), "snapshot.pickle")
	python(t, "write", file, "4")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	want, err := memory.ReadSnapshot(bytes.NewReader(text))
	require.NoError(t, err)
	got := walk(t, bytes.NewReader(text))
	for len(got.Traces) < len(want.Traces) {
		got.Traces = append(got.Traces, nil)
	}
	require.Equal(t, plain(want), plain(got))
}

// The lists of entries come whole if the pickle makes them by the opcode LIST.
func TestWalkWholeLists(t *testing.T) {
	text := "\x80\x02}(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00device_traces((}X\x04\x00\x00\x00sizeK\x07sllu."
	require.Equal(t, [][]memory.TraceEntry{{{Size: 7}}}, plain(walk(t, strings.NewReader(text))).Traces)
}

func TestWalkSnapshotErrors(t *testing.T) {
	failed := errors.New("failed")
	for _, write := range writers {
		var b bytes.Buffer
		require.NoError(t, write(snapshot(), &b))
		n := 0
		_, err := memory.WalkSnapshot(&b, func(int, memory.TraceEntry) error {
			if n++; n == 3 {
				return failed
			}
			return nil
		})
		require.Equal(t, failed, err)
		require.Equal(t, 3, n)
	}
}

// A long history leaves nothing in memory if it is JSON, and little if it is a pickle.
func TestWalkSnapshotKeepsNothing(t *testing.T) {
	n := testhost.Rounds(10_000, 30_000)
	s := snapshot()
	for len(s.Traces[0]) < n {
		s.Traces[0] = append(s.Traces[0], s.Traces[0][1])
	}
	for form, most := range map[string]int64{"pickle": 64 * int64(n), "json": 2 << 20} {
		t.Run(form, func(t *testing.T) {
			r, w := io.Pipe()
			go func() {
				if form == "pickle" {
					w.CloseWithError(s.WritePickle(w))
				} else {
					w.CloseWithError(s.WriteJSON(w))
				}
			}()
			before, grown, i := heap(), int64(0), 0
			_, err := memory.WalkSnapshot(r, func(int, memory.TraceEntry) error {
				if i++; i%(n/10) == 0 {
					grown = max(grown, heap()-before)
				}
				return nil
			})
			require.NoError(t, err)
			require.Equal(t, n, i)
			require.Less(t, grown, most)
		})
	}
}

// heap returns the size of the live heap in bytes.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

func ExampleWalkSnapshot() {
	file := `{"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 100}]]}`
	_, err := memory.WalkSnapshot(strings.NewReader(file), func(device int, e memory.TraceEntry) error {
		fmt.Println(device, e.Action, e.Size)
		return nil
	})
	fmt.Println(err)
	// Output:
	// 0 alloc 100
	// <nil>
}
