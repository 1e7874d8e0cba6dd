package alloc

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

func TestWrongAddresses(t *testing.T) {
	m := newMachine(t, 1<<40)
	d := m.device("")
	d.Record(&HistoryConfig{Entries: 100, Stacks: true})
	a := must(d.Default().Arena(m.stream()))
	var list []uint64
	for range 4 {
		list = append(list, must(a.Alloc(1024)))
	}
	large := must(a.Alloc(5 << 20))
	gone := must(a.Alloc(64 << 20))
	require.NoError(t, d.Free(gone))
	require.NoError(t, d.Empty())
	refuse := func(addr uint64, want PointerError, text string) {
		t.Helper()
		before := d.ReadAll()
		for name, call := range map[string]func() error{"free": func() error { return d.Free(addr) }, "record": func() error { return d.RecordStream(addr, m.stream()) }} {
			if name == "record" && want.Used {
				continue // it lies in a block
			}
			var err *PointerError
			require.ErrorAs(t, call(), &err)
			require.ErrorContains(t, err, text)
			want.Addr, want.Stack, want.Freed = addr, err.Stack, err.Freed
			require.Equal(t, want, *err)
		}
		require.Equal(t, before, d.ReadAll(), "nothing has changed")
		d.check(t)
	}
	refuse(0, PointerError{}, "is not memory of this allocator")
	refuse(^uint64(0), PointerError{}, "is not memory of this allocator")
	refuse(1<<20, PointerError{}, "is not memory of this allocator")
	refuse(gone, PointerError{}, "went back to the driver")
	refuse(list[1]+1, PointerError{Within: list[1], Size: 1024, Used: true}, "lies in the block of 1024 bytes")
	refuse(list[1]+512, PointerError{Within: list[1], Size: 1024, Used: true}, "and is not its beginning")
	refuse(large+3<<20, PointerError{Within: large, Size: 5 << 20, Used: true}, "lies in the block of 5242880 bytes")

	require.NoError(t, d.Free(list[1])) // to lastFreed
	refuse(list[1], PointerError{Within: list[1], Size: 1024}, "was freed before")
	require.NoError(t, d.Free(list[2])) // becomes part of the one before
	refuse(list[2], PointerError{Within: list[1], Size: 2048}, "was freed before")

	var err *PointerError
	require.ErrorAs(t, d.Free(list[1]), &err)
	require.NotEmpty(t, err.Stack.PCs, "where it was allocated")
	require.NotEmpty(t, err.Freed.PCs, "where it was freed")
}

func TestAbsurdSizes(t *testing.T) {
	testhost.Serial(t)
	m := newMachine(t, 1<<62)
	d := m.device("")
	a := must(d.Default().Arena(m.stream()))
	for _, n := range []uint64{1 << 60, ^uint64(0), ^uint64(0) - 511} {
		var err *NoMemoryError
		_, e := a.Alloc(n)
		require.ErrorAs(t, e, &err)
		require.Zero(t, err.Wanted)
	}
	require.Zero(t, d.Counts().OutOfMemory)
	for _, n := range []uint64{1<<60 - 1, 3 << 40, 2<<40 - 1} { // more than a segment can have
		calls := m.calls
		_, err := a.Alloc(n)
		require.ErrorIs(t, err, ErrNoMemory)
		require.Equal(t, calls, m.calls, "the driver is not asked")
	}
	addr := must(a.Alloc(2<<40 - 2<<20))
	d.check(t)
	require.NoError(t, d.Free(addr))
	require.EqualValues(t, 3, d.Counts().OutOfMemory)
}

// A liar is a Source that gives out wrong addresses.
type liar struct {
	*machine
	addr uint64
}

func (l *liar) Alloc(Stream, uint64) (uint64, error) { return l.addr, nil }
func (l *liar) Free(_ Stream, addr, n uint64) error  { l.call("free"); return nil }

