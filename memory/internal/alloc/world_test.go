package alloc

import (
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// A chooser makes the choices of a world: a generator of random numbers, or what a
// fuzzer wrote.
type chooser interface{ IntN(n int) int }

// A world is a program that uses an allocator, and knows what must be true of it.
type world struct {
	*machine
	c        chooser
	d        *Device
	settings atomic.Pointer[Settings]
	running  []*fakeStream
	pools    []*fakePool
	live     []*liveBlock
	captures int
	broken   error // what the driver fails with
	failed   bool  // it has, in this operation
	what     string
}

type fakePool struct {
	*Pool
	graphs  bool
	capture int // that is under way, or 0
	closed  bool
}

// A liveBlock is one that the program has allocated.
type liveBlock struct {
	addr, n uint64
	pool    *fakePool
	s       *fakeStream
	capture int // in which it was allocated
	uses    []use
}

var errBroken = errors.New("the driver is broken")

func newWorld(t testing.TB, c chooser) *world {
	w := &world{machine: newMachine(t, 1<<30), c: c}
	w.odd = c.IntN(2) == 0
	w.settings.Store(ptr(DefaultSettings()))
	w.d = NewDevice(w.config(), &w.settings)
	w.pools = []*fakePool{{Pool: w.d.Default()}}
	for range 3 {
		w.running = append(w.running, w.stream())
	}
	return w
}

func ptr[T any](x T) *T { return &x }

func pickOf[T any](c chooser, list []T) T { return list[c.IntN(len(list))] }

// The operations, with how often they are chosen.
var operations = []struct {
	weight int
	do     func(*world)
}{
	{40, (*world).alloc},
	{34, (*world).free},
	{10, (*world).touch},
	{10, (*world).recordStream},
	{14, (*world).progress},
	{1, (*world).empty},
	{1, (*world).newStream},
	{1, (*world).endStream},
	{2, (*world).change},
	{1, (*world).newPool},
	{1, (*world).closePool},
	{3, (*world).begin},
	{3, (*world).rejoin},
	{4, (*world).breakDriver},
	{1, (*world).wrong},
	{1, (*world).reset},
}

var choices = func() (list []func(*world)) {
	for _, o := range operations {
		for range o.weight {
			list = append(list, o.do)
		}
	}
	return list
}()

// step does one operation.
func (w *world) step() {
	w.what, w.failed = "", false
	pickOf(w.c, choices)(w)
	if w.failed || w.c.IntN(8) == 0 {
		w.machine.fail, w.broken = nil, nil
	}
}

// check compares the books with themselves and with what the program has.
func (w *world) check() {
	w.d.check(w.t)
	var requested uint64
	for _, l := range w.live {
		requested += l.n
	}
	got := w.d.Read(Allocation).All.Current
	require.Equal(w.t, int64(len(w.live)), got, w.what)
	require.LessOrEqual(w.t, int64(requested), w.d.Read(AllocatedBytes).All.Current)
	used := w.used
	require.Equal(w.t, int64(used), w.d.Read(ReservedBytes).All.Current, "what the driver gave is in the books: %s", w.what)
	events := 0
	for _, p := range w.d.pools {
		for _, a := range p.arenas {
			if a.ended != nil {
				events++
			}
			for _, q := range a.waiting.queues {
				events += len(q.marks)
			}
		}
	}
	require.Equal(w.t, events, w.events, "no event is lost: %s", w.what)
}

func (w *world) do(format string, args ...any) { w.what = fmt.Sprintf(format, args...) }

// excused says whether an operation may fail.
func (w *world) excused(err error) {
	require.True(w.t, w.failed && (errors.Is(err, errBroken) || errors.Is(err, ErrNoMemory)), "%s: %v", w.what, err)
}

func (w *world) size() uint64 {
	switch w.c.IntN(8) {
	case 0:
		return uint64(w.c.IntN(40<<20)) + 1
	case 1, 2:
		return uint64(w.c.IntN(8<<20)) + 1
	case 3:
		return pickOf(w.c, []uint64{512, 1 << 20, 1<<20 + 1, 2 << 20, 10 << 20, 10<<20 - 1, 20 << 20, 64 << 20})
	}
	return uint64(w.c.IntN(1<<uint(w.c.IntN(21)))) + 1
}

func (w *world) alloc() {
	p, s, n := pickOf(w.c, w.pools), pickOf(w.c, w.running), w.size()
	if s.refuses != (p.capture != 0) || p.graphs && p.capture == 0 {
		return // what is captured comes from the pool of the capture
	}
	w.do("alloc %d on %d in pool %d", n, s.number, p.ID())
	if len(w.live) > 300 {
		return
	}
	a, err := p.Arena(s)
	var addr uint64
	if err == nil {
		addr, err = a.Alloc(n)
	}
	switch {
	case p.closed:
		require.ErrorIs(w.t, err, ErrClosed, w.what)
		return
	case errors.Is(err, ErrNoMemory) && !w.failed:
		limit := uint64(w.d.Fraction() * float64(w.total))
		require.Greater(w.t, w.used+w.settings.Load().segment(w.settings.Load().round(n)), min(limit, w.total), w.what)
		return
	case err != nil:
		w.excused(err)
		return
	}
	for _, l := range w.live {
		require.True(w.t, addr+n <= l.addr || l.addr+l.n <= addr, "%s: at %#x, where %#x is allocated", w.what, addr, l.addr)
	}
	w.machine.begin(s, addr, n, p.capture)
	l := &liveBlock{addr: addr, n: n, pool: p, s: s, capture: p.capture}
	w.live = append(w.live, l)
	l.use(s)
}

// use lets s work on the block, in a capture if it takes part in one.
func (l *liveBlock) use(s *fakeStream) {
	if !s.refuses {
		if l.capture == 0 || s != l.s {
			l.uses = append(l.uses, s.work(l.addr, l.n))
		}
		return
	}
	l.uses = append(l.uses, use{l.addr, l.addr + l.n, s, 0, l.pool.capture})
}

func (w *world) free() {
	if len(w.live) == 0 {
		return
	}
	i := w.c.IntN(len(w.live))
	l := w.live[i]
	w.do("free %#x", l.addr)
	w.drop(i)
}

func (w *world) drop(i int) {
	l := w.live[i]
	w.past = append(w.past, l.uses...)
	if err := w.d.Free(l.addr); err != nil {
		w.excused(err) // the closed pool that the block was of could not give its segment back
	}
	w.live = slices.Delete(w.live, i, i+1)
}

// touch lets the block's stream use it again.
func (w *world) touch() {
	if len(w.live) == 0 {
		return
	}
	if l := pickOf(w.c, w.live); !l.s.ended && l.s.refuses == (l.pool.capture != 0) {
		l.use(l.s)
	}
}

func (w *world) recordStream() {
	if len(w.live) == 0 {
		return
	}
	l, s := pickOf(w.c, w.live), pickOf(w.c, w.running)
	if s.refuses && l.pool.capture == 0 {
		return // a graph uses memory of others that keep it
	}
	w.do("record %d for %#x", s.number, l.addr)
	require.NoError(w.t, w.d.RecordStream(l.addr+uint64(w.c.IntN(int(l.n))), s))
	l.use(s)
}

func (w *world) progress() {
	s := pickOf(w.c, w.streams)
	s.advance(s.done+w.c.IntN(40), false)
}

func (w *world) empty() {
	w.do("empty")
	if err := w.d.Empty(); err != nil {
		w.excused(err)
	}
}

func (w *world) newStream() {
	if len(w.running) < 6 {
		w.running = append(w.running, w.stream())
	}
}

func (w *world) endStream() {
	i := w.c.IntN(len(w.running))
	s := w.running[i]
	if len(w.running) == 1 || s.refuses {
		return
	}
	w.do("end %d", s.number)
	w.machine.fail = nil
	w.d.End(s)
	s.ended = true
	w.running = slices.Delete(w.running, i, i+1)
}

var configurations = []string{
	"", "", "", "expandable_segments:True", "expandable_segments:True", "max_split_size_mb:21", "max_split_size_mb:64,max_non_split_rounding_mb:30",
	"roundup_power2_divisions:4", "roundup_power2_divisions:[1:2,>:8]", "large_segment_size_mb:12", "large_segment_size_mb:31",
	"per_process_memory_fraction:0.3,garbage_collection_threshold:0.5", "per_process_memory_fraction:0.2",
	"expandable_segments:True,max_split_size_mb:32,per_process_memory_fraction:0.4",
}

func (w *world) change() {
	conf := pickOf(w.c, configurations)
	w.do("settings %q", conf)
	w.settings.Store(ptr(must(ParseSettings(conf))))
}

func (w *world) newPool() {
	if len(w.pools) > 5 {
		return
	}
	cfg := PoolConfig{ID: PoolID{0, uint64(w.calls)}}
	kind := w.c.IntN(5)
	switch kind {
	case 0:
		cfg.Source = asyncSource{w.machine}
	case 1:
		cfg.NoSplit = true
	case 2:
		cfg.UseOnOOM = true
	case 3:
		cfg.Graphs = true
	case 4:
		cfg.Graphs, cfg.Source = true, asyncSource{w.machine}
	}
	w.do("new pool %d of kind %d", cfg.ID, kind)
	p := &fakePool{Pool: w.d.NewPool(cfg), graphs: cfg.Graphs}
	w.pools = append(w.pools, p)
	if w.c.IntN(2) == 0 {
		watched := map[uint64]uint64{}
		require.NoError(w.t, p.Watch(&Watcher{func(addr, bytes uint64, taken bool) error {
			require.Equal(w.t, bytes, w.segments[addr], "a pool tells of segments while they are there")
			_, there := watched[addr]
			require.NotEqual(w.t, taken, there, "a pool tells of each once")
			if delete(watched, addr); !taken {
				w.requireUnused(addr, bytes)
				return nil
			}
			if !w.failed && w.c.IntN(6) == 0 { // and the driver takes the segment back
				w.failed, w.machine.fail = true, nil
				return errBroken
			}
			watched[addr] = bytes
			return nil
		}}))
	}
}

func (w *world) closePool() {
	i := w.c.IntN(len(w.pools))
	p := w.pools[i]
	if i == 0 || p.capture != 0 {
		return
	}
	w.do("close pool %d", p.ID())
	if p.closed {
		w.pools = slices.Delete(w.pools, i, i+1)
		return
	}
	p.closed = true
	if err := p.Close(); err != nil {
		w.excused(err)
	}
}

// begin begins a capture of one or two streams.
func (w *world) begin() {
	p := pickOf(w.c, w.pools)
	if !p.graphs || p.closed || p.capture != 0 {
		return
	}
	w.captures++
	w.do("capture %d in pool %d", w.captures, p.ID())
	for range 2 {
		if s := pickOf(w.c, w.running); slices.IndexFunc(w.running, func(s *fakeStream) bool { return !s.refuses }) >= 0 && w.alone(p) {
			s.refuses = true
		}
	}
	p.capture = w.captures
	p.Begin()
}

// alone says whether no other capture is under way: its streams are then p's.
func (w *world) alone(p *fakePool) bool {
	return !slices.ContainsFunc(w.pools, func(o *fakePool) bool { return o != p && o.capture != 0 })
}

func (w *world) rejoin() {
	for _, p := range w.pools {
		if p.capture != 0 {
			w.do("end capture in pool %d", p.ID())
			w.endCapture(p)
			return
		}
	}
}

func (w *world) endCapture(p *fakePool) {
	for _, s := range w.running {
		s.refuses = false
	}
	// The launches of a graph do not show here: the next one comes behind them.
	done := func(u use) bool { return u.capture == p.capture }
	w.past = slices.DeleteFunc(w.past, done)
	for _, l := range w.live {
		l.uses = slices.DeleteFunc(l.uses, done)
	}
	p.capture = 0
	p.Rejoin()
}

// breakDriver lets one of the next calls fail.
func (w *world) breakDriver() {
	w.broken = errBroken
	if w.c.IntN(2) == 0 {
		w.broken = ErrNoMemory
	}
	at, often := w.calls+1+w.c.IntN(4), 1+w.c.IntN(3)
	w.machine.fail = func(call int, name string) error {
		if call < at || call >= at+often {
			return nil
		}
		w.failed = true
		if slices.Contains([]string{"alloc", "create", "map", "open"}, name) {
			return w.broken
		}
		return errBroken
	}
}

// wrong gives addresses back that nobody has.
func (w *world) wrong() {
	addr := pickOf(w.c, []uint64{0, 1, 1 << 32, 1<<32 + 512, 1 << 60, ^uint64(0)})
	if len(w.live) > 0 {
		l := pickOf(w.c, w.live)
		addr = l.addr + 1 + uint64(w.c.IntN(int(l.n)))
	}
	for _, l := range w.live {
		if l.addr == addr {
			return
		}
	}
	w.do("free %#x, which nobody has", addr)
	require.ErrorAs(w.t, w.d.Free(addr), new(*PointerError))
}

func (w *world) reset() {
	w.d.ResetPeaks()
	w.d.ResetSums()
}

// finish gives everything back and checks that nothing is left.
func (w *world) finish() {
	w.machine.fail = nil
	for _, p := range w.pools {
		if p.capture != 0 {
			w.endCapture(p)
		}
	}
	for len(w.live) > 0 {
		w.drop(0)
	}
	require.NoError(w.t, w.d.Empty())
	w.check()
	for _, p := range w.d.pools {
		require.True(w.t, p.bytes() == 0 || p != w.d.def && !p.closed.Load(), "only open pools keep what nobody has")
	}
	for _, p := range w.pools[1:] {
		require.NoError(w.t, p.Close())
	}
	w.check()
	require.NoError(w.t, w.d.Empty())
	w.requireNothing()
	require.Len(w.t, w.d.pools, 1, "closed pools are forgotten")
}
