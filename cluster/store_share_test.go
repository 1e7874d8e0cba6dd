package cluster

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
	s := newStream(&link{c: a}, newRunClock(time.Second), time.Minute)
	s.most = maxWorkerUnackedBytes
	for i := range uint64(maxWaits) {
		e.do(ticket{1, i}, call{op: opGetAll, fields: [][]byte{[]byte("k"), []byte("l")}}, func(r call) {
			s.send(r.message(kindReply, firstEpoch, i))
		})
	}
	set := func(key string) {
		e.do(ticket{0, 1}, call{op: opSet, fields: [][]byte{[]byte(key), make([]byte, MaxValueBytes)}}, func(r call) {
			require.Equal(t, statusOK, r.op)
		})
	}
	set("k")
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	set("l")
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(12<<20))
	require.False(t, s.isClosed(), "the replies fit")
	require.Len(t, s.out, maxWaits)
	require.Equal(t, 2*MaxValueBytes+13+2*fieldBytes+messageHeadBytes, s.out[7].bytes())
	got, err := decodeCall(s.out[7].encode()[messageHeadBytes:])
	require.NoError(t, err)
	require.Equal(t, call{op: statusOK, fields: [][]byte{make([]byte, MaxValueBytes), make([]byte, MaxValueBytes)}}, got)

	// What only queued replies have still counts, until the rank has acknowledged them or is lost.
	for _, key := range []string{"k", "l"} {
		e.do(ticket{0, 1}, call{op: opDelete, fields: [][]byte{[]byte(key)}}, func(call) {})
	}
	require.Equal(t, 2*MaxValueBytes, e.total())
	s.mu.Lock()
	s.trim(maxWaits - 1)
	s.mu.Unlock()
	require.Equal(t, 2*MaxValueBytes, e.total())
	s.close()
	require.Zero(t, e.total())
}

// TestRepliesOfARankThatDoesNotRead overwrites a key after each of its replies. The store refuses more when the
// replies have all of its memory.
func TestRepliesOfARankThatDoesNotRead(t *testing.T) {
	e := newEngine(1, new(atomic.Int64))
	s := newStream(nil, newRunClock(time.Second), time.Minute)
	last := statusOK
	n := 0
	for ; last == statusOK && n < 100; n++ {
		e.do(ticket{0, 1}, call{op: opSet, fields: [][]byte{[]byte("k"), make([]byte, MaxValueBytes)}}, func(r call) { last = r.op })
		e.do(ticket{0, 2}, call{op: opGet, fields: [][]byte{[]byte("k")}}, func(r call) { s.send(r.message(kindReply, firstEpoch, 2)) })
	}
	require.Equal(t, statusFull, last)
	require.Equal(t, MaxStoreBytes/MaxValueBytes, n)
	require.LessOrEqual(t, e.total(), MaxStoreBytes)
	s.mu.Lock()
	s.trim(1)
	s.mu.Unlock()
	e.do(ticket{0, 1}, call{op: opSet, fields: [][]byte{[]byte("k"), make([]byte, MaxValueBytes)}}, func(r call) { last = r.op })
	require.Equal(t, statusOK, last, "the rank has read one")
	e.close()
	s.close()
	require.Zero(t, e.held.Load())
}

// TestAppendCopiesLittle makes a value of the greatest length by small additions, while replies have earlier lengths of it.
func TestAppendCopiesLittle(t *testing.T) {
	e := newEngine(1, new(atomic.Int64))
	add := func(b []byte) call {
		var got call
		e.do(ticket{0, 1}, call{op: opAppend, fields: [][]byte{[]byte("k"), b}}, func(r call) { got = r })
		return got
	}
	add(bytes.Repeat([]byte{'a'}, MaxValueBytes/2+100))
	add([]byte("b")) // from now on it has room
	var early message
	e.do(ticket{0, 2}, call{op: opGet, fields: [][]byte{[]byte("k")}}, func(r call) { early = r.message(kindReply, firstEpoch, 2) })
	want := early.encode()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	for range 1000 {
		require.Equal(t, statusOK, add([]byte("c")).op)
	}
	runtime.ReadMemStats(&after)
	require.Less(t, after.TotalAlloc-before.TotalAlloc, uint64(2<<20))
	require.Equal(t, want, early.encode(), "the reply does not change")
	require.EqualValues(t, MaxValueBytes/2+1101, add([]byte{}).n)
	require.Equal(t, statusTooLarge, add(make([]byte, MaxValueBytes/2)).op)
	require.Equal(t, len("k")+entryBytes+MaxValueBytes, e.total())
}

// TestManyKeysOfACall: a call cannot cost the coordinator more time than its bytes suggest.
func TestManyKeysOfACall(t *testing.T) {
	c := call{op: opSetAll}
	for i := range maxCallKeys + 1 {
		c.fields = append(c.fields, fmt.Append(nil, i), []byte{})
	}
	require.Equal(t, statusTooMany, checkCall(c))
	c.fields = c.fields[2:]
	require.Equal(t, statusOK, checkCall(c))
	c = call{op: opHas, fields: slices.Repeat([][]byte{[]byte("k")}, maxCallKeys+1)}
	require.Equal(t, statusTooMany, checkCall(c))
}

// TestBarriersOfALargeWorld: the cost of an arrival does not grow with the world, nor with the number of other barriers.
func TestBarriersOfALargeWorld(t *testing.T) {
	const n = 20_000
	e := newEngine(n, new(atomic.Int64))
	begun := time.Now()
	opened := 0
	for r := range n {
		e.do(ticket{r, 1}, call{op: opBarrier, fields: [][]byte{[]byte("b")}}, func(c call) {
			require.Equal(t, statusOK, c.op)
			opened++
		})
	}
	require.Equal(t, n, opened)
	require.Less(t, time.Since(begun), 5*time.Second, "each arrival looked at all ranks")

	e = newEngine(2, new(atomic.Int64))
	for i := range uint64(maxWaits) {
		e.do(ticket{0, i}, call{op: opBarrier, fields: [][]byte{fmt.Append(nil, i)}}, func(c call) {
			require.Equal(t, call{op: statusAbsent, fields: [][]byte{[]byte("1")}}, c)
			opened--
		})
	}
	for i := range uint64(maxWaits) {
		e.cancel(ticket{0, i})
	}
	require.Equal(t, n-maxWaits, opened)
	require.Empty(t, e.barriers)
	require.Zero(t, e.total())
}
