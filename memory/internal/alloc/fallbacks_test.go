package alloc

import (
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

const mib = 1 << 20

// since returns the calls of the driver since the last time.
func (m *machine) since() []string {
	list := m.names
	m.names = []string{}
	return list
}

// What costs least is tried first.
func TestFallbacks(t *testing.T) {
	m := newMachine(t, 90*mib)
	d := m.device("")
	lows := 0
	d.cfg.Low = func() { lows++ }
	s, other := m.stream(), m.stream()
	a := must(d.Default().Arena(s))
	m.since()

	shared := must(a.Alloc(30 * mib))
	require.Equal(t, []string{"alloc"}, m.since())
	other.work(shared, 30*mib)
	require.NoError(t, d.RecordStream(shared, other))
	require.NoError(t, d.Free(shared))
	require.Equal(t, []string{"record"}, m.since(), "an event is behind it from now on")
	idle := must(a.Alloc(40 * mib))
	require.Equal(t, []string{"query", "query", "alloc"}, m.since(), "nothing is free, and still nothing")

	// There is no more: the stream waits for the other one.
	require.Equal(t, shared, must(a.Alloc(30*mib)))
	require.Equal(t, []string{"query", "query", "alloc", "wait"}, m.since())
	require.Len(t, s.waits, 1)
	require.Equal(t, 3, lows)
	require.Zero(t, d.Counts().Retries)

	// What is cached goes, when that is not enough.
	require.NoError(t, d.Free(idle))
	big := must(a.Alloc(60 * mib))
	require.Equal(t, []string{"alloc", "free", "alloc"}, m.since())
	require.EqualValues(t, 1, d.Counts().Retries)
	require.EqualValues(t, 1, d.Counts().Syncs)
	require.NoError(t, d.Free(big))
	require.NoError(t, d.Free(shared))
	d.check(t)
}

func TestFallbacksEnd(t *testing.T) {
	m := newMachine(t, 100*mib)
	d := m.device("")
	a := must(d.Default().Arena(m.stream()))
	x := must(a.Alloc(60 * mib))
	m.since()
	_, err := a.Alloc(50 * mib)
	var e *NoMemoryError
	require.ErrorAs(t, err, &e)
	require.Equal(t, NoMemoryError{Requested: 50 * mib, Wanted: 50 * mib, Allocated: 60 * mib, Reserved: 60 * mib}, *e)
	require.Equal(t, []string{"alloc", "alloc"}, m.since())
	require.NoError(t, d.Free(x))
	y := must(a.Alloc(30 * mib)) // of the 60
	_, err = a.Alloc(45 * mib)
	require.ErrorAs(t, err, &e)
	require.EqualValues(t, 30*mib, e.Largest)
	c := d.Counts()
	require.EqualValues(t, 2, c.OutOfMemory)
	require.EqualValues(t, 2, c.Retries)
	require.NoError(t, d.Free(y))
	m.since()
	require.NoError(t, d.Free(must(a.Alloc(80*mib)))) // in the place of what is cached
	require.Equal(t, []string{"alloc", "free", "alloc"}, m.since()[:3])
}

// Blocks that the stream has claimed are found although the last one is in the
// lastFreed.
func TestClaimedBlocksAreFound(t *testing.T) {
	m := newMachine(t, 40*mib)
	d := m.device("")
	a := must(d.Default().Arena(m.stream()))
	other := m.stream()
	x := must(a.Alloc(40 * mib))
	other.work(x, 40*mib)
	require.NoError(t, d.RecordStream(x, other))
	require.NoError(t, d.Free(x))
	require.Equal(t, x, must(a.Alloc(40*mib)))
	require.Len(t, m.streams[0].waits, 1)
	require.NoError(t, d.Free(x))
	require.NoError(t, d.Empty())
	m.requireNothing()
}

// A block that its own stream uses costs no event.
func TestRecordOwnStream(t *testing.T) {
	m := newMachine(t, 1<<30)
	d := m.device("")
	s := m.stream()
	a := must(d.Default().Arena(s))
	x := must(a.Alloc(mib))
	require.NoError(t, d.RecordStream(x, s))
	require.NoError(t, d.Free(x))
	require.Zero(t, s.refs)
	require.Equal(t, x, must(a.Alloc(mib)))
}

func TestGarbageCollection(t *testing.T) {
	m := newMachine(t, 1000*mib)
	d := m.device("per_process_memory_fraction:0.5,garbage_collection_threshold:0.4")
	a := must(d.Default().Arena(m.stream()))
	var list []uint64
	for range 4 {
		list = append(list, must(a.Alloc(60*mib)))
	}
	for i, addr := range list {
		require.NoError(t, d.Free(addr))
		for range (4 - i) * 3 { // others grow old meanwhile
			require.NoError(t, d.Free(must(a.Alloc(11*mib+uint64(i)))))
			d.check(t)
		}
	}
	before := len(m.segments)
	big := must(a.Alloc(90 * mib))
	require.Less(t, len(m.segments), before+1, "something went")
	require.NotContains(t, m.segments, list[0], "the oldest")
	_, err := a.Alloc(450 * mib)
	require.ErrorIs(t, err, ErrNoMemory)
	require.LessOrEqual(t, m.used, uint64(500*mib))
	d.SetFraction(0.01)
	require.Equal(t, 0.01, d.Fraction())
	_, err = a.Alloc(200 * mib)
	var e *NoMemoryError
	require.ErrorAs(t, err, &e)
	require.EqualValues(t, 10485760, e.Limit)
	require.NoError(t, d.Free(big))
}

// Pages that there are may be moved although no more may be taken.
func TestFractionLetsPagesMove(t *testing.T) {
	m := newMachine(t, 1000*mib)
	d := m.device("expandable_segments:True")
	a := must(d.Default().Arena(m.stream()))
	x, y, z := must(a.Alloc(20*mib)), must(a.Alloc(20*mib)), must(a.Alloc(20*mib))
	require.NoError(t, d.Free(x))
	d.SetFraction(0.03)
	require.NoError(t, d.Free(z))
	z = must(a.Alloc(40 * mib))
	require.EqualValues(t, 60*mib, m.used)
	d.check(t)
	require.NoError(t, d.Free(y))
	require.NoError(t, d.Free(z))
}

func TestMaxSplit(t *testing.T) {
	m := newMachine(t, 200*mib)
	d := m.device("max_split_size_mb:32")
	a := must(d.Default().Arena(m.stream()))
	x := must(a.Alloc(60 * mib))
	c := d.Counts()
	require.Equal(t, Stat{1, 1, 1, 0}, c.OversizeBlocks)
	require.Equal(t, Stat{1, 1, 1, 0}, c.OversizeSegments)
	d.settings.Store(ptr(DefaultSettings())) // what was counted is counted back
	require.NoError(t, d.Free(x))
	d.settings.Store(ptr(must(ParseSettings("max_split_size_mb:32"))))
	require.Equal(t, Stat{0, 1, 1, 1}, d.Counts().OversizeBlocks)
	y := must(a.Alloc(20 * mib))
	require.NotEqual(t, x, y, "it is not split")
	z := must(a.Alloc(45 * mib))
	require.Equal(t, x, z, "it is near enough")
	require.NoError(t, d.Free(z))
	m.since()
	big := must(a.Alloc(150 * mib)) // it goes before anything else
	require.Equal(t, []string{"alloc", "free", "alloc"}, m.since())
	require.NoError(t, d.Free(big))
	require.NoError(t, d.Free(y))
	require.NoError(t, d.Empty())
	require.Equal(t, Stat{0, 1, 2, 2}, d.Counts().OversizeSegments)
	d.check(t)
}

// A block that is too large to be split does not keep pages from being used that
// were mapped for the request.
func TestMaxSplitBesideExpandable(t *testing.T) {
	m := newMachine(t, 1000*mib)
	d := m.device("expandable_segments:True")
	a := must(d.Default().Arena(m.stream()))
	x, gap, y, z := must(a.Alloc(20*mib)), must(a.Alloc(4*mib)), must(a.Alloc(20*mib)), must(a.Alloc(2*mib))
	require.NoError(t, d.Free(gap))
	require.NoError(t, d.Empty())
	d.settings.Store(ptr(must(ParseSettings("max_split_size_mb:32"))))
	require.NoError(t, d.Free(must(a.Alloc(34*mib))))
	d.settings.Store(ptr(must(ParseSettings("max_split_size_mb:32,expandable_segments:True"))))
	require.NoError(t, d.Free(x))
	require.NoError(t, d.Free(y))
	w := must(a.Alloc(28 * mib)) // the gap is closed: there are 44 MiB, of which the best fit knows nothing
	require.Equal(t, x, w)
	require.EqualValues(t, (34+20+4+20+2)*mib, m.used)
	require.NoError(t, d.Free(w))
	require.NoError(t, d.Free(z))
	d.check(t)
}

// A segment of a stream that has ended belongs to the one that has its arena now.
func TestSegmentsChangeStreams(t *testing.T) {
	m := newMachine(t, 1<<30)
	d := m.device("")
	var last atomic.Value
	src := &witness{asyncSource{m}, &last}
	p := d.NewPool(PoolConfig{Source: src})
	s, next := m.stream(), m.stream()
	require.NoError(t, d.Free(must(must(p.Arena(s)).Alloc(30*mib))))
	d.End(s)
	s.ended = true
	must(p.Arena(next))
	require.NoError(t, p.Close())
	require.Same(t, next, last.Load())
}

// A witness remembers for which stream a segment was freed.
type witness struct {
	asyncSource
	last *atomic.Value
}

func (w *witness) Free(s Stream, addr, n uint64) error {
	w.last.Store(s)
	return w.asyncSource.Free(s, addr, n)
}
