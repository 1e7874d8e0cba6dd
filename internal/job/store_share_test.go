package job

import (
	"bytes"
	"fmt"
	"net"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestWaitersShareValues answers as many calls as a rank may have with two values of the greatest length: that needs
// little memory and time, because nothing is copied for a waiter.
func TestWaitersShareValues(t *testing.T) {
	e := newEngine(2, new(atomic.Int64))
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	s := NewStream(&Link{Conn: a}, NewRunClock(time.Second), time.Minute)
	s.most = maxWorkerUnackedBytes
	for i := range uint64(MaxWaits) {
		e.do(ticket{1, i}, Call{Op: OpGetAll, Fields: [][]byte{[]byte("k"), []byte("l")}}, func(r Call) {
			s.send(r.message(kindReply, FirstEpoch, i))
		})
	}
	set := func(key string) {
		e.do(ticket{0, 1}, Call{Op: OpSet, Fields: [][]byte{[]byte(key), make([]byte, MaxValueBytes)}}, func(r Call) {
			require.Equal(t, StatusOK, r.Op)
		})
	}
	set("k")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	set("l")
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(12<<20))
	require.False(t, s.isClosed(), "the replies fit")
	require.Len(t, s.out, MaxWaits)
	require.Equal(t, 2*MaxValueBytes+13+2*fieldBytes+messageHeadBytes, s.out[7].bytes())
	got, err := decodeCall(s.out[7].Encode()[messageHeadBytes:])
	require.NoError(t, err)
	require.Equal(t, Call{Op: StatusOK, Fields: [][]byte{make([]byte, MaxValueBytes), make([]byte, MaxValueBytes)}}, got)

	// What only queued replies have still counts, until the rank has acknowledged them or is lost.
	for _, key := range []string{"k", "l"} {
		e.do(ticket{0, 1}, Call{Op: OpDelete, Fields: [][]byte{[]byte(key)}}, func(Call) {})
	}
	require.Equal(t, 2*MaxValueBytes, e.total())
	s.mu.Lock()
	s.trim(MaxWaits - 1)
	s.mu.Unlock()
	require.Equal(t, 2*MaxValueBytes, e.total())
	s.close()
	require.Zero(t, e.total())
}

// TestRepliesOfARankThatDoesNotRead overwrites a key after each of its replies. The store refuses more when the
// replies have all of its memory.
func TestRepliesOfARankThatDoesNotRead(t *testing.T) {
	e := newEngine(1, new(atomic.Int64))
	s := NewStream(nil, NewRunClock(time.Second), time.Minute)
	last := StatusOK
	n := 0
	for ; last == StatusOK && n < 100; n++ {
		e.do(ticket{0, 1}, Call{Op: OpSet, Fields: [][]byte{[]byte("k"), make([]byte, MaxValueBytes)}}, func(r Call) { last = r.Op })
		e.do(ticket{0, 2}, Call{Op: OpGet, Fields: [][]byte{[]byte("k")}}, func(r Call) { s.send(r.message(kindReply, FirstEpoch, 2)) })
	}
	require.Equal(t, StatusFull, last)
	require.Equal(t, MaxStoreBytes/MaxValueBytes, n)
	require.LessOrEqual(t, e.total(), MaxStoreBytes)
	s.mu.Lock()
	s.trim(1)
	s.mu.Unlock()
	e.do(ticket{0, 1}, Call{Op: OpSet, Fields: [][]byte{[]byte("k"), make([]byte, MaxValueBytes)}}, func(r Call) { last = r.Op })
	require.Equal(t, StatusOK, last, "the rank has read one")
	e.close()
	s.close()
	require.Zero(t, e.held.Load())
}

// TestAppendCopiesLittle makes a value of the greatest length by small additions, while replies have earlier lengths of it.
func TestAppendCopiesLittle(t *testing.T) {
	e := newEngine(1, new(atomic.Int64))
	add := func(b []byte) Call {
		var got Call
		e.do(ticket{0, 1}, Call{Op: OpAppend, Fields: [][]byte{[]byte("k"), b}}, func(r Call) { got = r })
		return got
	}
	add(bytes.Repeat([]byte{'a'}, MaxValueBytes/2+100))
	add([]byte("b")) // from now on it has room
	var early Message
	e.do(ticket{0, 2}, Call{Op: OpGet, Fields: [][]byte{[]byte("k")}}, func(r Call) { early = r.message(kindReply, FirstEpoch, 2) })
	want := early.Encode()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 1000 {
		require.Equal(t, StatusOK, add([]byte("c")).Op)
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(2<<20))
	require.Equal(t, want, early.Encode(), "the reply does not change")
	require.EqualValues(t, MaxValueBytes/2+1101, add([]byte{}).N)
	require.Equal(t, StatusTooLarge, add(make([]byte, MaxValueBytes/2)).Op)
	require.Equal(t, len("k")+entryBytes+MaxValueBytes, e.total())
}

// TestManyKeysOfACall: a call cannot cost the coordinator more time than its bytes suggest.
func TestManyKeysOfACall(t *testing.T) {
	c := Call{Op: OpSetAll}
	for i := range MaxCallKeys + 1 {
		c.Fields = append(c.Fields, fmt.Append(nil, i), []byte{})
	}
	require.Equal(t, StatusTooMany, CheckCall(c))
	c.Fields = c.Fields[2:]
	require.Equal(t, StatusOK, CheckCall(c))
	c = Call{Op: OpHas, Fields: slices.Repeat([][]byte{[]byte("k")}, MaxCallKeys+1)}
	require.Equal(t, StatusTooMany, CheckCall(c))
}

// TestBarriersOfALargeWorld: the cost of an arrival does not grow with the world, nor with the number of other barriers.
func TestBarriersOfALargeWorld(t *testing.T) {
	const n = 20_000
	e := newEngine(n, new(atomic.Int64))
	begun := processorTime()
	opened := 0
	for r := range n {
		e.do(ticket{r, 1}, Call{Op: OpBarrier, Fields: [][]byte{[]byte("b")}}, func(c Call) {
			require.Equal(t, StatusOK, c.Op)
			opened++
		})
	}
	require.Equal(t, n, opened)
	require.Less(t, processorTime()-begun, 5*time.Second, "each arrival looked at all ranks")

	e = newEngine(2, new(atomic.Int64))
	for i := range uint64(MaxWaits) {
		e.do(ticket{0, i}, Call{Op: OpBarrier, Fields: [][]byte{fmt.Append(nil, i)}}, func(c Call) {
			require.Equal(t, Call{Op: StatusAbsent, Fields: [][]byte{[]byte("1")}}, c)
			opened--
		})
	}
	for i := range uint64(MaxWaits) {
		e.cancel(ticket{0, i})
	}
	require.Equal(t, n-MaxWaits, opened)
	require.Empty(t, e.barriers)
	require.Zero(t, e.total())
}
