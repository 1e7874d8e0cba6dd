package analyze

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/timeline"
)

// write writes the file of a process.
func write(t *testing.T, dir, name string, h timeline.Header, records ...timeline.Record) {
	t.Helper()
	h.Format = 1
	var b strings.Builder
	e := json.NewEncoder(&b)
	require.NoError(t, e.Encode(h))
	for _, x := range records {
		require.NoError(t, e.Encode(x))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "timeline-"+name+".jsonl"), []byte(b.String()), 0o600))
}

func load(t *testing.T, dir string) *Timeline {
	t.Helper()
	j, err := LoadTimeline(dir)
	require.NoError(t, err)
	return j
}

func memberRecord(rank, size int) timeline.Record {
	world := make([]int, size)
	for i := range world {
		world[i] = i
	}
	return timeline.Record{Kind: timeline.Member, Name: "virtual:0", Member: &timeline.Membership{Group: "k", Label: "data", Rank: rank, Size: size, World: world, WorldSize: size}}
}

func operationRecord(rank, peer int, seq uint64, name string) timeline.Op {
	return timeline.Op{Group: "k", Name: name, Sequence: seq, Transfer: name == "ncclSend" || name == "ncclRecv", Bytes: 8, Rank: rank, Peer: peer}
}

func coll(order uint64, begin, end int64, ops ...timeline.Op) timeline.Record {
	return timeline.Record{Kind: timeline.Collective, Name: ops[0].Name, Order: order, Stream: 7, Begin: begin, End: end, Bytes: 8, Ops: ops}
}

func kern(order uint64, stream uint64, begin, end int64) timeline.Record {
	return timeline.Record{Kind: timeline.Kernel, Name: "gemm", Order: order, Stream: stream, Begin: begin, End: end}
}

// TestHostsAreAligned has two hosts whose wall clocks differ by 5 s. The end of a collective is the
// same moment on both.
func TestHostsAreAligned(t *testing.T) {
	dir := t.TempDir()
	const ahead = 5_000_000_000
	write(t, dir, "a", timeline.Header{Host: "a", Boot: "A", Monotonic: 1000}, memberRecord(0, 2),
		coll(1, 100, 900, operationRecord(0, -1, 1, "ncclAllReduce")), coll(2, 1000, 2000, operationRecord(0, -1, 2, "ncclAllReduce")))
	write(t, dir, "b", timeline.Header{Host: "b", Boot: "B", Monotonic: 1000 + ahead}, memberRecord(1, 2),
		coll(1, 700, 900, operationRecord(1, -1, 1, "ncclAllReduce")), coll(2, 1500, 2000, operationRecord(1, -1, 2, "ncclAllReduce")))
	j := load(t, dir)
	require.Len(t, j.Ranks, 2)
	require.Equal(t, interval{600, 800}, interval{j.Ranks[1].slices[0].Begin, j.Ranks[1].slices[0].End}, "from the first record on")
	c := trace(t, j)
	require.Equal(t, 2, c.Info.World)
	var flows []chromeEvent
	for _, e := range c.Events {
		if e.Phase == "s" || e.Phase == "f" {
			flows = append(flows, e)
		}
		if e.Phase == "X" {
			require.Equal(t, "data", e.Args["Process Group Name"])
			require.Equal(t, "ncclAllReduce", e.Name)
		}
	}
	require.Len(t, flows, 4)
	require.Equal(t, 1, *flows[0].PID, "from the rank that arrived last")
	require.Equal(t, 0, *flows[1].PID)
	require.EqualValues(t, 600, ns(*flows[0].Time))
}

// TestSendsAreConnected pairs the nth send to a rank with its nth receive, in one batch or alone.
func TestSendsAreConnected(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, "a", timeline.Header{Host: "a", Boot: "A"}, memberRecord(0, 2),
		coll(1, 0, 10, operationRecord(0, 1, 0, "ncclSend"), operationRecord(0, 1, 0, "ncclRecv")), coll(2, 20, 30, operationRecord(0, 1, 0, "ncclSend")))
	write(t, dir, "b", timeline.Header{Host: "a", Boot: "A"}, memberRecord(1, 2),
		coll(1, 1, 12, operationRecord(1, 0, 0, "ncclRecv"), operationRecord(1, 0, 0, "ncclSend")), coll(2, 20, 40, operationRecord(1, 0, 0, "ncclRecv")))
	var ids []string
	for _, e := range trace(t, load(t, dir)).Events {
		if e.Phase == "s" {
			ids = append(ids, e.ID)
		}
	}
	require.ElementsMatch(t, []string{"k/0>1/0", "k/0>1/1", "k/1>0/0"}, ids)
}

