package memory_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testgpu/tsan"
	"github.com/gochorus/chorus/memory"
)

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
	n := tsan.Rounds(10_000, 30_000)
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
