package route

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/collective"
)

// TestParts checks random shapes: the parts of all rounds and ranks are each element of the source
// once, and a rank's parts of a round fit in the memory of the round.
func TestParts(t *testing.T) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 5))
	for range 500 {
		x := shape{
			kind:  []collective.Kind{collective.AllReduce, collective.Reduce, collective.ReduceScatter, collective.ReduceScatterV}[r.IntN(4)],
			ranks: 2 + r.IntN(7), size: 1 << r.IntN(4), n: r.IntN(3000),
		}
		x.root, x.most = r.IntN(x.ranks), x.ranks*(unit+r.IntN(5000))
		total := x.n
		switch x.kind {
		case collective.ReduceScatter:
			total *= x.ranks
		case collective.ReduceScatterV:
			total = 0
			for range x.ranks {
				x.counts = append(x.counts, r.IntN(3000))
				total += x.counts[len(x.counts)-1]
			}
			x.n = total
		}
		seen := make([]int, total)
		for k := range x.rounds() {
			longest := 0
			for rank := range x.ranks {
				p := x.part(k, rank)
				require.GreaterOrEqual(t, p.n, 0, "%+v", x)
				longest = max(longest, p.n)
				for i := range p.n {
					seen[p.from+i]++
				}
			}
			if x.whole() {
				require.LessOrEqual(t, x.ranks*longest, x.most, "%+v", x)
				continue
			}
			require.LessOrEqual(t, longest, x.width(), "%+v", x)
			require.LessOrEqual(t, x.ranks*x.width(), x.most, "%+v", x)
		}
		want := 1
		if x.whole() && x.kind == collective.AllReduce {
			want = x.ranks
		}
		for i, n := range seen {
			if n != want {
				t.Fatalf("element %d is in %d parts, want %d: %+v", i, n, want, x)
			}
		}
	}
}
