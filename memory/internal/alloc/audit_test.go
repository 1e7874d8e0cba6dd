package alloc

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// A ledger is an Auditor that knows which pieces are out.
type ledger struct {
	t   *testing.T
	out map[piece]Stream
}

func (l *ledger) Lend(s Stream, addr, bytes uint64) {
	require.NotNil(l.t, s)
	require.NotContains(l.t, l.out, piece{addr, bytes})
	l.out[piece{addr, bytes}] = s
}

func (l *ledger) Return(s Stream, addr, bytes uint64) {
	require.NotNil(l.t, s)
	require.Contains(l.t, l.out, piece{addr, bytes})
	delete(l.out, piece{addr, bytes})
}

// What is freed after the end of its stream is told in the order of the stream that
// takes the memory over, before that gives it out again.
func TestAuditorHearsOfLateFrees(t *testing.T) {
	m := newMachine(t, 1<<30)
	l := &ledger{t, map[piece]Stream{}}
	d := m.device("")
	d.cfg.Auditor = l
	first, second := m.stream(), m.stream()
	a := must(d.Default().Arena(first))
	x, y := must(a.Alloc(1000)), must(a.Alloc(5000))
	require.Len(t, l.out, 2)
	require.NoError(t, d.Free(x))
	require.Len(t, l.out, 1)
	d.End(first)
	require.NoError(t, d.Free(y))
	require.Len(t, l.out, 1, "nobody can tell it")
	b := must(d.Default().Arena(second))
	require.Same(t, a, b)
	require.Empty(t, l.out)
	require.Equal(t, x, must(b.Alloc(6000)))
	require.Len(t, l.out, 1)
}

// With throw_on_cudamalloc_oom what the driver refuses is out of memory at once.
func TestThrowOnMallocOOM(t *testing.T) {
	for conf, want := range map[string]bool{"": true, "throw_on_cudamalloc_oom:True": false} {
		m := newMachine(t, 100<<20)
		d := m.device(conf)
		a := must(d.Default().Arena(m.stream()))
		require.NoError(t, d.Free(must(a.Alloc(60<<20))))
		_, err := a.Alloc(80 << 20)
		require.Equal(t, want, err == nil, conf)
		if err != nil {
			require.ErrorIs(t, err, ErrNoMemory)
			require.EqualValues(t, 60<<20, d.Read(ReservedBytes).All.Current, "what is cached stays")
		}
	}
}
