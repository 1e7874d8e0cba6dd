package alloc

import (
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A callingStream calls a function whenever the host waits for it, as a stream does
// that a callback was enqueued on: another goroutine runs it, and the wait is for that.
type callingStream struct {
	quietStream
	call *func()
}

func (s callingStream) Record() (Event, error) { return callingEvent{call: s.call}, nil }
func (s callingStream) Sync() error            { return s.run() }

func (s callingStream) run() error {
	if *s.call == nil {
		return nil
	}
	done := make(chan bool)
	go func() {
		defer close(done)
		(*s.call)()
	}()
	select {
	case <-done:
		return nil
	case <-time.After(time.Minute):
		return errors.New("the callback waits for who waits for it")
	}
}

type callingEvent struct {
	quietEvent
	call *func()
}

func (callingEvent) Passed() (bool, error) { return false, nil }
func (e callingEvent) Sync() error         { return callingStream{call: e.call}.run() }

// What waits for a stream lets the callbacks on it free memory, allocate what is
// cached, and read the books.
func TestCallbacksFreeWhileTheHostWaits(t *testing.T) {
	for name, test := range map[string]struct {
		conf  string
		total uint64
		async bool
		wait  func(t *testing.T, d *Device, a *Arena, other Stream)
	}{
		"Empty, for those that used memory": {total: 1 << 40, wait: func(t *testing.T, d *Device, a *Arena, other Stream) {
			shared := must(a.Alloc(30 * mib))
			require.NoError(t, d.RecordStream(shared, other))
			require.NoError(t, d.Free(shared))
			require.NoError(t, d.Empty())
			require.EqualValues(t, 1, d.Counts().Given)
		}},
		"Empty, for the stream of pages": {conf: "expandable_segments:True", total: 1 << 40, wait: func(t *testing.T, d *Device, a *Arena, _ Stream) {
			require.NoError(t, d.Free(must(a.Alloc(30*mib))))
			require.NoError(t, d.Empty())
			require.EqualValues(t, 15, d.Counts().Given)
		}},
		"Empty, for the stream of a caller's segments": {async: true, total: 1 << 40, wait: func(t *testing.T, d *Device, a *Arena, _ Stream) {
			require.NoError(t, d.Free(must(a.Alloc(30*mib))))
			require.NoError(t, d.Empty())
			require.EqualValues(t, 1, d.Counts().Given)
		}},
		"the fallbacks, for those that used memory": {total: 64 * mib, wait: func(t *testing.T, d *Device, a *Arena, other Stream) {
			shared := must(a.Alloc(22 * mib))
			require.NoError(t, d.RecordStream(shared, other))
			require.NoError(t, d.Free(shared))
			b := must(d.Default().Arena(callingStream{quietStream{9}, new(func())}))
			require.NoError(t, d.Free(must(b.Alloc(42*mib))))
		}},
		"pages that move": {conf: "expandable_segments:True", total: 1 << 40, wait: func(t *testing.T, d *Device, a *Arena, _ Stream) {
			x, keep, y := must(a.Alloc(4*mib)), must(a.Alloc(2*mib)), must(a.Alloc(12*mib))
			last := must(a.Alloc(2 * mib))
			require.NoError(t, d.Free(x))
			require.NoError(t, d.Free(y))
			z := must(a.Alloc(20 * mib))
			require.Positive(t, d.Counts().Taken)
			for _, p := range []uint64{keep, last, z} {
				require.NoError(t, d.Free(p))
			}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			m := newMachine(t, test.total)
			d := m.device(test.conf)
			if test.async {
				d.def.source = asyncSource{m}
			}
			var call func()
			a := must(d.Default().Arena(callingStream{quietStream{1}, &call}))
			held, cached := must(a.Alloc(2000)), must(a.Alloc(2000))
			require.NoError(t, d.Free(cached))
			other := callingStream{quietStream{2}, &call}
			var shared []uint64
			for range 64 {
				shared = append(shared, must(a.Alloc(512)))
				require.NoError(t, d.RecordStream(shared[len(shared)-1], other))
			}
			var calls atomic.Int32
			call = func() {
				calls.Add(1)
				before := m.calls
				x, err := a.Alloc(1000)
				if err != nil || d.Free(x) != nil || d.ReadAll()[Allocation].All.Current == 0 {
					t.Error("in the callback", err)
				}
				if calls.Load() == 1 {
					for _, x := range append(shared, held) {
						if err := d.Free(x); err != nil {
							t.Error("in the callback", err)
						}
					}
				}
				if m.calls != before {
					t.Error("the callback asked the driver")
				}
			}
			guard := must(a.Alloc(512))
			test.wait(t, d, a, other)
			require.Positive(t, calls.Load())
			d.check(t)
			call = nil
			require.NoError(t, d.Free(guard))
			require.NoError(t, d.Empty())
			require.Zero(t, d.Read(ReservedBytes).All.Current)
			d.check(t)
			m.requireNothing()
		})
	}
}

// Where pages that move are waited for, another goroutine takes the place that they
// were meant for.
func TestPlaceIsTakenMeanwhile(t *testing.T) {
	m := newMachine(t, 1<<40)
	d := m.device("expandable_segments:True")
	var call func()
	a := must(d.Default().Arena(callingStream{quietStream{1}, &call}))
	freed, between, end := must(a.Alloc(20*mib)), must(a.Alloc(2*mib)), must(a.Alloc(12*mib))
	require.NoError(t, d.Free(freed))
	require.NoError(t, d.Free(end))
	var other uint64
	call = func() {
		call = nil
		other = must(a.Alloc(12 * mib))
	}
	x := must(a.Alloc(30 * mib))
	require.Equal(t, end, other, "which began where the place did")
	require.NotZero(t, x)
	require.True(t, x >= other+12*mib || x+30*mib <= other, "%#x %#x", x, other)
	d.check(t)
	for _, p := range []uint64{x, other, between} {
		require.NoError(t, d.Free(p))
	}
	require.NoError(t, d.Empty())
	m.requireNothing()
}

// A thread that must not wait is refused before it does, and may free.
func TestBarred(t *testing.T) {
	m := newMachine(t, 1<<40)
	d := m.device("")
	var no error
	d.cfg.Barred = func() error { return no }
	p := d.NewPool(PoolConfig{})
	s := m.stream()
	a, b := must(d.Default().Arena(s)), must(p.Arena(s))
	x, y := must(a.Alloc(1000)), must(b.Alloc(1000))
	require.NoError(t, p.Close())
	q := d.NewPool(PoolConfig{})
	z := must(must(q.Arena(s)).Alloc(1000))
	require.NoError(t, d.Free(z))
	no = errors.New("within a callback")
	calls := m.calls
	_, err := a.Alloc(30 * mib)
	require.ErrorIs(t, err, no)
	require.ErrorIs(t, d.Empty(), no)
	_, err = d.Default().Arena(m.stream())
	require.ErrorIs(t, err, no)
	require.NoError(t, d.Free(x))
	require.NoError(t, d.Free(y), "of a pool that is closed")
	require.NoError(t, q.Close())
	require.Equal(t, x, must(a.Alloc(1000)))
	require.Equal(t, calls, m.calls, "the driver was not asked")
	no = nil
	require.NoError(t, d.Free(x))
	require.NoError(t, d.Empty())
	d.check(t)
	m.requireNothing()
}
