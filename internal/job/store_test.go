package job

import (
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestEngineForgets(t *testing.T) {
	e := newEngine(2, new(atomic.Int64))
	nothing := func(Call) {}
	e.do(ticket{0, 1}, Call{Op: OpGet, Fields: [][]byte{[]byte("k")}}, nothing)
	e.do(ticket{1, 1}, Call{Op: OpWait, Fields: [][]byte{[]byte("k"), []byte("l")}}, nothing)
	e.cancel(ticket{0, 1})
	e.dropRank(1)
	require.Empty(t, e.waiting)
	require.Empty(t, e.byKey)

	// Bad shapes are refused, not guessed at.
	for _, c := range []Call{{Op: 0}, {Op: 99}, {Op: OpSet}, {Op: OpGet, Fields: [][]byte{nil}}, {Op: OpSet, Fields: [][]byte{[]byte("k"), nil}}} {
		var got Call
		e.do(ticket{0, 2}, c, func(r Call) { got = r })
		require.Equal(t, statusBad, got.Op)
	}
}

func TestEngineBarrier(t *testing.T) {
	e := newEngine(3, new(atomic.Int64))
	got := map[int]Call{}
	come := func(rank int, op byte) {
		c := Call{Op: op}
		if op == OpBarrier {
			c.Fields = [][]byte{[]byte("b")}
		}
		e.do(ticket{rank, 1}, c, func(r Call) { got[rank] = r })
	}
	come(0, OpBarrier)
	e.do(ticket{0, 2}, Call{Op: OpBarrier, Fields: [][]byte{[]byte("b")}}, func(r Call) { got[100] = r })
	require.Equal(t, StatusBusy, got[100].Op)
	e.cancel(ticket{0, 1})
	require.Equal(t, StatusAbsent, got[0].Op)
	require.Equal(t, []int{1, 2}, FieldRanks(got[0].Fields))

	come(0, OpBarrier) // it had not counted as come
	come(1, OpBarrier)
	e.dropRank(2)
	require.Equal(t, StatusLeft, got[1].Op)
	require.Equal(t, []int{2}, FieldRanks(got[0].Fields))
	come(0, OpFinish)
	require.Equal(t, StatusLeft, got[0].Op, "waits still")
	come(1, OpFinish)
	require.Equal(t, StatusOK, got[0].Op, "who has left has come to the last barrier")
	require.Empty(t, e.barriers)
	require.Empty(t, e.waiting)
}

// A waiting GetAll sees all values of a SetAll, or none.
func TestSetAllIsAtomic(t *testing.T) {
	e := newEngine(1, new(atomic.Int64))
	fields := func(s ...string) (f [][]byte) {
		for _, x := range s {
			f = append(f, []byte(x))
		}
		return f
	}
	for i := range 100 { // maps have a random order
		old, added := fmt.Sprint("old", i), fmt.Sprint("new", i)
		e.set(old, []byte("0"))
		var got Call
		e.do(ticket{0, uint64(i)}, Call{Op: OpGetAll, Fields: fields(old, added)}, func(r Call) { got = r })
		e.do(ticket{0, 1000}, Call{Op: OpSetAll, Fields: fields(old, "1", added, "1")}, func(r Call) { require.Equal(t, StatusOK, r.Op) })
		require.Equal(t, fields("1", "1"), got.Fields)
	}
	full := string(make([]byte, MaxValueBytes))
	for i := range MaxStoreBytes/MaxValueBytes - 1 {
		e.set(fmt.Sprint("full", i), []byte(full))
	}
	before := e.total()
	e.do(ticket{0, 1000}, Call{Op: OpSetAll, Fields: fields("x", full, "old0", "2")}, func(r Call) { require.Equal(t, StatusFull, r.Op) })
	require.Equal(t, before, e.total())
	require.Equal(t, "1", string(e.values["old0"].b))
}