// TestSlicesNest has times that overlap a little, as from two comparisons of the clocks, parts of a
// collective, a graph with a branch, and ranges that cross.
func TestSlicesNest(t *testing.T) {
	dir := t.TempDir()
	part := kern(3, 7, 190, 420)
	part.Parent = 2
	branch := kern(5, 7, 500, 600)
	branch.Branch = true
	write(t, dir, "a", timeline.Header{Host: "a", Boot: "A"}, memberRecord(0, 1),
		kern(1, 7, 0, 210), coll(2, 200, 400, operationRecord(0, -1, 1, "ncclAllReduce")), part, kern(4, 7, 395, 500), branch,
		timeline.Record{Kind: timeline.Graph, Name: "cuGraphLaunch", Order: 6, Stream: 7, Begin: 450, End: 650},
		timeline.Record{Kind: timeline.Range, Name: "a", Device: timeline.NoDevice, Begin: 0, End: 20},
		timeline.Record{Kind: timeline.Range, Name: "b", Device: timeline.NoDevice, Begin: 10, End: 30},
		timeline.Record{Kind: timeline.Instant, Name: "m", Device: timeline.NoDevice, Begin: 10},
		timeline.Record{Kind: timeline.Wait, Name: "cuStreamSynchronize", Begin: 0, End: 650},
		timeline.Record{Kind: timeline.Wait, Name: "cuEventSynchronize", Begin: 10, End: 660},
		timeline.Record{Kind: timeline.Memory, Name: "alloc", Begin: 1, Bytes: 5},
		timeline.Record{Kind: timeline.Memory, Name: "free_completed", Begin: 2, Bytes: 3},
		timeline.Record{Kind: timeline.Dropped, Device: timeline.NoDevice, Count: 4})
	j := load(t, dir)
	require.EqualValues(t, 4, j.Dropped)
	require.Zero(t, j.Summarize().Ranks[0].Overlap, "a part of a collective is no computation")
	var allocated []any
	for _, e := range trace(t, j).Events {
		if e.Phase == "C" {
			allocated = append(allocated, e.Args["allocated"])
		}
	}
	require.Equal(t, []any{5.0, 2.0}, allocated)
}

// TestRanksOfAProcess has a process with two ranks, a second process of rank 1, and one without a
// group.
func TestRanksOfAProcess(t *testing.T) {
	dir := t.TempDir()
	second := memberRecord(1, 2)
	second.Device, second.Name = 1, "virtual:1"
	onSecond := kern(2, 8, 5, 9)
	onSecond.Device = 1
	zero := 0
	write(t, dir, "a", timeline.Header{Host: "a", Boot: "A"}, memberRecord(0, 2), second, kern(1, 7, 0, 3), onSecond)
	write(t, dir, "b", timeline.Header{Host: "a", Boot: "A"}, memberRecord(1, 2), kern(1, 7, 20, 21))
	write(t, dir, "c", timeline.Header{Host: "a", Boot: "A", Rank: &zero}, kern(1, 7, 30, 31))
	j := load(t, dir)
	var numbers []int
	for _, r := range j.Ranks {
		numbers = append(numbers, r.Number)
	}
	require.Equal(t, []int{0, 1, 2, 3}, numbers)
	require.Equal(t, "virtual:1", j.Ranks[1].Device)
	trace(t, j)
}

// TestLoadRefuses reads damaged files.
func TestLoadRefuses(t *testing.T) {
	const header = `{"timeline":1}` + "\n"
	for want, text := range map[string]string{
		"no header":                "",
		"this chorus reads 1":      `{"timeline":2}` + "\n",
		"an origin at -1 ns":       `{"timeline":1,"boot_id":"b","origin_monotonic_ns":-1}` + "\n",
		"an origin at 4000000000":  `{"timeline":1,"origin_wall_ns":4000000000000000000}` + "\n",
		"line 2":                   header + "nonsense\n",
		"a record of the device":   header + `{"kind":"kernel","device":-2}` + "\n",
		"an incomplete record":     header + `{"kind":"member"}` + "\n",
		"rank -1 of 1":             header + `{"kind":"member","member":{"rank":-1,"size":1}}` + "\n",
		"records of so few bytes":  header + strings.Repeat(`{}`+"\n", 2*fewRecords),
		"of the file: no recorder": header + `{"kind":"collective","ops":[` + strings.Repeat(`{},`, 2*fewRecords) + `{}]}` + "\n",
		"a record from 2000000000": header + `{"kind":"kernel","begin_ns":2000000000000000000}` + "\n",
	} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "timeline-x.jsonl"), []byte(text), 0o600))
		_, err := LoadTimeline(dir)
		require.ErrorContains(t, err, want, text)
	}
	_, err := LoadTimeline(t.TempDir())
	require.ErrorContains(t, err, "has no files of a timeline")
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "timeline-x.jsonl"), []byte(header+`{"kind":"kernel"}`+"\n"+`{"kin`), 0o600))
	require.Equal(t, []string{"timeline-x.jsonl"}, load(t, dir).Cut)
}