func TestWrongSources(t *testing.T) {
	m := newMachine(t, 1<<40)
	d := m.device("")
	s := m.stream()
	has := must(must(d.Default().Arena(s)).Alloc(30 << 20))
	l := &liar{machine: m}
	a := must(d.NewPool(PoolConfig{Source: l}).Arena(s))
	for addr, freed := range map[uint64]bool{0: true, 1<<33 + 1: true, 1<<50 - 512: true, ^uint64(511): true, has: false, has + 29<<20: false, has - 1<<20: false} {
		l.addr = addr
		calls := m.calls
		_, err := a.Alloc(3 << 20)
		require.ErrorAs(t, err, new(*SourceError), "%#x", addr)
		require.Equal(t, freed, m.calls > calls, "%#x goes back unless somebody has it", addr)
		d.check(t)
	}
}

func TestClosedPools(t *testing.T) {
	m := newMachine(t, 1<<40)
	d := m.device("")
	s := m.stream()
	for range 3 {
		p := d.NewPool(PoolConfig{})
		a := must(p.Arena(s))
		x, y := must(a.Alloc(1000)), must(a.Alloc(1000))
		require.NoError(t, d.Free(y))
		require.NoError(t, p.Close())
		_, err := a.Alloc(1000)
		require.ErrorIs(t, err, ErrClosed, "although there is room beside what is used")
		_, err = p.Arena(m.stream())
		require.ErrorIs(t, err, ErrClosed)
		require.Len(t, m.segments, 1)
		require.NoError(t, d.Free(x))
		require.Empty(t, m.segments)
		require.Len(t, d.pools, 1)
		require.Len(t, d.domains, 1, "a domain is used again")
		_, err = a.Alloc(1000)
		require.ErrorIs(t, err, ErrClosed)
		d.check(t)
	}
}

// A pool whose expandable segments are given back leaves nothing behind.
func TestClosedExpandablePools(t *testing.T) {
	m := newMachine(t, 1<<30)
	d := m.device("expandable_segments:True")
	s := m.stream()
	for range 20 {
		p := d.NewPool(PoolConfig{})
		x := must(must(p.Arena(s)).Alloc(5 << 20))
		require.NoError(t, p.Close())
		require.NoError(t, d.Free(x))
		require.Empty(t, m.spans)
	}
	require.Len(t, d.unused, 1)
	require.Equal(t, []*segment{nil}, d.unused[0].segments)
}

func TestHistoryIsBounded(t *testing.T) {
	m := newMachine(t, 1<<40)
	d := m.device("")
	a := must(d.Default().Arena(m.stream()))
	require.Nil(t, d.History())
	d.Record(&HistoryConfig{Entries: 10})
	var last uint64
	for i := range 50 {
		last = must(a.Alloc(uint64(i + 1)))
	}
	list := d.History()
	require.Len(t, list, 10)
	require.Equal(t, ActionSnapshot, list[9].Action)
	require.Equal(t, last, list[8].Addr)
	require.EqualValues(t, 50, list[8].Size)
	for i := range 8 {
		require.EqualValues(t, 42+i, list[i].Size, "the last ones, in order")
	}
	d.Record(&HistoryConfig{Stacks: true})
	require.NoError(t, d.Free(must(a.Alloc(1))))
	require.Empty(t, d.History())
	d.Record(nil)
	require.Nil(t, d.History())
}

// A ledger is an Auditor that knows which pieces are out.
type ledger struct {
	t   *testing.T
	out map[piece]Stream
}

func (l *ledger) Allocated(s Stream, addr, bytes uint64) {
	require.NotNil(l.t, s)
	require.NotContains(l.t, l.out, piece{addr, bytes})
	l.out[piece{addr, bytes}] = s
}

func (l *ledger) Freed(s Stream, addr, bytes uint64) {
	require.NotNil(l.t, s)
	require.Contains(l.t, l.out, piece{addr, bytes})
	delete(l.out, piece{addr, bytes})
}

// What is freed after the end of its stream is reported on the stream that
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
