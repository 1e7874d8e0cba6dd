package alloc

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func graphPool(t *testing.T) (m *machine, d *Device, p *Pool, a *Arena, s *fakeStream) {
	m = newMachine(t, 64*mib)
	d = m.device("")
	p = d.NewPool(PoolConfig{Graphs: true, Source: asyncSource{m}})
	s = m.stream()
	a = must(p.Arena(s))
	s.refuses = true
	p.Begin()
	return m, d, p, a, s
}

// What two captured streams have used is free for the next capture at once.
func TestCapturedUsersAreForgotten(t *testing.T) {
	m, d, p, a, s := graphPool(t)
	other := m.stream()
	other.refuses = true
	for range 2 { // both when the block was given back before the end, and after
		x, y := must(a.Alloc(24*mib)), must(a.Alloc(3*mib))
		require.NoError(t, d.RecordStream(x, other))
		require.NoError(t, d.RecordStream(y, other))
		require.NoError(t, d.Free(x))
		_, err := a.Alloc(60 * mib)
		require.ErrorIs(t, err, ErrNoMemory)
		s.refuses, other.refuses = false, false
		p.Rejoin()
		require.NoError(t, d.Free(y))
		require.Zero(t, other.refs)
		s.refuses, other.refuses = true, true
		p.Begin()
		require.Equal(t, x, must(a.Alloc(24*mib)))
		require.NoError(t, d.Free(x))
	}
	s.refuses = false
	p.Rejoin()
	d.check(t)
}

// A stream beside the capture is waited for on the host: a captured one cannot.
func TestUsersBesideCaptures(t *testing.T) {
	m, d, p, a, s := graphPool(t)
	eager := m.stream()
	x := must(a.Alloc(40 * mib))
	s.refuses = false
	p.Rejoin()
	eager.work(x, 40*mib)
	require.NoError(t, d.RecordStream(x, eager))
	s.refuses = true
	p.Begin()
	require.NoError(t, d.Free(x))
	_, err := a.Alloc(40 * mib)
	require.ErrorIs(t, err, ErrNoMemory, "the other stream is not past it")
	s.refuses = false
	p.Rejoin()
	s.refuses = true
	p.Begin()
	_, err = a.Alloc(40 * mib)
	require.ErrorIs(t, err, ErrNoMemory, "nor after the capture")
	eager.advance(1, false)
	require.Equal(t, x, must(a.Alloc(40*mib)))
	d.check(t)
}

// A captured stream that uses memory of no graph is waited for when it can be.
func TestCapturedUserOfOtherMemory(t *testing.T) {
	m := newMachine(t, 64*mib)
	d := m.device("")
	a := must(d.Default().Arena(m.stream()))
	other := m.stream()
	other.refuses = true
	x := must(a.Alloc(40 * mib))
	require.NoError(t, d.RecordStream(x, other))
	require.NoError(t, d.Free(x))
	_, err := a.Alloc(40 * mib)
	require.ErrorIs(t, err, ErrNoMemory)
	other.refuses = false
	require.Equal(t, x, must(a.Alloc(40*mib)))
	require.Zero(t, other.refs)
}

// What a closed pool of graphs has goes back when no stream uses it.
func TestClosedGraphsWaitForAllStreams(t *testing.T) {
	m, d, p, a, s := graphPool(t)
	x := must(a.Alloc(20 * mib))
	s.refuses = false
	p.Rejoin()
	u := s.work(x, 20*mib)
	m.past = append(m.past, u)
	require.NoError(t, d.Free(x))
	require.NoError(t, p.Close())
	m.requireNothing()
	require.Equal(t, u.n, s.done)
}
