package alloc

import (
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// A machine is a driver that counts, fails when it is told to, and checks what is
// done with it.
type machine struct {
	t        testing.TB
	total    uint64
	used     uint64
	next     uint64
	segments map[uint64]uint64
	spans    map[uint64]uint64
	pages    map[uint64]bool   // made
	mapped   map[uint64]uint64 // page at address
	opened   map[uint64]bool
	lastPage uint64
	calls    int
	fail     func(call int, name string) error
	streams  []*fakeStream
}

func newMachine(t testing.TB, total uint64) *machine {
	return &machine{t: t, total: total, next: 1 << 32, segments: map[uint64]uint64{}, spans: map[uint64]uint64{},
		pages: map[uint64]bool{}, mapped: map[uint64]uint64{}, opened: map[uint64]bool{}}
}

func (m *machine) call(name string) error {
	m.calls++
	if m.fail == nil {
		return nil
	}
	return m.fail(m.calls, name)
}

func (m *machine) Alloc(_ Stream, n uint64) (uint64, error) {
	if err := m.call("alloc"); err != nil {
		return 0, err
	}
	if m.used+n > m.total {
		return 0, ErrNoMemory
	}
	m.used += n
	addr := m.next
	m.next += roundUp(n, 2<<20)
	m.segments[addr] = n
	return addr, nil
}

func (m *machine) Free(_ Stream, addr, n uint64) error {
	if err := m.call("free"); err != nil {
		return err
	}
	require.Equal(m.t, n, m.segments[addr], "a segment is freed as it was allocated")
	delete(m.segments, addr)
	m.used -= n
	return nil
}

func (m *machine) Async() bool { return false }

const fakePage = 2 << 20

// fakePages is the machine as a PageSource.
type fakePages struct{ *machine }

func (fakePages) PageSize() uint64 { return fakePage }
func (m fakePages) Reach() uint64  { return roundUp(m.total/8*9, fakePage) }

func (m fakePages) Reserve(n uint64) (uint64, error) {
	if err := m.call("reserve"); err != nil {
		return 0, err
	}
	addr := m.next
	m.next += n
	m.spans[addr] = n
	return addr, nil
}

func (m fakePages) Unreserve(addr, n uint64) error {
	require.Equal(m.t, n, m.spans[addr])
	for at := range m.mapped {
		require.False(m.t, at-addr < n, "nothing is mapped there")
	}
	delete(m.spans, addr)
	return nil
}

func (m fakePages) Create() (uint64, error) {
	if err := m.call("create"); err != nil {
		return 0, err
	}
	if m.used+fakePage > m.total {
		return 0, ErrNoMemory
	}
	m.used += fakePage
	m.lastPage++
	m.pages[m.lastPage] = true
	return m.lastPage, nil
}

func (m fakePages) Release(page uint64) error {
	require.True(m.t, m.pages[page])
	for _, p := range m.mapped {
		require.NotEqual(m.t, p, page, "the page is mapped nowhere")
	}
	delete(m.pages, page)
	m.used -= fakePage
	return nil
}

func (m fakePages) Map(addr, page uint64) error {
	if err := m.call("map"); err != nil {
		return err
	}
	require.True(m.t, m.pages[page])
	require.Zero(m.t, addr%fakePage)
	require.NotContains(m.t, m.mapped, addr)
	for _, p := range m.mapped {
		require.NotEqual(m.t, p, page, "the page is mapped once")
	}
	m.mapped[addr] = page
	return nil
}

func (m fakePages) Open(addr, n uint64) error {
	if err := m.call("open"); err != nil {
		return err
	}
	for at := addr; at < addr+n; at += fakePage {
		require.Contains(m.t, m.mapped, at)
		m.opened[at] = true
	}
	return nil
}

func (m fakePages) Unmap(addr, n uint64) error {
	if err := m.call("unmap"); err != nil {
		return err
	}
	for at := addr; at < addr+n; at += fakePage {
		require.Contains(m.t, m.mapped, at)
		delete(m.mapped, at)
		delete(m.opened, at)
	}
	return nil
}

// A fakeStream has done what was enqueued up to the number done.
type fakeStream struct {
	m        *machine
	number   uint64
	enqueued int
	done     int
	refs     int
	refuses  bool // to record, as a captured one does
	waits    []*fakeEvent
}

func (m *machine) stream() *fakeStream {
	s := &fakeStream{m: m, number: uint64(len(m.streams) + 1)}
	m.streams = append(m.streams, s)
	return s
}

type fakeEvent struct {
	s      *fakeStream
	at     int
	closed bool
}

func (s *fakeStream) Record() (Event, error) {
	if s.refuses {
		return nil, nil
	}
	if err := s.m.call("record"); err != nil {
		return nil, err
	}
	return &fakeEvent{s: s, at: s.enqueued}, nil
}

func (s *fakeStream) Wait(e Event) error {
	if err := s.m.call("wait"); err != nil {
		return err
	}
	s.waits = append(s.waits, e.(*fakeEvent))
	return nil
}

func (s *fakeStream) Sync() error {
	if err := s.m.call("sync"); err != nil {
		return err
	}
	s.done = s.enqueued
	return nil
}

func (s *fakeStream) Number() uint64 { return s.number }
func (s *fakeStream) Retain()        { s.refs++ }
func (s *fakeStream) Release()       { s.refs-- }

func (e *fakeEvent) Passed() (bool, error) {
	require.False(e.s.m.t, e.closed)
	if err := e.s.m.call("query"); err != nil {
		return false, err
	}
	return e.s.done >= e.at, nil
}

func (e *fakeEvent) Sync() error {
	require.False(e.s.m.t, e.closed)
	e.s.done = max(e.s.done, e.at)
	return nil
}

func (e *fakeEvent) Close() {
	require.False(e.s.m.t, e.closed)
	e.closed = true
}

func must[T any](x T, err error) T {
	if err != nil {
		panic(err)
	}
	return x
}

// device returns an allocator over the machine.
func (m *machine) device(conf string) *Device {
	var s atomic.Pointer[Settings]
	c := must(ParseSettings(conf))
	s.Store(&c)
	return NewDevice(Config{Source: m, Pages: fakePages{m}, Total: m.total}, &s)
}

// check looks at every block of the device, and at the statistics.
func (d *Device) check(t testing.TB) {
	t.Helper()
	var want [gauges][scopes]int64
	count := func(k kind, g Gauge, n uint64) { want[g][k] += int64(n); want[g][both] += int64(n) }
	unlock(d.lockAll()) // and empty the pockets
	shelved := map[block]bool{}
	for _, p := range d.pools {
		for _, a := range p.arenas {
			for k := range kinds {
				last := entry{}
				for _, e := range a.shelves[k].all() {
					b := a.domain.block(k, e.key)
					require.True(t, last.before(&e), "a shelf is in order")
					require.True(t, b.slot().free() && !b.slot().has(isHole) && b.arena() == a && b.size() == e.size)
					shelved[b] = true
					last = e
				}
			}
		}
		for _, a := range p.arenas {
			all := slices.Clone(a.segments)
			for _, s := range a.spans {
				if s != nil {
					all = append(all, s)
					count(s.kind, ReservedBytes, s.span.bytes)
					require.Len(t, s.span.pages, int(s.span.bytes/fakePage))
				}
			}
			for _, s := range all {
				d.checkSegment(t, s, shelved, count)
			}
		}
	}
	require.Empty(t, shelved, "what is on a shelf lies in a segment of the pool")
	for g := range gauges {
		for s := range scopes {
			var now, caps int64
			for _, dom := range d.domains {
				now += dom.meter.r[g][s].now
				caps += dom.meter.r[g][s].cap
			}
			require.Equal(t, want[g][s], now, "gauge %d of scope %d", g, s)
			require.LessOrEqual(t, now, d.peaks[g][s])
			require.LessOrEqual(t, caps, d.peaks[g][s])
		}
	}
	require.EqualValues(t, d.reserved, want[ReservedBytes][both])
}

func (d *Device) checkSegment(t testing.TB, s *segment, shelved map[block]bool, count func(kind, Gauge, uint64)) {
	if s.span == nil {
		count(s.kind, ReservedBytes, s.size())
		count(s.kind, Segments, 1)
	}
	end := s.addr
	var prev block
	holes := 0
	s.each(func(b block) {
		x := b.slot()
		require.True(t, b.addr() == end && b.prev() == prev && b.size() > 0, "the blocks are a chain")
		found, slot := s.block(b.addr())
		require.True(t, found == b && slot == x, "a block is found where it begins")
		require.False(t, prev.joins(b), "two free blocks lie side by side: %#x", b.addr())
		require.Equal(t, b.record() != nil, x.has(isRecorded))
		end, prev = b.end(), b
		switch {
		case x.has(isUsed):
			require.Same(t, s, d.table.segment(b.addr()))
			count(s.kind, Allocation, 1)
			count(s.kind, AllocatedBytes, b.size())
			fallthrough
		case x.has(isPending):
			count(s.kind, Active, 1)
			count(s.kind, ActiveBytes, b.size())
			count(s.kind, RequestedBytes, x.requested())
		case x.has(isHole):
			require.Contains(t, s.span.holes, b)
			holes++
		default:
			require.Contains(t, shelved, b)
			delete(shelved, b)
			if s.span == nil && b.split() {
				count(s.kind, InactiveSplit, 1)
				count(s.kind, InactiveSplitBytes, b.size())
			}
		}
		if s.span != nil {
			for at := b.addr() / fakePage * fakePage; at < b.end() && at < b.addr()+1000*fakePage; at += fakePage {
				_, ok := s.span.pages[at]
				require.Equal(t, !x.has(isHole), ok, "pages are where blocks are")
			}
		}
	})
	require.Equal(t, s.addr+s.size(), end)
	if s.span != nil {
		require.Len(t, s.span.holes, holes)
	}
}