// The report names files that are no regular files, and a link to one is read.
func TestFilesThatAreNotRegular(t *testing.T) {
	dir := t.TempDir()
	pipe := filepath.Join(dir, "timeline-pipe.jsonl")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	_, err := LoadTimeline(dir)
	require.EqualError(t, err, "timeline: no file could be read: timeline-pipe.jsonl: not a regular file but a named pipe")

	other := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(other, "x"), []byte(`{"timeline":1}`+"\n"+`{"kind":"kernel"}`+"\n"), 0o600))
	require.NoError(t, os.Symlink(filepath.Join(other, "x"), filepath.Join(dir, "timeline-link.jsonl")))
	j := load(t, dir)
	require.Len(t, j.Ranks, 1)
	var text, asJSON strings.Builder
	require.NoError(t, j.Summarize().WriteText(&text))
	require.Contains(t, text.String(), "1 of 2 files could not be read: timeline-pipe.jsonl: not a regular file but a named pipe.\n")
	require.NoError(t, json.NewEncoder(&asJSON).Encode(j.Summarize()))
	require.Contains(t, asJSON.String(), `"unread_files":["timeline-pipe.jsonl: not a regular file but a named pipe"]`)
}

// FuzzRead reads arbitrary files. What it accepts becomes a valid trace.
func FuzzRead(f *testing.F) {
	f.Add([]byte(`{"timeline":1,"host":"a"}` + "\n" + `{"kind":"collective","name":"x","order":1,"begin_ns":1,"end_ns":5,"operations":[{"group":"g","name":"ncclSend","transfer":true,"rank":0,"peer":1}]}` + "\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		x := &file{name: "f"}
		if x.read(strings.NewReader(string(b)), 1000) != nil {
			return
		}
		j := newTimeline([]*file{x})
		var out strings.Builder
		require.NoError(t, j.WriteTrace(&out))
		require.True(t, json.Valid([]byte(out.String())), out.String())
		require.NoError(t, j.Summarize().WriteText(&out))
	})
}

// TestOffsetsAreLimited has three hosts whose clocks differ more and more, as in damaged files.
func TestOffsetsAreLimited(t *testing.T) {
	known := map[string]int64{"a": 0, "b": mostOrigin}
	first, second := collective{"g", 1}, collective{"g", 2}
	ends := map[collective]map[string]int64{first: {"b": 0, "c": mostOrigin}}
	_, ok := offsetTo(ends, known, "c")
	require.False(t, ok)
	ends[second] = map[string]int64{"a": 5, "c": 12}
	offset, ok := offsetTo(ends, known, "c")
	require.True(t, ok)
	require.EqualValues(t, 7, offset)
}

// TestManyStreams has more streams than the numbers below the first branch of a graph.
func TestManyStreams(t *testing.T) {
	dir := t.TempDir()
	var list []timeline.Record
	for i := range uint64(firstBranch - firstStream + 1) {
		list = append(list, kern(i+1, i+1, 0, 10))
	}
	branch := kern(1000, 1, 0, 10)
	branch.Branch = true
	write(t, dir, "a", timeline.Header{Host: "a", Boot: "A"}, append(list, branch)...)
	names := map[int]any{}
	for _, e := range trace(t, load(t, dir)).Events {
		if e.Name == "thread_name" {
			require.Nil(t, names[*e.TID], "thread %d", *e.TID)
			names[*e.TID] = e.Args["name"]
		}
	}
	require.Len(t, names, len(list)+1)
}

// TestShares compares the shares of random timelines with a model that marks each nanosecond.
func TestShares(t *testing.T) {
	const length = 200
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for range 300 {
		var work, comm [length]bool
		intervals := func(marks *[length]bool) (list []interval) {
			for range r.IntN(8) {
				from := int64(r.IntN(length))
				x := interval{from, from + int64(r.IntN(length-int(from)))}
				for i := x.from; i < x.to; i++ {
					marks[i] = true
				}
				list = append(list, x)
			}
			return list
		}
		works, comms := unite(intervals(&work)), unite(intervals(&comm))
		from := int64(r.IntN(length))
		window := interval{from, from + int64(r.IntN(length-int(from)))}
		want, gap := Share{Span: time.Duration(window.to - window.from)}, time.Duration(0)
		for i := window.from; i < window.to; i++ {
			gap++
			if work[i] {
				want.Compute++
				gap = 0
			}
			if comm[i] {
				want.Communication++
				gap = 0
			}
			switch {
			case work[i] && comm[i]:
				want.Overlap++
			case comm[i]:
				want.Exposed++
			case !work[i]:
				want.Gaps++
			}
			want.LongestGap = max(want.LongestGap, gap)
		}
		require.Equal(t, want, share(works, comms, window))
	}
}

