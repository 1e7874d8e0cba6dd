package alloc

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// Of segments that are too large to be split, and of which none is enough, the
// largest go, and no more than are needed (release_available_cached_blocks).
func TestLargestSegmentsGo(t *testing.T) {
	m := newMachine(t, 160*mib)
	d := m.device("max_split_size_mb:32")
	a := must(d.Default().Arena(m.stream()))
	stays, first, second := must(a.Alloc(40*mib)), must(a.Alloc(50*mib)), must(a.Alloc(60*mib))
	for _, addr := range []uint64{first, stays, second} {
		require.NoError(t, d.Free(addr))
	}
	m.since()
	big := must(a.Alloc(100 * mib))
	require.Equal(t, []string{"alloc", "free", "free", "alloc"}, m.since())
	require.Contains(t, m.segments, stays)
	require.NotContains(t, m.segments, first)
	require.NotContains(t, m.segments, second)
	require.Equal(t, stays, must(a.Alloc(40*mib)))
	require.NoError(t, d.Free(stays))
	require.NoError(t, d.Free(big))
	d.check(t)
}

// Nobody takes from a pool that others may use and that is closed, although it has
// memory and could get more.
func TestUseOnOOMOfAClosedPool(t *testing.T) {
	m, rich := newMachine(t, 20*mib), newMachine(t, 1<<30)
	rich.next = 1 << 40
	d := m.device("")
	p := d.NewPool(PoolConfig{ID: PoolID{0, 1}, Source: asyncSource{rich}, UseOnOOM: true})
	s := m.stream()
	mine, theirs := must(d.Default().Arena(s)), must(p.Arena(s))
	x, y := must(mine.Alloc(20*mib)), must(theirs.Alloc(2*mib))
	pooled := must(mine.Alloc(12 * mib))
	require.GreaterOrEqual(t, pooled, uint64(1<<40), "of the pool")
	require.NoError(t, d.Free(pooled))
	require.NoError(t, p.Close())
	for _, n := range []uint64{2 * mib, 12 * mib} { // what it has free, and what it does not
		_, err := mine.Alloc(n)
		require.ErrorIs(t, err, ErrNoMemory)
	}
	require.NoError(t, d.Free(x))
	require.NoError(t, d.Free(y))
	require.NoError(t, d.Empty())
	m.requireNothing()
	rich.requireNothing()
}

// The source hears of the stream that a segment of a pool of graphs was made on.
func TestSegmentsOfCapturesHaveStreams(t *testing.T) {
	m := newMachine(t, 1<<30)
	d := m.device("")
	var last atomic.Value
	p := d.NewPool(PoolConfig{Graphs: true, Source: &witness{asyncSource{m}, &last}})
	s := m.stream()
	p.Begin()
	x := must(must(p.Arena(s)).Alloc(30 * mib))
	p.Rejoin()
	require.NoError(t, d.Free(x))
	require.NoError(t, p.Close())
	require.Same(t, s, last.Load())
	m.requireNothing()
}
