package timeline

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// lines returns the records of the only file of a recorder.
func lines(t *testing.T, r *Recorder) (list []Record) {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(r.dir, "*"))
	require.NoError(t, err)
	require.Len(t, files, 1)
	f, err := os.Open(files[0])
	require.NoError(t, err)
	defer f.Close()
	in := bufio.NewScanner(f)
	require.True(t, in.Scan())
	for in.Scan() {
		var x Record
		require.NoError(t, json.Unmarshal(in.Bytes(), &x))
		list = append(list, x)
	}
	return list
}

// TestFlushReturnsIfADeviceHangs has a source that waits until the test ends.
func TestFlushReturnsIfADeviceHangs(t *testing.T) {
	r := start(t)
	end, closed := make(chan struct{}), 0
	r.AddSource(Source{Collect: func() { <-end }, Close: func() { closed++ }})
	r.Flush()
	close(end)
	require.NoError(t, r.Close())
	require.Equal(t, 1, closed)
	r.AddSource(Source{Close: func() { closed++ }})
	require.Equal(t, 2, closed, "the recording has ended")
}

// TestFlushAfterCloseWritesNothing adds a record to a recorder without a file, and to one with a file.
func TestFlushAfterCloseWritesNothing(t *testing.T) {
	r := start(t)
	require.NoError(t, r.Close())
	r.Add(Record{Kind: Instant})
	r.Flush()
	files, err := os.ReadDir(r.dir)
	require.NoError(t, err)
	require.Empty(t, files)

	r = start(t)
	r.Add(Record{Kind: Instant})
	require.NoError(t, r.Close())
	r.Add(Record{Kind: Instant})
	r.Flush()
	require.Len(t, lines(t, r), 1)
	require.NoError(t, r.err)
}

// TestLimitOfTheFile reaches the limit with records that wait, of which one says that others were
// dropped before.
func TestLimitOfTheFile(t *testing.T) {
	r, err := New(t.TempDir())
	require.NoError(t, err)
	require.NoError(t, r.writeList([]Record{{Kind: Instant, Name: "first"}}))
	r.written = maxBytes + 1
	require.ErrorContains(t, r.writeList([]Record{{Kind: Instant}, {Kind: Instant}, {Kind: Dropped, Count: 5}}), "which is the limit")
	list := lines(t, r)
	require.Len(t, list, 2)
	require.Equal(t, "first", list[0].Name)
	require.Equal(t, Dropped, list[1].Kind)
	require.EqualValues(t, 7, list[1].Count)
	require.NoError(t, r.Close())
}
