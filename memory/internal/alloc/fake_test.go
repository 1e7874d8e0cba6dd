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
	odd      bool // segments begin anywhere
	segments map[uint64]uint64
	spans    map[uint64]uint64
	pages    map[uint64]uint64 // made, and where each is mapped, or 0
	mapped   map[uint64]uint64 // page at address
	opened   map[uint64]bool
	lastPage uint64
	calls    int
	names    []string // of the calls, if not nil
	fail     func(call int, name string) error
	streams  []*fakeStream
	events   int // that are not closed
	host     clock
	past     []use
}

func newMachine(t testing.TB, total uint64) *machine {
	return &machine{t: t, total: total, next: 1 << 32, segments: map[uint64]uint64{}, spans: map[uint64]uint64{},
		pages: map[uint64]uint64{}, mapped: map[uint64]uint64{}, opened: map[uint64]bool{}}
}

// device returns an allocator over the machine.
func (m *machine) device(conf string) *Device {
	var s atomic.Pointer[Settings]
	c := must(ParseSettings(conf))
	s.Store(&c)
	return NewDevice(m.config(), &s)
}

func (m *machine) config() Config {
	return Config{Source: m, Pages: fakePages{m}, Total: m.total, Sync: m.sync}
}

// sync waits for all streams, as cuCtxSynchronize does.
func (m *machine) sync() error {
	if err := m.call("sync"); err != nil {
		return err
	}
	if slices.ContainsFunc(m.streams, func(s *fakeStream) bool { return s.refuses }) {
		return ErrBusy
	}
	m.finish()
	return nil
}

func must[T any](x T, err error) T {
	if err != nil {
		panic(err)
	}
	return x
}

func (m *machine) call(name string) error {
	m.calls++
	if m.names != nil {
		m.names = append(m.names, name)
	}
	if m.fail == nil {
		return nil
	}
	return m.fail(m.calls, name)
}

func (m *machine) Alloc(_ Stream, n uint64) (uint64, error) {
	if err := m.call("alloc"); err != nil {
		return 0, err
	}
	return m.take(n)
}

func (m *machine) take(n uint64) (uint64, error) {
	if m.used+n > m.total {
		return 0, ErrNoMemory
	}
	m.used += n
	addr := m.next
	m.next += roundUp(n, fakePage)
	if m.odd {
		m.next = addr + n + unit*uint64(m.calls%7)
	}
	m.segments[addr] = n
	return addr, nil
}

func (m *machine) Free(_ Stream, addr, n uint64) error {
	if err := m.call("free"); err != nil {
		return err
	}
	m.finish() // as cuMemFree does
	m.release(addr, n)
	return nil
}

func (m *machine) release(addr, n uint64) {
	require.Equal(m.t, n, m.segments[addr], "a segment is freed as it was allocated")
	m.requireUnused(addr, n)
	delete(m.segments, addr)
	m.used -= n
}

func (m *machine) Async() bool { return false }

// An asyncSource takes segments from the machine, and its Free waits for nobody.
type asyncSource struct{ *machine }

func (asyncSource) Async() bool { return true }

func (s asyncSource) Free(_ Stream, addr, n uint64) error {
	if err := s.call("free"); err != nil {
		return err
	}
	s.release(addr, n)
	return nil
}

const fakePage = 2 << 20

// fakePages is the machine as a PageSource.
type fakePages struct{ *machine }

func (fakePages) PageSize() uint64 { return fakePage }
func (m fakePages) Reach() uint64  { return roundUp(m.total/8*9, fakePage) }

func (m fakePages) Reserve(n uint64) (uint64, error) {
	if err := m.call("reserve"); err != nil {
		return 0, err
	}
	m.next = roundUp(m.next, fakePage)
	addr := m.next
	m.next += n
	m.spans[addr] = n
	return addr, nil
}

func (m fakePages) Unreserve(addr, n uint64) error {
	if err := m.call("unreserve"); err != nil {
		return err
	}
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
	m.pages[m.lastPage] = 0
	return m.lastPage, nil
}

