package virtual

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
			write access
			reads []access
		}
		streams := []*stamp{{slot: 0}, {slot: 1}, {slot: 2}}
		for range 60 {
			now := streams[r.IntN(len(streams))]
			if r.IntN(4) > 0 { // or it is one more access of the same operation
				now.epoch++
				if r.IntN(2) == 0 {
					now.seen = now.seen.joinStamp(*streams[r.IntN(len(streams))])
				}
			}
			lo := r.Uint64N(size)
			hi := lo + 1 + r.Uint64N(min(8, size-lo))
			by, write := access{slot: now.slot, epoch: now.epoch, op: "op"}, r.IntN(2) == 0
			_, found := spans.add(now, by, lo, hi, write)
			want := false
			for i := lo; i < hi; i++ {
				b := &bytes[i]
				want = want || b.write.op != "" && !now.after(b.write.slot, b.write.epoch)
				for _, other := range b.reads {
					want = want || write && !now.after(other.slot, other.epoch)
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
	now := &stamp{epoch: 1}
	for c := range columns {
		for r := range rows {
			at := uint64(r*columns+c) * element
			h.add(now, access{epoch: 1, op: "op"}, at, at+element, false)
		}
		if c < columns-1 {
			require.Len(t, h, rows)
		}
	}
	require.Len(t, h, 1)
}
