package sanitizer

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// Accesses of random ranges by streams that have waited for each other now and then: the
// spans tell the same conflicts as a note at each byte.
func TestHistoryIsThatOfEachByte(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	const size = 64
	for range 200 {
		var spans spans
		var bytes [size]struct {
			write Access
			reads []Access
		}
		streams := []*Stamp{{Slot: 0}, {Slot: 1}, {Slot: 2}}
		for range 60 {
			now := streams[r.IntN(len(streams))]
			if r.IntN(4) > 0 { // or it is one more access of the same operation
				now.Epoch++
				if r.IntN(2) == 0 {
					now.Seen = now.Seen.JoinStamp(*streams[r.IntN(len(streams))])
				}
			}
			lo := r.Uint64N(size)
			hi := lo + 1 + r.Uint64N(min(8, size-lo))
			by, write := Access{Slot: now.Slot, Epoch: now.Epoch, Op: "op"}, r.IntN(2) == 0
			_, found := spans.add(now, by, lo, hi, write)
			want := false
			for i := lo; i < hi; i++ {
				b := &bytes[i]
				want = want || b.write.Op != "" && !now.after(b.write.Slot, b.write.Epoch)
				for _, other := range b.reads {
					want = want || write && !now.after(other.Slot, other.Epoch)
				}
				if write {
					b.write, b.reads = by, nil
				} else {
					b.reads = append(b.reads, by)
				}
			}
			require.Equal(t, want, found)
			for i := 1; i < len(spans); i++ {
				require.LessOrEqual(t, spans[i-1].hi, spans[i].lo)
			}
		}
	}
}

// The columns of a matrix, one after the other, leave a span for each row, and at the end
// one.
func TestHistoryOfColumns(t *testing.T) {
	const rows, columns, element = 50, 40, 4
	var h spans
	now := &Stamp{Epoch: 1}
	for c := range columns {
		for r := range rows {
			at := uint64(r*columns+c) * element
			h.add(now, Access{Epoch: 1, Op: "op"}, at, at+element, false)
		}
		if c < columns-1 {
			require.Len(t, h, rows)
		}
	}
	require.Len(t, h, 1)
}

// A history of thousands of pieces still finds the race for the first, and stays
// small.
func TestHistoryOfManyPieces(t *testing.T) {
	const piece = 512
	var h History
	mine := func(epoch int) (*Stamp, Access) {
		return &Stamp{Slot: 0, Epoch: uint64(epoch)}, Access{Slot: 0, Epoch: uint64(epoch), Op: "mine"}
	}
	const n = 5 * chunkBytes / piece
	for i := range n {
		now, by := mine(i + 1)
		_, found := h.Add(now, nil, by, uint64(i*piece), uint64((i+1)*piece), true)
		require.False(t, found)
	}
	other, by := &Stamp{Slot: 1, Epoch: 1}, Access{Slot: 1, Epoch: 1, Op: "other"}
	for _, i := range []int{0, 1, n / 2, n - 1} {
		c, found := h.Add(other, nil, by, uint64(i*piece+8), uint64(i*piece+9), false)
		require.True(t, found)
		require.Equal(t, uint64(i+1), c.Epoch)
	}
	// One write of all of it joins them.
	now := &Stamp{Slot: 0, Epoch: n + 1, Seen: Clock{0, 1}}
	_, found := h.Add(now, nil, Access{Slot: 0, Epoch: n + 1, Op: "all"}, 0, n*piece, true)
	require.False(t, found)
	for _, c := range h.chunks {
		require.Len(t, c, 1)
	}
	// What the host has waited for is forgotten first.
	for i := range 3 * maxSpans {
		e := uint64(n + 2 + i)
		h.Add(&Stamp{Slot: 0, Epoch: e}, Clock{e - 10}, Access{Slot: 0, Epoch: e, Op: "small"}, uint64(i*2), uint64(i*2+1), true)
		require.LessOrEqual(t, len(h.chunks[0]), maxSpans+2)
	}
	c, found := h.Add(other, nil, by, 3*maxSpans*2-2, 3*maxSpans*2-1, true)
	require.True(t, found)
	require.Equal(t, uint64(n+1+3*maxSpans), c.Epoch)
}

// A clock that has another stream's later epoch of a slot need not have seen what the first stream had seen.
func TestCovers(t *testing.T) {
	var slots Slots
	branch, first := slots.Take(), slots.Take()
	branch.Epoch++
	first.Seen = first.Seen.JoinStamp(branch)
	first.Epoch++
	slots.Put(first)
	second := slots.Take()
	second.Epoch++
	host := Clock(nil).JoinStamp(second)
	require.Greater(t, host.At(first.Slot), first.Epoch)
	require.False(t, host.Covers(first))
	require.True(t, host.Covers(second))
	require.True(t, host.JoinStamp(first).Covers(first))
}
