package cluster

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func waitFor(keys ...string) call {
	c := call{op: opWait}
	for _, k := range keys {
		c.fields = append(c.fields, []byte(k))
	}
	return c
}

// TestWaitsAreCharged lets a rank wait for what would bloat or stop the coordinator.
func TestWaitsAreCharged(t *testing.T) {
	e := newEngine(2, new(atomic.Int64))
	var status []byte
	note := func(r call) { status = append(status, r.op) }

	e.do(ticket{0, 1}, waitFor(slices.Repeat([]string{"same"}, 25_000)...), note)
	require.Len(t, e.byKey["same"], 1)
	require.Equal(t, len("same")+waitBytes, e.bytes)
	e.do(ticket{0, 1}, waitFor("same"), note) // a number that waits already
	require.Equal(t, []byte{statusBad}, status)
	e.do(ticket{1, 1}, call{op: opSet, fields: [][]byte{[]byte("same"), []byte("v")}}, note)
	require.Equal(t, []byte{statusBad, statusOK, statusOK}, status)
	require.Empty(t, e.byKey)

	var many []string
	for i := range 240_000 {
		many = append(many, fmt.Sprintf("key %d", i))
	}
	status = nil
	for i := range 8 {
		e.do(ticket{0, uint64(i)}, waitFor(many...), note)
	}
	require.Equal(t, slices.Repeat([]byte{statusTooLarge}, 8), status)
	for i := range 8 {
		e.do(ticket{0, uint64(i)}, waitFor(many[:maxWaitKeys+1]...), note)
	}
	require.Equal(t, slices.Repeat([]byte{statusTooMany}, 8), status[8:])
	require.Empty(t, e.waiting)

	// All ranks together are held by the store's limit, and one by its own.
	e, status = newEngine(6, new(atomic.Int64)), nil
	for r := range 6 {
		for i := range 3 {
			e.do(ticket{r, uint64(i)}, waitFor(many[i*maxWaitKeys/2:][:maxWaitKeys/2]...), note)
		}
	}
	require.LessOrEqual(t, e.bytes, MaxStoreBytes)
	require.Equal(t, statusTooMany, status[0])
	require.Equal(t, statusFull, status[len(status)-1])

	e, status = newEngine(2, new(atomic.Int64)), nil
	for i := range uint64(maxWaits + 1) {
		op := call{op: opBarrier, fields: [][]byte{fmt.Append(nil, i)}}
		if i%2 == 0 {
			op = call{op: opGet, fields: op.fields}
		}
		e.do(ticket{0, i}, op, note)
	}
	require.Equal(t, []byte{statusTooMany}, status)
	require.Len(t, e.barriers, maxWaits/2)
	e.do(ticket{0, maxWaits + 1}, call{op: opFinish}, note) // to leave is always possible
	require.Len(t, e.waiting, maxWaits+1)
	status = nil
	for i := range uint64(1000) { // keys cost more than their bytes
		e.do(ticket{1, i}, call{op: opSet, fields: [][]byte{fmt.Append(nil, "s", i), {}}}, note)
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
				e.do(ticket{}, call{op: opSet, fields: [][]byte{[]byte(k), make([]byte, rng.IntN(2*shareFrom))}}, func(call) {})
			case 1:
				e.do(ticket{}, call{op: opDelete, fields: [][]byte{[]byte(k)}}, func(call) {})
			case 2:
				id++
				at := ticket{rng.IntN(4), id}
				keys := []string{k, key(), key()}
				open[at] = keys
				e.do(at, waitFor(keys...), func(r call) {
					require.Equal(t, statusOK, r.op)
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
