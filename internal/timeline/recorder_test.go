package timeline

import (
	"bufio"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

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

func start(t *testing.T) *Recorder {
	t.Helper()
	r, err := Start(t.TempDir())
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, r.Close()) })
	return r
}

// take returns the records that wait for the writer.
func (r *Recorder) take() []Record {
	r.mu.Lock()
	defer r.mu.Unlock()
	list := r.waiting
	r.waiting = nil
	return list
}

func (r *Recorder) moment(ns int64) time.Time { return r.origin.Add(time.Duration(ns)) }

// TestCollectiveHasTheTimeOfItsParts enqueues a batch of two operations, which has three parts: the
// library's, a kernel, and one that ends after the last call.
func TestCollectiveHasTheTimeOfItsParts(t *testing.T) {
	r := start(t)
	r.writing.Lock() // the test takes the records
	defer r.writing.Unlock()
	on := Stream{Device: 1, Handle: 7}
	require.True(t, r.Open(on, Op{Group: "g", Name: "ncclAllReduce", Bytes: 4}))
	require.False(t, r.Open(on, Op{Group: "g", Name: "ncclAllGather", Bytes: 8}))
	require.False(t, r.Open(on, Op{Group: "g", Name: "refused", Bytes: 9}))
	r.Refuse(on)
	kernel := r.Enqueue(Kernel, "pack", on, 0)
	kernel.Done(r.moment(5), r.moment(9)) // all parts so far have completed
	library := r.Enqueue(Collective, "ncclAllReduce", on, 0)
	whole := r.Whole(on)
	other := r.Enqueue(Kernel, "other", Stream{Device: 1, Handle: 8}, 0)
	library.Done(r.moment(10), r.moment(20))
	r.Shut(on)
	r.Shut(on) // the second operation of the batch
	other.Done(r.moment(1), r.moment(2))
	require.True(t, r.unfinished())
	whole.Done(r.moment(3), r.moment(25))
	require.False(t, r.unfinished())
	require.Nil(t, r.Whole(on))
	list := r.take()
	require.Len(t, list, 3)
	all := list[2]
	require.Equal(t, []int64{3, 25, 12}, []int64{all.Begin, all.End, int64(all.Bytes)})
	require.Len(t, all.Ops, 2)
	require.Equal(t, all.Order, list[0].Parent)
	require.Zero(t, list[1].Parent)
}

// TestRefusedCollectivesAreForgotten refuses a collective, and fails one after it was opened.
func TestRefusedCollectivesAreForgotten(t *testing.T) {
	r := start(t)
	on := Stream{Handle: 7}
	r.Open(on, Op{Group: "g"})
	part := r.Whole(on)
	r.Refuse(on)
	r.Refuse(on)
	require.False(t, r.unfinished())
	part.Cancel() // late
	r.Open(on, Op{Group: "g"})
	part = r.Whole(on)
	r.Forget("other")
	require.NotEmpty(t, r.open)
	r.Forget("g")
	require.Empty(t, r.open)
	require.False(t, r.unfinished())
	part.Done(r.moment(1), r.moment(2)) // late
	r.Open(on, Op{Group: "g"})
	r.Shut(on) // nothing ran
	(*Ticket)(nil).Cancel()
	require.Empty(t, r.take())
	require.False(t, r.unfinished())
}

// TestRecordsAreDropped adds more records than fit while the writer cannot write.
func TestRecordsAreDropped(t *testing.T) {
	r := start(t)
	r.writing.Lock()
	for range maxWaiting + 3 {
		r.Add(Record{Kind: Instant})
	}
	require.Len(t, r.take(), maxWaiting)
	require.GreaterOrEqual(t, r.dropped.Load(), uint64(3))
	r.writing.Unlock()
}

// TestOpenRangesAreLimited begins more ranges than the limit and ends all.
func TestOpenRangesAreLimited(t *testing.T) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	r := start(t)
	require.Zero(t, r.Push("outermost"))
	for range maxDepth - 1 {
		r.Push("range")
	}
	require.Equal(t, maxDepth-1, r.Push("innermost"))
	for depth := maxDepth - 1; depth >= 0; depth-- {
		require.Equal(t, depth, r.Pop())
	}
	require.Equal(t, -1, r.Pop(), "the outermost range is forgotten")
	require.Empty(t, r.pushed)
}
