package sanitizer

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
		p, want, since := NewPieces(step*units), [units]State{}, [units]uint64{}
		for now := range uint64(300) {
			lo := rng.IntN(units)
			hi := lo + 1 + rng.IntN(min(units-lo, 1+rng.IntN(units)))
			to, all := State(rng.IntN(4)), rng.IntN(4) == 0
			if to == Captured {
				all = true
			}
			run := Run{State: to, By: cudadrv.Stream(lo)}
			if to == Allocated {
				run.Since = now
			}
			p.Set(uint64(lo*step), uint64(hi*step), run, all)
			for i := lo; i < hi; i++ {
				if all || want[i] != Captured {
					want[i], since[i] = to, run.Since
				}
			}
			checkRuns(t, p)
			for i, s := range want {
				part, found := p.Seek(uint64(i*step), uint64(i*step+1), func(x State) bool { return x == s })
				if !found {
					t.Fatalf("unit %d is not %d", i, s)
				}
				whole := p.Whole(part)
				if s == Never {
					continue
				}
				a, b := i, i
				for a > 0 && want[a-1] == s && since[a-1] == since[i] {
					a--
				}
				for b+1 < units && want[b+1] == s && since[b+1] == since[i] {
					b++
				}
				if whole.Lo != uint64(a*step) || whole.Hi != uint64((b+1)*step) {
					t.Fatalf("unit %d lies from %d to %d: want %d to %d", i, whole.Lo, whole.Hi, a*step, (b+1)*step)
				}
			}
			lo, hi, s := rng.IntN(units), units, State(rng.IntN(4))
			at := lo
			for at < hi && want[at] != s {
				at++
			}
			part, found := p.Seek(uint64(lo*step), uint64(hi*step), func(x State) bool { return x == s })
			require.Equal(t, at < hi, found)
			if found {
				require.Equal(t, uint64(at*step), max(part.Lo, uint64(lo*step)))
			}
			before := now / 2
			at = lo
			for at < hi && since[at] <= before {
				at++
			}
			part, found = p.AllocatedAfter(before, uint64(lo*step), uint64(hi*step))
			require.Equal(t, at < hi, found)
			if found {
				require.Equal(t, uint64(at*step), max(part.Lo, uint64(lo*step)))
				require.Equal(t, since[at], part.Since)
			}
		}
	}
}

// checkRuns checks that runs are in order, in their chunk, and merged.
func checkRuns(t *testing.T, p *Pieces) {
	t.Helper()
	for c, list := range p.chunks {
		at := uint64(c) * listBytes
		for i, r := range list {
			require.NotEqual(t, Never, r.State)
			require.Less(t, r.Lo, r.Hi)
			require.GreaterOrEqual(t, r.Lo, at)
			require.False(t, i > 0 && r.Lo == at && list[i-1].continues(r), "neighbours of one state")
			at = r.Hi
		}
		require.LessOrEqual(t, at, uint64(c+1)*listBytes)
	}
}
