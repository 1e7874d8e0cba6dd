package virtual

import (
	"math/rand/v2"
	"testing"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// TestPiecesProperty compares the runs with a state for each unit of a block that
// has chunks of which the last is short.
func TestPiecesProperty(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %#x", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	const step, units = 128 << 10, 40
	for range 50 {
		p, want := newPieces(step*units), [units]state{}
		for range 300 {
			lo := rng.IntN(units)
			hi := lo + 1 + rng.IntN(min(units-lo, 1+rng.IntN(units)))
			to, all := state(rng.IntN(4)), rng.IntN(4) == 0
			if to == captured {
				all = true
			}
			p.set(uint64(lo*step), uint64(hi*step), run{state: to, by: cudadrv.Stream(lo)}, all)
			for i := lo; i < hi; i++ {
				if all || want[i] != captured {
					want[i] = to
				}
			}
			checkRuns(t, p)
			for i, s := range want {
				part, found := p.seek(uint64(i*step), uint64(i*step+1), func(x state) bool { return x == s })
				if !found {
					t.Fatalf("unit %d is not %d", i, s)
				}
				whole := p.whole(part)
				if s == never {
					continue
				}
				a, b := i, i
				for a > 0 && want[a-1] == s {
					a--
				}
				for b+1 < units && want[b+1] == s {
					b++
				}
				if whole.lo != uint64(a*step) || whole.hi != uint64((b+1)*step) {
					t.Fatalf("unit %d lies from %d to %d: want %d to %d", i, whole.lo, whole.hi, a*step, (b+1)*step)
				}
			}
			lo, hi, s := rng.IntN(units), units, state(rng.IntN(4))
			at := lo
			for at < hi && want[at] != s {
				at++
			}
			part, found := p.seek(uint64(lo*step), uint64(hi*step), func(x state) bool { return x == s })
			require.Equal(t, at < hi, found)
			if found {
				require.Equal(t, uint64(at*step), max(part.lo, uint64(lo*step)))
			}
		}
	}
}

// checkRuns checks that runs are in order, in their chunk, and merged.
func checkRuns(t *testing.T, p *pieces) {
	t.Helper()
	for c, list := range p.chunks {
		at := uint64(c) * chunkBytes
		for i, r := range list {
			require.NotEqual(t, never, r.state)
			require.Less(t, r.lo, r.hi)
			require.GreaterOrEqual(t, r.lo, at)
			require.False(t, i > 0 && r.lo == at && list[i-1].state == r.state, "neighbours of one state")
			at = r.hi
		}
		require.LessOrEqual(t, at, uint64(c+1)*chunkBytes)
	}
}

// A history of thousands of pieces still finds the race for the first, and stays
// small.
func TestHistoryOfManyPieces(t *testing.T) {
	const piece = 512
	var h history
	mine := func(epoch int) (*stamp, access) {
		return &stamp{slot: 0, epoch: uint64(epoch)}, access{slot: 0, epoch: uint64(epoch), op: "mine"}
	}
	const n = 5 * chunkBytes / piece
	for i := range n {
		now, by := mine(i + 1)
		_, found := h.add(now, nil, by, uint64(i*piece), uint64((i+1)*piece), true)
		require.False(t, found)
	}
	other, by := &stamp{slot: 1, epoch: 1}, access{slot: 1, epoch: 1, op: "other"}
	for _, i := range []int{0, 1, n / 2, n - 1} {
		c, found := h.add(other, nil, by, uint64(i*piece+8), uint64(i*piece+9), false)
		require.True(t, found)
		require.Equal(t, uint64(i+1), c.epoch)
	}
	// One write of all of it joins them.
	now := &stamp{slot: 0, epoch: n + 1, seen: clock{0, 1}}
	_, found := h.add(now, nil, access{slot: 0, epoch: n + 1, op: "all"}, 0, n*piece, true)
	require.False(t, found)
	for _, c := range h.chunks {
		require.Len(t, c, 1)
	}
	// What the host has waited for is forgotten first.
	for i := range 3 * maxSpans {
		e := uint64(n + 2 + i)
		h.add(&stamp{slot: 0, epoch: e}, clock{e - 10}, access{slot: 0, epoch: e, op: "small"}, uint64(i*2), uint64(i*2+1), true)
		require.LessOrEqual(t, len(h.chunks[0]), maxSpans+2)
	}
	c, found := h.add(other, nil, by, 3*maxSpans*2-2, 3*maxSpans*2-1, true)
	require.True(t, found)
	require.Equal(t, uint64(n+1+3*maxSpans), c.epoch)
}