func (m fakePages) Release(page uint64) error {
	if err := m.call("release"); err != nil {
		return err
	}
	at, ok := m.pages[page]
	require.True(m.t, ok && at == 0, "the page was made and is mapped nowhere")
	delete(m.pages, page)
	m.used -= fakePage
	return nil
}

func (m fakePages) Map(addr, page uint64) error {
	if err := m.call("map"); err != nil {
		return err
	}
	at, ok := m.pages[page]
	require.True(m.t, ok && at == 0, "the page was made and is mapped nowhere")
	require.Zero(m.t, addr%fakePage)
	require.Zero(m.t, m.mapped[addr])
	m.mapped[addr] = page
	m.pages[page] = addr
	return nil
}

func (m fakePages) Open(addr, n uint64) error {
	if err := m.call("open"); err != nil {
		return err
	}
	for at := addr; at < addr+n; at += fakePage {
		require.NotZero(m.t, m.mapped[at])
		m.opened[at] = true
	}
	return nil
}

func (m fakePages) Unmap(addr, n uint64) error {
	if err := m.call("unmap"); err != nil {
		return err
	}
	m.requireUnused(addr, n)
	for at := addr; at < addr+n; at += fakePage {
		require.NotZero(m.t, m.mapped[at])
		m.pages[m.mapped[at]] = 0
		delete(m.mapped, at)
		delete(m.opened, at)
	}
	return nil
}

// requireUsable checks that there is memory behind a block.
func (m *machine) requireUsable(addr, n uint64) {
	for at, size := range m.segments {
		if addr >= at && addr+n <= at+size {
			return
		}
	}
	for at := addr / fakePage * fakePage; at < addr+n; at += fakePage {
		require.True(m.t, m.opened[at], "there is memory at %#x", at)
	}
}

// requireNothing checks that everything was given back.
func (m *machine) requireNothing() {
	m.t.Helper()
	require.Zero(m.t, m.used)
	require.Empty(m.t, m.segments)
	require.Empty(m.t, m.pages)
	require.Empty(m.t, m.mapped)
	for _, s := range m.streams {
		require.Zero(m.t, s.refs, "stream %d was let go", s.number)
	}
}

// A clock says of each stream how much of its work has come before.
type clock map[*fakeStream]int

func (c clock) join(o clock) {
	for s, n := range o {
		c[s] = max(c[s], n)
	}
}

// A use is work of a stream on memory.
type use struct {
	lo, hi  uint64
	s       *fakeStream
	n       int
	capture int // in which it is, or 0
}

// work enqueues work on s that uses [addr, addr+n).
func (s *fakeStream) work(addr, n uint64) use {
	s.clock.join(s.m.host)
	s.enqueued++
	s.clock[s] = s.enqueued
	return use{addr, addr + n, s, s.enqueued, 0}
}

// begin checks that work on s may use what others have used, and forgets them: they
// come before s from now on.
func (m *machine) begin(s *fakeStream, addr, n uint64, capture int) {
	m.requireUsable(addr, n)
	rest := m.past[:0:0]
	for _, u := range m.past {
		if u.capture != 0 && u.capture != capture || u.n <= m.host[u.s] && u.capture == 0 {
			continue
		}
		if u.hi <= addr || addr+n <= u.lo {
			rest = append(rest, u)
			continue
		}
		// A graph is launched again on any stream, and so waits for nobody.
		ordered := u.s == s && u.capture == capture || capture == 0 && s.clock[u.s] >= u.n
		require.True(m.t, ordered, "stream %d gets %#x, which stream %d may still use", s.number, addr, u.s.number)
		if u.lo < addr {
			rest = append(rest, use{u.lo, addr, u.s, u.n, u.capture})
		}
		if u.hi > addr+n {
			rest = append(rest, use{addr + n, u.hi, u.s, u.n, u.capture})
		}
	}
	m.past = rest
}

