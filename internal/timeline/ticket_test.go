package timeline

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

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
