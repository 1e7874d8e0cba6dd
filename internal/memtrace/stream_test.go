package memtrace

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// A longFile is a file in which a text is repeated many times.
type longFile struct {
	head, text, tail string
	times            int
	at               int64
	read             func(at int64) // called by each Read
}

func (f *longFile) Read(b []byte) (int, error) {
	if f.read != nil {
		f.read(f.at)
	}
	body := int64(len(f.text) * f.times)
	piece := f.head
	at := f.at
	switch {
	case at < int64(len(f.head)):
		piece = piece[at:]
	case at < int64(len(f.head))+body:
		piece = f.text[(at-int64(len(f.head)))%int64(len(f.text)):]
	default:
		piece = f.tail[at-int64(len(f.head))-body:]
	}
	if piece == "" {
		return 0, io.EOF
	}
	n := copy(b, piece)
	f.at += int64(n)
	return n, nil
}

func (f *longFile) Seek(at int64, whence int) (int64, error) {
	if whence != io.SeekStart {
		return 0, errors.ErrUnsupported
	}
	f.at = at
	return at, nil
}

// longFiles are files of three forms, with times allocations and frees.
func longFiles(times int) map[string]*longFile {
	var numbers strings.Builder
	numbers.WriteString(strings.Repeat(",0", statColumns))
	return map[string]*longFile{
		"events": {head: `{"events": [["alloc", 512, 100, 0, 1]`, times: times, tail: "]}",
			text: `,["alloc", 4096, 1000, 7, 2],["free_requested", 4096, 1000, 7, 3],["free_completed", 4096, 1000, 7, 4]`},
		"sequences": {head: fmt.Sprintf(`{"columns": %q, "sequences": [{"seed": 5, "ops": [["alloc",1,100,0%s]`, columns, &numbers), times: times, tail: "]}]}",
			text: fmt.Sprintf(`,["alloc",7,1000,1%[1]s],["free",7%[1]s]`, &numbers)},
		"snapshot": {head: `{"segments": [], "device_traces": [[{"action": "alloc", "addr": 512, "size": 100}`, times: times, tail: "]]}",
			text: `,{"action": "alloc", "addr": 4096, "size": 1000, "stream": 7, "frames": [{"name": "f", "filename": "g", "line": 1}]},` +
				`{"action": "free_requested", "addr": 4096, "size": 1000, "stream": 7},{"action": "free_completed", "addr": 4096, "size": 1000, "stream": 7}`},
	}
}

// heap returns the size of the live heap in bytes.
func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A meter finds how much the heap grows.
type meter struct{ before, grown int64 }

func (m *meter) look() { m.grown = max(m.grown, heap()-m.before) }

// measuring is an allocator that looks at the heap every now and then.
type measuring struct {
	*fake
	calls, every int
	meter        *meter
}

func (a *measuring) Alloc(stream, bytes int) (uint64, error) {
	if a.calls++; a.calls%a.every == 0 {
		a.meter.look()
	}
	return a.fake.Alloc(stream, bytes)
}

// A trace of any length is read and replayed in the same memory.
func TestLongTracesTakeNoMemory(t *testing.T) {
	const times = 50_000
	for name, f := range longFiles(times) {
		t.Run(name, func(t *testing.T) {
			t.Setenv("TMPDIR", t.TempDir())
			m := &meter{before: heap()}
			looked := int64(0)
			f.read = func(at int64) {
				if at < looked || at > looked+2<<20 {
					looked = at
					m.look()
				}
			}
			rec, err := Read(f)
			require.NoError(t, err)
			defer rec.Close()
			require.Len(t, rec.Traces, 1)
			tr := rec.Traces[0]
			require.Equal(t, []int{2*times + 1, 2, 2}, []int{tr.Ops, tr.Blocks, tr.Streams})
			require.NotNil(t, rec.spool.file, "the events do not fit into the memory of a spool")
			m.look()
			r, err := Replay(tr, &measuring{newFake(), 0, times / 4, m}, &Config{Repeat: 1, Curve: true})
			require.NoError(t, err)
			m.look()
			require.Equal(t, 2*times+1, r.Ops)
			require.Equal(t, Peaks{2048, 2048}, r.Peaks)
			require.Less(t, m.grown, int64(4<<20))
			t.Logf("%d MiB of JSON: the heap grew by %d KiB", f.at>>20, m.grown>>10)
		})
	}
}