// requireUnused checks that the host knows that all work on [addr, addr+n) is done.
func (m *machine) requireUnused(addr, n uint64) {
	m.past = slices.DeleteFunc(m.past, func(u use) bool {
		if u.hi <= addr || addr+n <= u.lo {
			return false
		}
		require.True(m.t, u.capture != 0 || u.n <= m.host[u.s], "memory at %#x goes while stream %d may use it", addr, u.s.number)
		return true
	})
}

// A fakeStream has done what was enqueued up to the number done.
type fakeStream struct {
	m        *machine
	number   uint64
	enqueued int
	done     int
	clock    clock
	refs     int
	ended    bool
	closed   bool
	refuses  bool // to record, as a captured one does
	waits    []wait
}

// A wait holds what comes behind the number at.
type wait struct {
	at int
	e  *fakeEvent
}

func (m *machine) stream() *fakeStream {
	s := &fakeStream{m: m, number: uint64(len(m.streams) + 1), clock: clock{}}
	m.streams = append(m.streams, s)
	if m.host == nil {
		m.host = clock{}
	}
	return s
}

// advance lets the stream do its work up to n, as far as it need not wait; with
// force what it waits for is done too.
func (s *fakeStream) advance(n int, force bool) {
	for s.done < min(n, s.enqueued) {
		for len(s.waits) > 0 && s.waits[0].at <= s.done {
			e := s.waits[0].e
			if force {
				e.s.advance(e.at, true)
			}
			if e.s.done < e.at {
				return
			}
			s.waits = s.waits[1:]
		}
		s.done++
	}
}

// finish lets all streams do all that they have to do.
func (m *machine) finish() {
	for _, s := range m.streams {
		s.advance(s.enqueued, true)
		s.clock[s] = s.enqueued
		m.host.join(s.clock)
	}
}

func (s *fakeStream) use(name string) error {
	require.True(s.m.t, !s.ended || s.refs > 0, "%s on a stream that was destroyed", name)
	return s.m.call(name)
}

type fakeEvent struct {
	s      *fakeStream
	at     int
	clock  clock
	closed bool
}

func (s *fakeStream) Record() (Event, error) {
	if err := s.use("record"); err != nil {
		return nil, err
	}
	if s.refuses {
		return nil, nil
	}
	e := &fakeEvent{s: s, at: s.enqueued, clock: clock{s: s.enqueued}}
	e.clock.join(s.clock)
	s.m.events++
	return e, nil
}

func (s *fakeStream) Wait(e Event) error {
	if err := s.use("wait"); err != nil {
		return err
	}
	require.False(s.m.t, s.refuses, "a captured stream waits for no other")
	s.clock.join(e.(*fakeEvent).clock)
	s.waits = append(s.waits, wait{s.enqueued, e.(*fakeEvent)})
	return nil
}

func (s *fakeStream) Sync() error {
	if err := s.use("sync"); err != nil {
		return err
	}
	if s.refuses {
		return ErrBusy
	}
	s.advance(s.enqueued, true)
	s.clock[s] = s.enqueued
	s.m.host.join(s.clock)
	return nil
}

func (s *fakeStream) Number() uint64 { return s.number }
func (s *fakeStream) Ended() bool    { return false }
func (s *fakeStream) Done() bool     { return s.closed && s.done >= s.enqueued }
func (s *fakeStream) Retain() bool   { s.refs++; return true }
func (s *fakeStream) Release()       { s.refs-- }

func (e *fakeEvent) Passed() (bool, error) {
	require.False(e.s.m.t, e.closed)
	if err := e.s.m.call("query"); err != nil {
		return false, err
	}
	if e.s.done < e.at {
		return false, nil
	}
	e.s.m.host.join(e.clock)
	return true, nil
}

func (e *fakeEvent) Sync() error {
	require.False(e.s.m.t, e.closed)
	if err := e.s.m.call("sync"); err != nil {
		return err
	}
	e.s.advance(e.at, true)
	e.s.m.host.join(e.clock)
	return nil
}

func (e *fakeEvent) Close() {
	require.False(e.s.m.t, e.closed)
	e.closed = true
	e.s.m.events--
}