// TestSteps has steps by graphs and by ranges.
func TestSteps(t *testing.T) {
	dir := t.TempDir()
	launch := func(order uint64, begin, end int64) timeline.Record {
		return timeline.Record{Kind: timeline.Graph, Name: "cuGraphLaunch", Order: order, Stream: 7, Begin: begin, End: end}
	}
	write(t, dir, "a", timeline.Header{Host: "a", Boot: "A"}, launch(1, 0, 60), launch(2, 100, 150), launch(3, 200, 250))
	s := load(t, dir).Summarize()
	require.Equal(t, "graph launches", s.Steps)
	require.Equal(t, []Share{{Span: 100, Compute: 60, Gaps: 40, LongestGap: 40}, {Span: 100, Compute: 50, Gaps: 50, LongestGap: 50}}, s.Ranks[0].Steps)
	other := t.TempDir()
	var launches []timeline.Record
	for i := range 20 { // streams with as many launches
		for k := range 3 {
			x := launch(uint64(3*i+k+1), int64(1000*i+100*k*(i+1)), int64(1000*i+100*k*(i+1)+10))
			x.Stream = uint64(100 - i)
			launches = append(launches, x)
		}
	}
	write(t, other, "a", timeline.Header{Host: "a", Boot: "A"}, launches...)
	require.EqualValues(t, 2000, load(t, other).Summarize().Ranks[0].Steps[0].Span, "of the smallest handle")
	write(t, dir, "b", timeline.Header{Host: "a", Boot: "A"}, kern(1, 7, 0, 3),
		timeline.Record{Kind: timeline.Range, Name: "Step 1", Device: timeline.NoDevice, Begin: 0, End: 50})
	s = load(t, dir).Summarize()
	require.Equal(t, "nvtx ranges", s.Steps)
	require.EqualValues(t, 50, s.Ranks[0].Steps[0].Span)
	var b strings.Builder
	require.NoError(t, s.WriteText(&b))
	require.Contains(t, b.String(), "Steps are marked by nvtx ranges.")
}

// The rank that arrives last is counted by the times that collectives take, on two hosts whose clocks differ, and only if all
// ranks of the group have a timeline.
func TestArrivals(t *testing.T) {
	const late = 2
	record := func(dir string, ranks int) {
		for rank := range ranks {
			h := timeline.Header{Host: fmt.Sprint("h", rank/2), Boot: fmt.Sprint("boot", rank/2)}
			skew := int64(rank/2) * 1e9
			list := []timeline.Record{{Kind: timeline.Member, Name: "cuda:0", Member: &timeline.Membership{Group: "g", Rank: rank, Size: 4, World: []int{0, 1, 2, 3}, WorldSize: 4}}}
			for i := range int64(30) {
				begin, end := skew+i*20e6+int64(rank)*1000, skew+i*20e6+6e6
				if rank == late && i%10 > 0 {
					begin += 5e6
				}
				op := timeline.Op{Group: "g", Name: "ncclAllReduce", Sequence: uint64(2*i + 1), Rank: rank, Peer: -1}
				list = append(list, timeline.Record{Kind: timeline.Collective, Name: "ncclAllReduce", Order: uint64(2*i + 1), Stream: 7, Begin: begin, End: end, Ops: []timeline.Op{op}})
				op.Name, op.Sequence, op.Peer = "ncclBroadcast", op.Sequence+1, 0
				list = append(list, timeline.Record{Kind: timeline.Collective, Name: "ncclBroadcast", Order: uint64(2*i + 2), Stream: 7, Begin: end, End: end + 1000 + int64(rank), Ops: []timeline.Op{op}})
			}
			write(t, dir, fmt.Sprint("rank", rank), h, list...)
		}
	}
	dir := t.TempDir()
	record(dir, 4)
	s := load(t, dir).Summarize()
	require.Len(t, s.Ranks, 4)
	require.Equal(t, uint64(30), s.Ranks[late].Arrivals.Compared, "without broadcasts")
	require.Equal(t, uint64(27), s.Ranks[late].Arrivals.Last)
	require.True(t, s.Ranks[late].Arrivals.Straggles())
	require.Equal(t, uint64(3), s.Ranks[3].Arrivals.Last)
	var b strings.Builder
	require.NoError(t, s.WriteText(&b))
	require.Contains(t, b.String(), "stream of the last rank:\nrank 2 on h1: 27 of 30, and the others waited 135ms for it, 4.999ms each time: it is a straggler\nrank 3 on h1: 3 of 30, ")
	require.Equal(t, 1, strings.Count(b.String(), "it is a straggler"))

	part := t.TempDir()
	record(part, 3)
	s = load(t, part).Summarize()
	for _, r := range s.Ranks {
		require.Zero(t, r.Arrivals.Compared, "rank 3 may be the last")
	}
}