// The limits of a file hold whatever its length.
func TestLimitsOfLongTraces(t *testing.T) {
	for name, f := range longFiles(100) {
		_, err := read(f, 5000)
		require.ErrorContains(t, err, "the file has more than 5000 bytes, uncompressed: record a shorter trace", name)
	}
	var streams strings.Builder
	for i := range mostStreams {
		fmt.Fprintf(&streams, `,{"action":"alloc","addr":%d,"size":512,"stream":%d}`, 512*(i+2), i+1)
	}
	var devices strings.Builder
	for range mostTraces {
		devices.WriteString(`,[{"action":"alloc","addr":512,"size":512}]`)
	}
	for want, file := range map[string]io.ReadSeeker{
		"device 0 has 1025 streams: want at most 1024": strings.NewReader(`{"segments":[],"device_traces":[[{"action":"alloc","addr":512,"size":512}` + streams.String() + `]]}`),
		"traces of more than 4096 devices":             strings.NewReader(`{"segments":[],"device_traces":[[{"action":"alloc","addr":512,"size":512}]` + devices.String() + `]}`),
		"more than 4194304 bytes":                      &longFile{head: `{"events":[["alloc", 512, 100, 0, "`, text: "long ", tail: `"]]}`, times: 2 << 20},
		`has "events" twice`:                           strings.NewReader(`{"events":[],"events":[]}`),
	} {
		m := &meter{before: heap()}
		_, err := Read(file)
		require.ErrorContains(t, err, want)
		m.look()
		require.Less(t, m.grown, int64(4<<20), want)
	}
}

func TestMostLiveBlocks(t *testing.T) {
	b := newBuilder("trace", &spool{})
	for i := range mostLive {
		require.NoError(t, b.add(i, "alloc", uint64(i+1)<<9, 512, 0))
	}
	require.ErrorContains(t, b.add(mostLive, "alloc", 1<<40, 512, 0), "while 1048576 others are allocated: want at most")
	for i := range mostLive { // the addresses of freed blocks are forgotten
		require.NoError(t, b.add(i, "free_completed", uint64(i+1)<<9, 512, 0))
	}
	require.LessOrEqual(t, len(b.seen), mostSeen)
	require.NoError(t, b.add(mostLive, "alloc", 1<<40, 512, 0))
	require.Equal(t, mostLive, b.finish(Peaks{}).Blocks)
}

// Events come back from memory and from the temporary file, which no name leads to.
func TestSpool(t *testing.T) {
	temp := t.TempDir()
	t.Setenv("TMPDIR", temp)
	seed := rand.Uint64()
	t.Log("seed ", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	s := &spool{}
	var sections []section
	var want [][]Event
	for _, n := range []int{0, 1, partEvents, 3*partEvents + 1, 200_000, 5} {
		x, events, last := section{spool: s, from: s.n, count: n}, []Event{}, -1
		for range n {
			e := Event{Op: Op(r.IntN(3)), Number: last + 1 + r.IntN(3)}
			if e.Op != EmptyCache {
				e.Block = r.IntN(1 << 30)
			}
			if e.Op == Alloc {
				e.Bytes, e.Stream = int(r.Int64()), r.IntN(1000)
			}
			require.NoError(t, s.write(&e, last))
			events, last = append(events, e), e.Number
		}
		x.to = s.n
		sections, want = append(sections, x), append(want, events)
	}
	require.LessOrEqual(t, len(s.head), spoolMemory)
	require.NotNil(t, s.file)
	for i, x := range slices.Backward(sections) {
		got := []Event{}
		require.NoError(t, x.each(func(part []Event) error {
			require.LessOrEqual(t, len(part), partEvents)
			got = append(got, part...)
			return nil
		}))
		require.Equal(t, want[i], got)
	}
	stop := errors.New("stop")
	require.Equal(t, stop, sections[3].each(func([]Event) error { return stop }))
	files, err := os.ReadDir(temp)
	require.NoError(t, err)
	require.Empty(t, files)
	require.NoError(t, s.Close())
	require.Error(t, sections[4].each(func([]Event) error { return nil }))
	require.NoError(t, (*spool)(nil).Close())
	t.Setenv("TMPDIR", temp+"/missing")
	s = &spool{head: make([]byte, spoolMemory)}
	require.ErrorContains(t, s.write(&Event{}, -1), "a file for the events")
}

// A long curve has the highest value of each step.
func TestLongCurve(t *testing.T) {
	const n = 5*mostPoints + 7
	r := &Result{}
	values := make([]Peaks, n)
	seed := rand.Uint64()
	t.Log("seed ", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	for i := range values {
		values[i] = Peaks{random.Int64N(1000), random.Int64N(1000)}
		r.point(values[i])
	}
	require.Equal(t, 8, r.CurveStep)
	require.Len(t, r.Curve, (n+7)/8)
	for i, got := range r.Curve {
		var want Peaks
		for _, v := range values[8*i : min(8*i+8, n)] {
			want = Peaks{max(want.Allocated, v.Allocated), max(want.Reserved, v.Reserved)}
		}
		require.Equal(t, want, got, "step %d", i)
	}
}
