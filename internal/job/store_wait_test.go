package job

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func waitFor(keys ...string) Call {
	c := Call{Op: OpWait}
	for _, k := range keys {
		c.Fields = append(c.Fields, []byte(k))
	}
	return c
}

// TestWaitsAreCharged lets a rank wait for what would bloat or stop the coordinator.
func TestWaitsAreCharged(t *testing.T) {
	e := newEngine(2, new(atomic.Int64))
	var status []byte
	note := func(r Call) { status = append(status, r.Op) }

	e.do(ticket{0, 1}, waitFor(slices.Repeat([]string{"same"}, 25_000)...), note)
	require.Len(t, e.byKey["same"], 1)
	require.Equal(t, len("same")+waitBytes, e.bytes)
	e.do(ticket{0, 1}, waitFor("same"), note) // a number that waits already
	require.Equal(t, []byte{statusBad}, status)
	e.do(ticket{1, 1}, Call{Op: OpSet, Fields: [][]byte{[]byte("same"), []byte("v")}}, note)
	require.Equal(t, []byte{statusBad, StatusOK, StatusOK}, status)
	require.Empty(t, e.byKey)

	var many []string
	for i := range 240_000 {
		many = append(many, fmt.Sprintf("key %d", i))
	}
	status = nil
	for i := range 8 {
		e.do(ticket{0, uint64(i)}, waitFor(many...), note)
	}
	require.Equal(t, slices.Repeat([]byte{StatusTooLarge}, 8), status)
	for i := range 8 {
		e.do(ticket{0, uint64(i)}, waitFor(many[:MaxWaitKeys+1]...), note)
	}
	require.Equal(t, slices.Repeat([]byte{StatusTooMany}, 8), status[8:])
	require.Empty(t, e.waiting)

	// All ranks together are held by the store's limit, and one by its own.
	e, status = newEngine(6, new(atomic.Int64)), nil
	for r := range 6 {
		for i := range 3 {
			e.do(ticket{r, uint64(i)}, waitFor(many[i*MaxWaitKeys/2:][:MaxWaitKeys/2]...), note)
		}
	}
	require.LessOrEqual(t, e.bytes, MaxStoreBytes)
	require.Equal(t, StatusTooMany, status[0])
	require.Equal(t, StatusFull, status[len(status)-1])

	e, status = newEngine(2, new(atomic.Int64)), nil
	for i := range uint64(MaxWaits + 1) {
		op := Call{Op: OpBarrier, Fields: [][]byte{fmt.Append(nil, i)}}
		if i%2 == 0 {
			op = Call{Op: OpGet, Fields: op.Fields}
		}
		e.do(ticket{0, i}, op, note)
	}
	require.Equal(t, []byte{StatusTooMany}, status)
	require.Len(t, e.barriers, MaxWaits/2)
	e.do(ticket{0, MaxWaits + 1}, Call{Op: OpFinish}, note) // to leave is always possible
	require.Len(t, e.waiting, MaxWaits+1)
	status = nil
	for i := range uint64(1000) { // keys cost more than their bytes
		e.do(ticket{1, i}, Call{Op: OpSet, Fields: [][]byte{fmt.Append(nil, "s", i), {}}}, note)
	}
	require.Greater(t, e.bytes, 1000*entryBytes)
}

// TestWaitsAgainstModel runs random programs: a call is answered exactly when all of its
// keys have values, and what waits and what is kept is charged to the byte.
func TestWaitsAgainstModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 200 {
		e := newEngine(4, new(atomic.Int64))
		open := map[ticket][]string{}
		id := uint64(0)
		key := func() string { return string(rune('a' + rng.IntN(6))) }
		for range 100 {
			k := key()
			switch rng.IntN(4) {
			case 0:
				e.do(ticket{}, Call{Op: OpSet, Fields: [][]byte{[]byte(k), make([]byte, rng.IntN(2*shareFrom))}}, func(Call) {})
			case 1:
				e.do(ticket{}, Call{Op: OpDelete, Fields: [][]byte{[]byte(k)}}, func(Call) {})
			case 2:
				id++
				at := ticket{rng.IntN(4), id}
				keys := []string{k, key(), key()}
				open[at] = keys
				e.do(at, waitFor(keys...), func(r Call) {
					require.Equal(t, StatusOK, r.Op)
					for _, k := range keys {
						require.Contains(t, e.values, k)
					}
					delete(open, at)
				})
			case 3:
				for at := range open {
					e.cancel(at)
					delete(open, at)
					break
				}
			}
			for at, keys := range open {
				require.Contains(t, e.waiting, at)
				require.True(t, slices.ContainsFunc(keys, func(k string) bool { _, ok := e.values[k]; return !ok }))
			}
			require.Len(t, e.waiting, len(open))
			require.Equal(t, charged(e), e.total())
		}
		for r := range 4 {
			e.dropRank(r)
		}
		require.Empty(t, e.waiting)
		require.Empty(t, e.byKey)
		require.Empty(t, e.loads)
		require.Equal(t, charged(e), e.total())
	}
}

func charged(e *engine) int {
	n := 0
	for k, v := range e.values {
		n += len(k) + len(v.b) + entryBytes
		if v.buf != nil {
			n += int(v.buf.size) - len(v.b)
		}
	}
	for _, w := range e.waiting {
		n += w.bytes
	}
	return n
}
