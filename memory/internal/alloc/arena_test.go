package alloc

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// The peaks are those of what there was on all streams together at one moment.
func TestPeaksAreExact(t *testing.T) {
	for range 20 {
		seed := rand.Uint64()
		c := rand.New(rand.NewPCG(seed, 0))
		m := newMachine(t, 1<<40)
		d := m.device("")
		var arenas []*Arena
		for range 1 + c.IntN(6) {
			arenas = append(arenas, must(d.Default().Arena(m.stream())))
		}
		var ref peaks
		var live []uint64
		w := world{c: c}
		for i := range rounds {
			switch n := c.IntN(100); {
			case n == 0:
				d.ResetPeaks()
				ref.peak = ref.now
			case n == 1:
				require.NoError(t, d.Empty())
				ref.reserved(m)
			case n < 45+len(live)/10 && len(live) > 0:
				i := c.IntN(len(live))
				ref.add(d, live[i], -1)
				require.NoError(t, d.Free(live[i]))
				live[i] = live[len(live)-1]
				live = live[:len(live)-1]
			default:
				addr := must(pickOf(c, arenas).Alloc(w.size()))
				ref.reserved(m)
				ref.add(d, addr, 1)
				live = append(live, addr)
			}
			if i%100 == 0 { // otherwise the peaks are not looked at
				ref.check(t, d, seed, i)
			}
		}
		ref.check(t, d, seed, 3000)
	}
}

// peaks follows some gauges.
type peaks struct{ now, peak [gauges][scopes]int64 }

func (p *peaks) set(g Gauge, s kind, n int64) {
	p.now[g][s] = n
	p.peak[g][s] = max(p.peak[g][s], n)
}

// add counts a block that was given out, or will be given back.
func (p *peaks) add(d *Device, addr uint64, sign int64) {
	b, x := d.table.segment(addr).block(addr)
	for g, n := range map[Gauge]int64{Allocation: 1, Active: 1, AllocatedBytes: int64(b.size()), ActiveBytes: int64(b.size()), RequestedBytes: int64(x.requested())} {
		for _, s := range []kind{b.s.kind, both} {
			p.set(g, s, p.now[g][s]+sign*n)
		}
	}
}

func (p *peaks) reserved(m *machine) {
	p.set(ReservedBytes, both, int64(m.used))
	p.set(Segments, both, int64(len(m.segments)))
}

func (p *peaks) check(t *testing.T, d *Device, seed uint64, i int) {
	all := d.ReadAll()
	for _, g := range []Gauge{Allocation, Active, AllocatedBytes, ActiveBytes, RequestedBytes, ReservedBytes, Segments} {
		require.Equal(t, p.now[g][both], all[g].All.Current, "seed %#x, step %d, gauge %d", seed, i, g)
		require.Equal(t, p.peak[g][both], all[g].All.Peak, "seed %#x, step %d, gauge %d", seed, i, g)
		if g != ReservedBytes && g != Segments {
			require.Equal(t, p.peak[g][small], all[g].Small.Peak, "seed %#x, step %d, gauge %d", seed, i, g)
			require.Equal(t, p.peak[g][large], all[g].Large.Peak, "seed %#x, step %d, gauge %d", seed, i, g)
		}
	}
}

// What came and went adds up, also after a reset.
func TestSums(t *testing.T) {
	m := newMachine(t, 1<<40)
	d := m.device("")
	a := must(d.Default().Arena(m.stream()))
	x, y := must(a.Alloc(1000)), must(a.Alloc(3*mib))
	require.NoError(t, d.Free(x))
	require.Equal(t, PoolStat{All: Stat{1, 2, 2, 1}, Small: Stat{0, 1, 1, 1}, Large: Stat{1, 1, 1, 0}}, d.Read(Allocation))
	require.Equal(t, Stat{3 * mib, 3*mib + 1024, 3*mib + 1024, 1024}, d.Read(AllocatedBytes).All)
	d.ResetSums()
	require.NoError(t, d.Free(y))
	require.Equal(t, Stat{0, 2, 0, 1}, d.Read(Allocation).All)
	d.ResetPeaks()
	require.Equal(t, Stat{0, 0, 0, 1}, d.Read(Allocation).All)
	require.Equal(t, d.Read(AllocatedBytes), d.ReadAll()[AllocatedBytes])
	require.Zero(t, d.Counts().Taken)
	require.NoError(t, d.Empty())
	require.EqualValues(t, 2, d.Counts().Given)
}

// A quiet stream is past all that was enqueued.
type quietStream struct{ number uint64 }

func (quietStream) Record() (Event, error) { return quietEvent{}, nil }
func (quietStream) Wait(Event) error       { return nil }
func (quietStream) Sync() error            { return nil }
func (s quietStream) Number() uint64       { return s.number }
func (quietStream) Ended() bool            { return false }
func (quietStream) Done() bool             { return false }
func (quietStream) Retain() bool           { return true }
func (quietStream) Release()               {}

type quietEvent struct{}

func (quietEvent) Passed() (bool, error) { return true, nil }
func (quietEvent) Sync() error           { return nil }
func (quietEvent) Close()                {}

// Goroutines with streams of their own, and some with one in common, while others
// look at the statistics, the segments and the peaks.
func TestManyGoroutines(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True"} {
		m := newMachine(t, 1<<40)
		d := m.device(conf)
		var workers, readers sync.WaitGroup
		var stop atomic.Bool
		for i := range 20 {
			a := must(d.Default().Arena(quietStream{uint64(min(i, 16))}))
			workers.Go(func() { work(t, d, a, uint64(i)) })
		}
		readers.Go(func() {
			for !stop.Load() {
				for g, s := range d.ReadAll() {
					if s.All.Current > s.All.Peak || s.All.Current != s.Small.Current+s.Large.Current || s.All.Current < 0 {
						t.Errorf("gauge %d: %+v", g, s)
					}
				}
				d.Segments()
			}
		})
		workers.Wait()
		stop.Store(true)
		readers.Wait()
		d.check(t)
		require.NoError(t, d.Empty()) // and wait for what other streams have used
		all := d.ReadAll()
		for _, g := range []Gauge{Allocation, AllocatedBytes, Active, ActiveBytes, RequestedBytes} {
			require.Zero(t, all[g].All.Current)
			require.Equal(t, all[g].All.Allocated, all[g].All.Freed)
		}
		require.EqualValues(t, 20*rounds, all[Allocation].All.Allocated)
		require.Zero(t, d.Read(ReservedBytes).All.Current)
		m.requireNothing()
	}
}

// rounds is how many blocks each of many goroutines allocates.
var rounds = testhost.Rounds(1000, 3000)

// work allocates so many blocks, some of which other streams use, and some of which
// are freed while memory is given back.
func work(t *testing.T, d *Device, a *Arena, seed uint64) {
	c := rand.New(rand.NewPCG(seed, 0))
	w := world{c: c}
	var live []uint64
	for i := range rounds {
		addr, err := a.Alloc(w.size())
		if err != nil {
			t.Error(err)
			return
		}
		live = append(live, addr)
		switch c.IntN(400) {
		case 0:
			err = d.Empty()
		case 1:
			d.ResetPeaks()
		case 2, 3, 4, 5:
			err = d.RecordStream(addr, quietStream{uint64(c.IntN(16))})
		}
		for err == nil && (len(live) > 40 || i == rounds-1) && len(live) > 0 {
			j := c.IntN(len(live))
			err = d.Free(live[j])
			live[j] = live[len(live)-1]
			live = live[:len(live)-1]
		}
		if err != nil {
			t.Error(err)
			return
		}
	}
}
