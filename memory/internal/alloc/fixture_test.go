package alloc_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/memtrace"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/memory/internal/alloc"
)

// fixtures returns the recordings of a form: memtrace's, and those that the
// environment names.
func fixtures(t *testing.T, glob string) []string {
	files, err := filepath.Glob(filepath.Join("..", "..", "..", "internal", "memtrace", "testdata", glob))
	require.NoError(t, err)
	if path := env.Fixtures.Value(); path != "" {
		more, err := filepath.Glob(filepath.Join(path, glob))
		require.NoError(t, err)
		files = append(files, more...)
		if ok, _ := filepath.Match(glob, filepath.Base(path)); ok {
			files = append(files, path)
		}
	}
	if len(files) == 0 {
		t.Skipf("no %s in internal/memtrace/testdata: this is not a checkout", glob)
	}
	return files
}

func open(t *testing.T, file string) *os.File {
	f, err := os.Open(file)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, f.Close()) })
	return f
}

// gauges pairs the allocator's statistics with torch's that must be equal.
var gauges = []struct {
	name  string
	gauge alloc.Gauge
	of    func(*memory.Stats) memory.PoolStats
}{
	{"allocated_bytes", alloc.AllocatedBytes, func(s *memory.Stats) memory.PoolStats { return s.AllocatedBytes }},
	{"active_bytes", alloc.ActiveBytes, func(s *memory.Stats) memory.PoolStats { return s.ActiveBytes }},
	{"requested_bytes", alloc.RequestedBytes, func(s *memory.Stats) memory.PoolStats { return s.RequestedBytes }},
	{"allocation", alloc.Allocation, func(s *memory.Stats) memory.PoolStats { return s.Allocation }},
	{"active", alloc.Active, func(s *memory.Stats) memory.PoolStats { return s.Active }},
}

// After each step of what torch's allocator did, the statistics are torch's.
func TestSequences(t *testing.T) {
	testhost.Serial(t)
	for _, file := range fixtures(t, "alloc_stats*.json.gz") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			list, err := memtrace.ReadStats(open(t, file))
			require.NoError(t, err)
			require.NotEmpty(t, list)
			for _, q := range list {
				playSequence(t, q)
			}
		})
	}
}

func playSequence(t *testing.T, q memtrace.Sequence) {
	m := alloc.NewMachine(t, 1<<42)
	d := m.Device("")
	var arenas []*alloc.Arena
	for range q.Streams {
		a, err := d.Default().Arena(m.Stream())
		require.NoError(t, err)
		arenas = append(arenas, a)
	}
	live := map[int]uint64{}
	for i, step := range q.Steps {
		switch {
		case step.End:
			for _, addr := range live {
				require.NoError(t, d.Free(addr))
			}
			require.NoError(t, d.Empty())
		case step.Op == memtrace.EmptyCache:
			require.NoError(t, d.Empty())
		case step.Op == memtrace.Free:
			require.NoError(t, d.Free(live[step.Block]))
			delete(live, step.Block)
		default:
			addr, err := arenas[step.Stream].Alloc(uint64(step.Bytes))
			require.NoError(t, err)
			live[step.Block] = addr
		}
		if i%100 == 0 {
			d.Check(t)
		}
		for _, g := range gauges {
			got, want := d.Read(g.gauge), g.of(&step.Stats)
			same := got.All.Current == want.All.Current && got.Small.Current == want.Small.Current && got.Large.Current == want.Large.Current
			require.True(t, same, "seed %d, step %d: %s is %+v, torch's is %+v", q.Seed, i, g.name, got, want)
		}
		got, want := d.Read(alloc.ReservedBytes).All, step.Stats.ReservedBytes.All
		require.LessOrEqual(t, float64(got.Current), 1.05*float64(want.Current), "seed %d, step %d: reserved", q.Seed, i)
		require.LessOrEqual(t, got.Peak, want.Peak, "seed %d, step %d: the peak of reserved", q.Seed, i)
		require.Equal(t, step.Stats.AllocatedBytes.All.Peak, d.Read(alloc.AllocatedBytes).All.Peak, "seed %d, step %d: the peak of allocated", q.Seed, i)
	}
}

// A training run needs at most as much memory as with torch, and with expandable
// segments hardly more than its tensors have.
func TestTraces(t *testing.T) {
	testhost.Serial(t)
	for _, file := range fixtures(t, "trace_*.json.gz") {
		t.Run(filepath.Base(file), func(t *testing.T) {
			rec, err := memtrace.Read(open(t, file))
			require.NoError(t, err)
			defer rec.Close()
			for _, tr := range rec.Traces {
				reserved, allocated := playTrace(t, tr, "")
				require.Equal(t, tr.Recorded.Allocated, allocated)
				require.LessOrEqual(t, reserved, tr.Recorded.Reserved)
				reserved, _ = playTrace(t, tr, "expandable_segments:True")
				require.LessOrEqual(t, float64(reserved), 1.03*float64(tr.Recorded.Allocated))
			}
		})
	}
}

func playTrace(t *testing.T, tr *memtrace.Trace, conf string) (reserved, allocated int64) {
	m := alloc.NewMachine(t, 141<<30)
	d := m.Device(conf)
	var arenas []*alloc.Arena
	for range tr.Streams {
		a, err := d.Default().Arena(m.Stream())
		require.NoError(t, err)
		arenas = append(arenas, a)
	}
	live := make([]uint64, tr.Blocks)
	var events []memtrace.Event
	require.NoError(t, tr.Each(func(part []memtrace.Event) error {
		events = append(events, part...)
		return nil
	}))
	for i, e := range events {
		var err error
		switch e.Op {
		case memtrace.Alloc:
			live[e.Block], err = arenas[e.Stream].Alloc(uint64(e.Bytes))
		case memtrace.Free:
			err = d.Free(live[e.Block])
		case memtrace.EmptyCache:
			err = d.Empty()
		}
		require.NoError(t, err)
		if i%1000 == 0 {
			d.Check(t)
		}
	}
	return d.Read(alloc.ReservedBytes).All.Peak, d.Read(alloc.AllocatedBytes).All.Peak
}
