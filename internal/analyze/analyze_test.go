package analyze

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// An op is a synthetic operation; done says that it has completed.
type op struct {
	group string
	name  string
	n     int
	dtype string
	redop string
	root  int
	done  bool
	peer  int // for send and recv
	graph bool
	state string // "started" or "queued"
	kind  string // of Chorus
	to    string // the format of a quantized all-reduce
	other string // options of an all-reduce and norm
	batch uint64 // 0 means that the operation is alone
}

// The world of the synthetic jobs has three ranks. Groups that are not here have all of them.
var groupRanks = map[string][]int{"pair": {0, 1}, "left": {0, 1}, "right": {1, 2}, "cross": {2, 0}}

func sum(done bool) op { return op{group: "world", name: "all_reduce", n: 8, redop: "sum", done: done} }

func on(group string, o op) op { o.group = group; return o }

// writeRank writes the dump of a rank as internal/collective does. base is the record before the
// first operation, and the number of the collective before it.
func writeRank(t *testing.T, dir string, rank, base int, groups []string, ops []op) {
	t.Helper()
	config, list, entries := map[string]any{}, []any{}, []any{}
	for id, name := range groups {
		ranks, in := groupRanks[name], 0
		if ranks == nil {
			ranks = []int{0, 1, 2}
		}
		for i, r := range ranks {
			if r == rank {
				in = i
			}
		}
		text, err := json.Marshal(ranks)
		require.NoError(t, err)
		config[fmt.Sprint(id)] = map[string]any{"name": "key-" + name, "desc": name, "ranks": string(text), "rank": in, "size": len(ranks)}
		record, seq := base, base
		for at, o := range ops {
			if o.group != name {
				continue
			}
			record++
			e := map[string]any{
				"record_id": record, "pg_id": id, "process_group": []string{"key-" + name, name}, "time_created_ns": 1e18 + float64(at)*1e9,
				"input_sizes": [][]int{{o.n}}, "output_sizes": [][]int{{o.n}}, "input_dtypes": []string{"Float"}, "state": "scheduled",
				"captured": o.graph, "reduction": o.redop, "profiling_name": "nccl:" + o.name, "frames": []any{map[string]any{"name": "github.com/gochorus/chorus/comm.AllReduce[...]", "filename": "collective.go", "line": 60}, map[string]any{"name": "main.train", "filename": "main.go", "line": 10 + at}},
			}
			if o.kind != "" {
				e["kind"], e["uneven"], e["options"] = o.kind, o.to == "" && o.other == "", o.other
			}
			if o.to != "" {
				e["format"] = o.to
			}
			if o.dtype != "" {
				e["input_dtypes"] = []string{o.dtype}
			}
			e["batch_id"] = cmp.Or(o.batch, uint64(record))
			switch {
			case o.done:
				e["state"] = "completed"
			case o.state == "queued":
				e["queued"] = true
			case o.state != "":
				e["state"] = o.state
			}
			switch o.name {
			case "send":
				e["is_p2p"], e["profiling_name"] = true, fmt.Sprintf("nccl:send %d->%d", in, o.peer)
			case "recv":
				e["is_p2p"], e["profiling_name"] = true, fmt.Sprintf("nccl:recv %d<-%d", in, o.peer)
			case "broadcast":
				e["root"] = o.root
			}
			if e["is_p2p"] == nil {
				seq++
			}
			e["collective_seq_id"] = seq
			entries = append(entries, e)
		}
		list = append(list, map[string]any{"pg_id": id, "rank": in, "world_rank": rank, "world_ranks": ranks, "world_size": 3, "device": "cuda:0",
			"uuid": fmt.Sprint("GPU-", rank), "capacity": 2000, "issued": record, "accepted": record})
	}
	text, err := json.Marshal(map[string]any{"version": "2.10", "pg_config": config, "entries": entries,
		"chorus": map[string]any{"format": 1, "host": fmt.Sprint("n", rank), "pid": 100 + rank, "clock": map[string]any{"wall_ns": 1e18}, "groups": list}})
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprint("trace-", rank)), text, 0o600))
}

func analyze(t *testing.T, paths ...string) *Report {
	t.Helper()
	j, err := Load(paths, nil)
	require.NoError(t, err)
	r := j.Analyze()
	var b strings.Builder
	require.NoError(t, r.WriteText(&b))
	require.Contains(t, b.String(), r.Verdict)
	require.NotContains(t, b.String(), "\x1b")
	return r
}

func culprits(r *Report) (list []int) {
	for _, c := range r.Culprits {
		list = append(list, *c.World)
	}
	return list
}

func TestAnalyzeVerdicts(t *testing.T) {
	world := []string{"world"}
	with := func(change func(*op)) op { o := sum(false); change(&o); return o }
	started := func(o op) op { o.state = "started"; return o }
	queued := func(o op) op { o.state = "queued"; return o }
	completed := func(o op) op { o.done = true; return o }
	together := func(o op) op { o.batch = 1; return o }
	send := func(peer, n int) op { return op{group: "world", name: "send", n: n, peer: peer} }
	experts := func(kind string, n int) op { return op{group: "world", name: "all_to_all", kind: kind, n: n} }
	quantized := func(to string, n int) op {
		return op{group: "world", name: "all_reduce", kind: "quantized_all_reduce", n: n, redop: "sum", to: to}
	}
	norm := func(options string) op {
		return op{group: "world", name: "all_reduce", kind: "all_reduce_and_norm", n: 8, redop: "sum", other: options}
	}
	recv := func(peer, n int) op { return op{group: "world", name: "recv", n: n, peer: peer} }
	for name, c := range map[string]struct {
		ranks    map[int][]op
		groups   []string
		kind     string
		culprits []int
		texts    []string
	}{
		"nothing": {map[int][]op{0: {sum(true)}, 1: {sum(true)}, 2: {sum(true)}}, world, KindNone, nil, []string{"No difference found"}},
		"completions noticed late": {map[int][]op{0: slices.Repeat([]op{sum(false)}, 4), 1: {sum(true), sum(true)}, 2: {sum(true), sum(false), sum(false), sum(false)}},
			world, KindBehind, []int{1}, []string{"Rank 1 (PID 101 on n1) has not issued collective 3", "Its last operation is collective 2"}},
		"other operation": {map[int][]op{0: {sum(true), sum(false)}, 1: {sum(true), {group: "world", name: "broadcast", n: 8}}, 2: {sum(true), sum(false)}},
			world, KindMismatch, []int{1}, []string{"in collective 2, in the operation", "rank 1 (PID 101 on n1) issued broadcast(8 x Float, root 0) at main.train (main.go:11)"}},
		"other operation of experts": {map[int][]op{0: {experts("dispatch", 8)}, 1: {experts("combine", 8)}, 2: {experts("dispatch", 8)}},
			world, KindMismatch, []int{1}, []string{"in the operation", "rank 1 (PID 101 on n1) issued combine(8 x Float)"}},
		"other tokens for experts": {map[int][]op{0: {experts("dispatch", 8)}, 1: {}, 2: {experts("dispatch", 0)}},
			world, KindBehind, []int{1}, []string{"has not issued collective 1 (dispatch(8 x Float))"}},
		"quantized and not": {map[int][]op{0: {quantized("Char", 8)}, 1: {sum(false)}, 2: {quantized("Char", 8)}},
			world, KindMismatch, []int{1}, []string{"in the operation", "rank 1 (PID 101 on n1) issued all_reduce(8 x Float, sum)", "issued quantized_all_reduce(8 x Float in Char, sum)"}},
		"other format": {map[int][]op{0: {quantized("Char", 8)}, 1: {quantized("Char", 8)}, 2: {quantized("Float8_e4m3fn", 8)}},
			world, KindMismatch, []int{2}, []string{"in the format", "rank 2 (PID 102 on n2) issued quantized_all_reduce(8 x Float in Float8_e4m3fn, sum)"}},
		"other size of a quantized all-reduce": {map[int][]op{0: {quantized("Char", 8)}, 1: {quantized("Char", 9)}, 2: {quantized("Char", 8)}},
			world, KindMismatch, []int{1}, []string{"in the size"}},
		"other options of a norm": {map[int][]op{0: {norm("rows of 4, eps 0")}, 1: {norm("rows of 2, eps 0")}, 2: {norm("rows of 4, eps 0")}},
			world, KindMismatch, []int{1}, []string{"in the options", "rank 1 (PID 101 on n1) issued all_reduce_and_norm(8 x Float, sum, rows of 2, eps 0)"}},
		"other type": {map[int][]op{0: {with(func(o *op) { o.dtype = "Half" })}, 1: {sum(false)}, 2: {sum(false)}},
			world, KindMismatch, []int{0}, []string{"in the type", "all_reduce(8 x Half, sum)"}},
		"other size": {map[int][]op{0: {sum(false)}, 1: {sum(false)}, 2: {with(func(o *op) { o.n = 9 })}},
			world, KindMismatch, []int{2}, []string{"in the size", "all_reduce(9 x Float, sum)"}},
		"other reduction": {map[int][]op{0: {sum(false)}, 1: {sum(false)}, 2: {with(func(o *op) { o.redop = "max" })}},
			world, KindMismatch, []int{2}, []string{"in the reduction"}},
		"other root": {map[int][]op{0: {{group: "world", name: "broadcast", n: 8}}, 1: {{group: "world", name: "broadcast", n: 8, root: 1}}, 2: {{group: "world", name: "broadcast", n: 8}}},
			world, KindMismatch, []int{1}, []string{"in the root"}},
		"no majority": {map[int][]op{0: {on("pair", sum(false))}, 1: {on("pair", with(func(o *op) { o.n = 9 }))}},
			[]string{"pair"}, KindMismatch, []int{0, 1}, []string{"no majority"}},
		"skipped": {map[int][]op{0: {sum(true), sum(false), {group: "world", name: "broadcast", n: 8}}, 1: {sum(true), {group: "world", name: "broadcast", n: 8}}, 2: {sum(true), sum(false), {group: "world", name: "broadcast", n: 8}}},
			world, KindMismatch, []int{1}, []string{"it may have skipped collective 2"}},
		"behind": {map[int][]op{0: {sum(true), sum(false)}, 1: {sum(true)}, 2: {sum(true), sum(false)}},
			world, KindBehind, []int{1}, []string{"Rank 1 (PID 101 on n1) has not issued collective 2 (all_reduce(8 x Float, sum)) of world", "Its last operation is collective 1", "main.go:10), completed"}},
		"nothing issued": {map[int][]op{0: {sum(false)}, 1: {sum(false)}, 2: {}},
			world, KindBehind, []int{2}, []string{"no operation at all"}},
		"missing rank": {map[int][]op{0: {sum(false)}, 2: {sum(false)}},
			world, KindMissing, []int{1}, []string{"No file has the operations of rank 1", "wait in collective 1"}},
		"missing rank without a hang": {map[int][]op{0: {sum(true)}, 2: {sum(true)}},
			world, KindMissing, []int{1}, []string{"No file has the operations of rank 1. Either"}},
		"cycle of two groups": {map[int][]op{0: {on("world", sum(false))}, 1: {on("pair", sum(false))}, 2: {on("world", sum(false))}},
			[]string{"world", "pair"}, KindOrder, []int{0, 1}, []string{"rank 0 (PID 100 on n0) waits for rank 1 (PID 101 on n1) in collective 1", "of world", "of pair", "in different orders"}},
		"cycle of three groups": {map[int][]op{0: {on("left", sum(false))}, 1: {on("right", sum(false))}, 2: {on("cross", sum(false))}},
			[]string{"left", "right", "cross"}, KindOrder, []int{0, 1, 2}, []string{"in a cycle"}},
		"orders of two groups": {map[int][]op{0: {on("world", sum(false)), on("pair", sum(false))}, 1: {on("pair", sum(false)), on("world", sum(false))}, 2: {on("world", sum(false))}},
			[]string{"world", "pair"}, KindOrder, []int{0, 1}, []string{"rank 0 (PID 100 on n0) issued collective 1", "before", "the other way round"}},
		"chain": {map[int][]op{0: {on("left", sum(false))}, 1: {on("right", sum(false))}, 2: {on("world", sum(true))}},
			[]string{"left", "right", "world"}, KindBehind, []int{2}, []string{"has not issued collective 1", "of right", "of world, issued at"}},
		"behind because of another group": {map[int][]op{0: {on("left", sum(false))}, 1: {on("left", sum(false))}, 2: {on("right", sum(false))}},
			[]string{"left", "right"}, KindStuck, nil, []string{"All 2 ranks have issued collective 1", "of left"}},
		"captured": {map[int][]op{0: {with(func(o *op) { o.graph = true })}, 1: {with(func(o *op) { o.graph = true })}, 2: {}},
			world, KindNone, nil, nil},
		"slow": {map[int][]op{0: {sum(true), sum(false)}, 1: {sum(false), sum(false)}, 2: {sum(true), sum(false)}},
			world, KindSlow, []int{1}, []string{"collective 1", "not known to have completed on rank 1 (PID 101 on n1)", "GPU-1"}},
		"slow at the end": {map[int][]op{0: {sum(true)}, 1: {sum(false)}, 2: {sum(true)}}, world, KindSlow, []int{1}, []string{"completed on rank 1"}},
		"hardware": {map[int][]op{0: {sum(true), sum(false)}, 1: {sum(true), sum(false)}, 2: {sum(true), sum(false)}},
			world, KindStuck, nil, []string{"All 3 ranks have issued collective 2", "It is not known whether the streams of all ranks have reached it", "rank 2 (PID 102 on n2): cuda:0 GPU-2"}},
		"send without a receive": {map[int][]op{0: {send(1, 8)}, 1: {}, 2: {}},
			world, KindTransfer, []int{1}, []string{"send(8 x Float) to rank 1", "has not issued the matching receive"}},
		"receive without a send": {map[int][]op{0: {}, 1: {recv(0, 8)}, 2: {}},
			world, KindTransfer, []int{0}, []string{"recv(8 x Float) from rank 0", "has not issued the matching send"}},
		"receive of another size": {map[int][]op{0: {send(1, 8)}, 1: {recv(0, 9)}, 2: {}},
			world, KindTransfer, []int{0, 1}, []string{"sends send(8 x Float)", "receives recv(9 x Float)"}},
		"send without a receive before a collective": {map[int][]op{0: {send(1, 8)}, 1: {sum(false)}, 2: {sum(false)}},
			world, KindOrder, []int{0, 1}, []string{"in the same order on all ranks: the matching operation of a send or a receive is missing before the collective"}},
		"receives in a cycle": {map[int][]op{0: {recv(1, 8)}, 1: {recv(0, 8)}, 2: {}},
			world, KindOrder, []int{0, 1}, []string{"Change the order of the sends and receives"}},
		"started on all ranks": {map[int][]op{0: {started(sum(false))}, 1: {started(sum(false))}, 2: {started(sum(false))}},
			world, KindStuck, nil, []string{"All 3 ranks have issued collective 1", "The streams of all ranks have reached it", "rank 2 (PID 102 on n2): cuda:0 GPU-2"}},
		"not reached on one rank": {map[int][]op{0: {started(sum(false))}, 1: {queued(sum(false)), queued(sum(false))}, 2: {started(sum(false)), queued(sum(false))}},
			world, KindQueued, []int{1}, []string{"All ranks have issued collective 1"}},
		"not reached on one rank, all issued": {map[int][]op{0: {started(sum(false)), queued(sum(false))}, 1: {queued(sum(false)), queued(sum(false))}, 2: {started(sum(false)), queued(sum(false))}},
			world, KindQueued, []int{1}, []string{"the stream of rank 1 (PID 101 on n1) has not reached it at main.train (main.go:10)"}},
		"not reached because of another group": {map[int][]op{0: {started(on("left", sum(false)))}, 1: {started(on("right", sum(false))), queued(on("left", sum(false)))}, 2: {started(on("right", sum(false)))}},
			[]string{"left", "right"}, KindQueued, []int{1}, []string{"Of right, collective 1 (all_reduce(8 x Float, sum)) has started on this rank"}},
		"slow and started": {map[int][]op{0: {sum(true)}, 1: {started(sum(false))}, 2: {sum(true)}}, world, KindSlow, []int{1}, []string{"Its stream has reached it"}},
		"sends before receives": {map[int][]op{0: {started(send(1, 8)), queued(recv(1, 8))}, 1: {started(send(0, 8)), queued(recv(0, 8))}, 2: {}},
			world, KindOrder, []int{0, 1}, []string{"whose matching operation is queued behind its send(8 x Float) to rank 0", "into one Batch"}},
		"sends before receives in a burst": {map[int][]op{0: {send(1, 8), recv(1, 8)}, 1: {send(0, 8), recv(0, 8)}, 2: {}},
			world, KindStuck, nil, []string{"It is not known whether"}},
		"sends and receives in batches": {map[int][]op{0: {started(together(send(1, 8))), started(together(recv(1, 8)))}, 1: {started(together(send(0, 8))), started(together(recv(0, 8)))}, 2: {}},
			world, KindStuck, nil, []string{"the matching receive, and neither is known", "The streams of all ranks have reached it"}},
		"receive that its stream has not reached": {map[int][]op{0: {started(send(1, 8))}, 1: {queued(recv(0, 8))}, 2: {}},
			world, KindQueued, []int{1}, []string{"the stream of rank 1 (PID 101 on n1) has not reached recv(8 x Float) from rank 0"}},
		"receive that its stream has not reached, of data that NCCL has buffered": {map[int][]op{0: {completed(send(1, 8))}, 1: {queued(recv(0, 8))}, 2: {}},
			world, KindQueued, []int{1}, []string{"the stream of rank 1 (PID 101 on n1) has not reached recv(8 x Float) from rank 0"}},
		"stuck transfer": {map[int][]op{0: {send(1, 8)}, 1: {recv(0, 8)}, 2: {}},
			world, KindStuck, nil, []string{"the matching receive, and neither is known"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for rank, ops := range c.ranks {
				var mine []string
				for _, g := range c.groups {
					if ranks := groupRanks[g]; ranks == nil || ranks[0] == rank || ranks[1] == rank {
						mine = append(mine, g)
					}
				}
				writeRank(t, dir, rank, 0, mine, ops)
			}
			r := analyze(t, dir)
			require.Equal(t, c.kind, r.Kind, r.Verdict)
			for _, text := range c.texts {
				require.Contains(t, r.Verdict, text)
			}
			require.ElementsMatch(t, c.culprits, culprits(r), r.Verdict)
			text, err := json.Marshal(r)
			require.NoError(t, err)
			require.NotContains(t, string(text), "not the cause")
			if r.Kind == KindMismatch {
				require.NotContains(t, string(text), KindStuck, "the mismatch explains it")
			}
		})
	}
}

// The rings of two ranks begin at different collectives. The comparison begins at the first one
// that both hold, so that a difference before it does not count.
func TestAnalyzeAlignsRings(t *testing.T) {
	dir := t.TempDir()
	old := sum(true)
	old.n = 99
	writeRank(t, dir, 0, 0, []string{"world"}, []op{old, sum(true), sum(false)})
	writeRank(t, dir, 1, 1, []string{"world"}, []op{sum(true)})
	writeRank(t, dir, 2, 0, []string{"world"}, []op{sum(true), sum(true), sum(false)})
	r := analyze(t, dir)
	require.Equal(t, KindBehind, r.Kind, r.Verdict)
	require.EqualValues(t, []uint64{1, 2}, []uint64{r.Groups[0].Rows[0].Oldest, r.Groups[0].Rows[1].Oldest})
	require.EqualValues(t, 3, r.Findings[0].Seq)
}

// If a ring has overwritten transfers, their numbers are not known, so only pending ones count.
func TestAnalyzeTransfersOfFullRings(t *testing.T) {
	send, recv := op{group: "left", name: "send", n: 8, peer: 1}, op{group: "left", name: "recv", n: 8}
	done := send
	done.done = true
	for name, c := range map[string]struct {
		recvs []op
		kind  string
	}{"paired": {[]op{recv}, KindStuck}, "alone": {nil, KindTransfer}} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			writeRank(t, dir, 1, 5, []string{"left"}, append([]op{on("left", sum(true))}, c.recvs...))
			writeRank(t, dir, 0, 5, []string{"left"}, []op{on("left", sum(true)), done, send})
			r := analyze(t, dir)
			require.Equal(t, c.kind, r.Kind, r.Verdict)
		})
	}
}

// A dump that is shortened has a gap, so the numbers of its transfers are not known.
func TestAnalyzeShortenedDump(t *testing.T) {
	other := op{group: "left", name: "send", n: 9, peer: 1}
	send, recv := op{group: "left", name: "send", n: 8, peer: 1}, op{group: "left", name: "recv", n: 8}
	for _, shortened := range []bool{false, true} {
		dir := t.TempDir()
		writeRank(t, dir, 0, 0, []string{"left"}, []op{send, other})
		writeRank(t, dir, 1, 0, []string{"left"}, []op{recv, recv})
		if shortened {
			path := filepath.Join(dir, "trace-0")
			text, err := os.ReadFile(path)
			require.NoError(t, err)
			text = bytes.Replace(text, []byte(`"capacity":2000`), []byte(`"capacity":2000,"shortened":true`), 1)
			require.NoError(t, os.WriteFile(path, text, 0o600))
		}
		r := analyze(t, dir)
		require.Equal(t, !shortened, strings.Contains(r.Verdict, "9 x "), r.Verdict)
	}
}

// A process writes a file for each communicator that fails. The latest one counts.
func TestAnalyzeLatestFile(t *testing.T) {
	dir := t.TempDir()
	for rank := range 3 {
		writeRank(t, dir, rank, 0, []string{"world"}, []op{sum(false)})
	}
	text, err := os.ReadFile(filepath.Join(dir, "trace-1"))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "trace-1-old"), []byte(strings.ReplaceAll(string(text), `"wall_ns":1000000000000000000`, `"wall_ns":1`)), 0o600))
	writeRank(t, dir, 1, 0, []string{"world"}, []op{})
	r := analyze(t, dir)
	require.Equal(t, KindBehind, r.Kind, r.Verdict)
}

// Texts of a file cannot control the terminal.
func TestAnalyzeQuotesTexts(t *testing.T) {
	dir := t.TempDir()
	o := sum(false)
	o.name, o.redop, o.dtype = "all\x1b[2Jreduce", "s\x1bm", "F\x1b"
	for rank := range 3 {
		writeRank(t, dir, rank, 0, []string{"world"}, []op{o})
	}
	r := analyze(t, dir)
	require.Contains(t, r.Verdict, `all\x1b[2Jreduce(8 x F\x1b, s\x1bm)`)
}

// A dump of an earlier run in the folder is a finding.
func TestAnalyzeTwoRuns(t *testing.T) {
	dir, old := t.TempDir(), t.TempDir()
	writeRank(t, old, 0, 0, []string{"left"}, []op{on("left", sum(true))})
	text, err := os.ReadFile(filepath.Join(old, "trace-0"))
	require.NoError(t, err)
	text = []byte(strings.ReplaceAll(string(text), `"pid":100`, `"pid":99`))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "trace-0-left"), text, 0o600))
	for rank := range 3 {
		writeRank(t, dir, rank, 0, []string{"world"}, []op{sum(true)})
	}
	r := analyze(t, dir)
	require.Equal(t, KindTwice, r.Kind)
	require.Contains(t, r.Verdict, "The files are of two runs or of two jobs: rank 0 (PID 100 on n0) and rank 0 (PID 99 on n0)")
}

// Two jobs have files in one folder. Neither job's verdict is given as that of the other.
func TestAnalyzeTwoJobs(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	for rank := range 3 {
		writeRank(t, dir, rank, 0, []string{"world"}, []op{sum(true)})
		writeRank(t, other, rank, 0, []string{"world"}, []op{sum(rank != 1)})
		text, err := os.ReadFile(filepath.Join(other, fmt.Sprint("trace-", rank)))
		require.NoError(t, err)
		text = []byte(strings.NewReplacer(`"pid":10`, `"pid":90`, `"name":"`, `"name":"other-`, `"process_group":["`, `"process_group":["other-`).Replace(string(text)))
		require.NoError(t, os.WriteFile(filepath.Join(dir, fmt.Sprint("other-trace-", rank)), text, 0o600))
	}
	require.Equal(t, KindNone, analyze(t, filepath.Join(dir, "trace-0"), filepath.Join(dir, "trace-1"), filepath.Join(dir, "trace-2")).Kind)
	r := analyze(t, dir)
	require.Equal(t, KindSlow, r.Kind, r.Verdict)
	require.Len(t, r.Jobs, 2)
	require.Equal(t, filepath.Join(dir, "other-trace"), r.Jobs[0].Job)
	require.Regexp(t, `^Job .*/other-trace: All ranks have issued .* on rank 1 \(PID 901 on n1\)`, r.Verdict)
	require.Equal(t, KindNone, r.Jobs[1].Kind, "the other job is healthy")
	require.Len(t, r.Files, 6)
	require.Equal(t, r.Jobs[0].Job, r.Files[0].Job)
	var text strings.Builder
	require.NoError(t, r.WriteText(&text))
	require.Regexp(t, `(?s)^The files are of 2 jobs\.\n\nJob \S+/other-trace: All ranks .*\n\nJob \S+/trace: No difference found`, text.String())
}

// A rank that failed by itself is the culprit if the others say that they ended because of another rank.
func TestAnalyzeFailedFirst(t *testing.T) {
	for _, late := range []bool{false, true} { // rank 2 has not issued it
		dir := t.TempDir()
		for rank := range 3 {
			if writeRank(t, dir, rank, 0, []string{"world"}, []op{sum(false)}); rank == 2 && late {
				writeRank(t, dir, rank, 0, []string{"world"}, []op{})
			}
			file := filepath.Join(dir, fmt.Sprint("trace-", rank))
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			end := `"end":"nccl: ncclRemoteError","end_follows":true,"issued":`
			if rank == 1 {
				end = `"end":"nccl: ncclAllReduce on rank 1 of 3: ncclSystemError","issued":`
			}
			require.Contains(t, string(text), `"issued":`)
			require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(string(text), `"issued":`, end)), 0o600))
		}
		r := analyze(t, dir)
		require.Equal(t, KindFailed, r.Kind, r.Verdict)
		require.Equal(t, 1, *r.Culprits[0].World)
		require.Contains(t, r.Verdict, "Its file says: nccl: ncclAllReduce on rank 1 of 3: ncclSystemError.")
	}
}

// So it is if the other ranks had no time to issue an operation that waits for it. Ranks that all end by themselves are no finding.
func TestAnalyzeEndedBetweenOperations(t *testing.T) {
	for _, others := range []string{`"end":"rank 1 closed the group","end_follows":true,`, `"end":"this process closed the group",`} {
		for _, ops := range [][]op{{sum(true), sum(true)}, {}} {
			dir := t.TempDir()
			for rank := range 3 {
				writeRank(t, dir, rank, 0, []string{"world"}, ops)
				file := filepath.Join(dir, fmt.Sprint("trace-", rank))
				text, err := os.ReadFile(file)
				require.NoError(t, err)
				end := others
				if rank == 1 {
					end = `"end":"this process closed the group",`
				}
				require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(string(text), `"issued":`, end+`"issued":`)), 0o600))
			}
			r := analyze(t, dir)
			if !strings.Contains(others, "follows") {
				require.Equal(t, KindNone, r.Kind, r.Verdict)
				continue
			}
			require.Equal(t, KindFailed, r.Kind, r.Verdict)
			require.Equal(t, []int{1}, culprits(r))
			after := "after collective 2"
			if len(ops) == 0 {
				after = "before its first collective"
			}
			require.Equal(t, "Rank 1 (PID 101 on n1) ended world "+after+", and the other ranks ended it because of that; no operation waited for another rank. Its file says: this process closed the group.", r.Verdict)
		}
	}
}

// A rank without a file is the culprit, and not one that had no time to issue what others wait for, if all that have files say that
// they ended because of another rank. A rank that does not say so may be the cause.
func TestAnalyzeGoneFirst(t *testing.T) {
	for _, running := range []bool{false, true} {
		dir := t.TempDir()
		for _, rank := range []int{0, 2} {
			ops := []op{sum(true), sum(false)}
			if rank == 2 {
				ops = ops[:1]
			}
			writeRank(t, dir, rank, 0, []string{"world"}, ops)
			file := filepath.Join(dir, fmt.Sprint("trace-", rank))
			text, err := os.ReadFile(file)
			require.NoError(t, err)
			if rank != 2 || !running {
				text = []byte(strings.ReplaceAll(string(text), `"issued":`, `"end":"rank 1 was lost","end_follows":true,"issued":`))
			}
			require.NoError(t, os.WriteFile(file, text, 0o600))
		}
		r := analyze(t, dir)
		if running {
			require.Equal(t, KindBehind, r.Kind, r.Verdict)
			require.Equal(t, []int{2}, culprits(r))
			continue
		}
		require.Equal(t, KindMissing, r.Kind, r.Verdict)
		require.Equal(t, []int{1}, culprits(r))
		require.Contains(t, r.Verdict, "No file has the operations of rank 1, and all ranks that have one ended world because of another rank, before rank 2 (PID 102 on n2) had issued collective 2 (all_reduce(8 x Float, sum))")
		require.Contains(t, r.Verdict, "says: rank 1 was lost.")
	}
}

// A rank whose recorder is off is a finding, and not a rank that is behind.
func TestAnalyzeRecorderOff(t *testing.T) {
	dir := t.TempDir()
	for rank := range 3 {
		writeRank(t, dir, rank, 0, []string{"world"}, []op{sum(false)})
	}
	file := filepath.Join(dir, "trace-1")
	text, err := os.ReadFile(file)
	require.NoError(t, err)
	var d map[string]any
	require.NoError(t, json.Unmarshal([]byte(strings.ReplaceAll(string(text), `"capacity":2000`, `"capacity":0`)), &d))
	d["entries"] = []any{}
	text, err = json.Marshal(d)
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, text, 0o600))
	r := analyze(t, dir)
	require.Equal(t, KindMissing, r.Kind)
	require.Contains(t, r.Verdict, "The operations of rank 1 (PID 101 on n1) in world are not known, and the other ranks wait in collective 1")
	require.Contains(t, r.Findings[1].Text, "The operations of rank 1 (PID 101 on n1) in world are not known")
}

// TestRankThatEndedBefore has a rank that had closed its group when it wrote its file: the others wait
// for it, or have completed everything.
func TestRankThatEndedBefore(t *testing.T) {
	for _, done := range []bool{false, true} {
		dir := t.TempDir()
		writeRank(t, dir, 0, 0, []string{"world"}, []op{sum(done)})
		writeRank(t, dir, 1, 0, nil, nil)
		writeRank(t, dir, 2, 0, []string{"world"}, []op{sum(done)})
		r := analyze(t, dir)
		require.Equal(t, KindMissing, r.Kind)
		require.Equal(t, []int{1}, culprits(r))
		require.Contains(t, r.Verdict, "Rank 1 (PID 101 on n1) ended before the other ranks: it had closed its groups when it wrote its file")
		require.Equal(t, !done, strings.Contains(r.Verdict, "they wait in collective 1"))
	}
}

// The dumps of testdata/torch were written by hand after the fields of PyTorch 2.11.
func TestAnalyzeTorch(t *testing.T) {
	r := analyze(t, "testdata/torch")
	require.Equal(t, KindBehind, r.Kind, r.Verdict)
	require.Equal(t, []int{1}, culprits(r))
	require.Contains(t, r.Verdict, "Rank 1 has not issued collective 3 (all_reduce(1024 x Float)) of default_pg")
	require.Equal(t, []string{"torch", "torch"}, []string{r.Files[0].From, r.Files[1].From})
}

// An answer of NCCL's RAS service adds findings after those of the recorders.
func TestAnalyzeService(t *testing.T) {
	dir := t.TempDir()
	answer := testhost.RASAnswer(testhost.RASRank{Host: "10.0.0.1", PID: 1}, testhost.RASRank{Host: "10.0.0.2", PID: 2, Silent: true})
	file := filepath.Join(dir, "ras.json")
	require.NoError(t, os.WriteFile(file, []byte(answer), 0o600))
	r := analyze(t, dir)
	require.Equal(t, KindService, r.Kind)
	require.Equal(t, "NCCL's RAS: rank 1 of communicator 0x5c1d8d1a3f0b2c44 (process 2 on host 10.0.0.2) does not answer.", r.Verdict)
	require.Equal(t, []File{{Name: file, From: "ras"}}, r.Files)

	writeRank(t, dir, 0, 0, []string{"pair"}, []op{on("pair", sum(true)), on("pair", sum(false))})
	writeRank(t, dir, 1, 0, []string{"pair"}, []op{on("pair", sum(true))})
	r = analyze(t, dir)
	require.Equal(t, KindBehind, r.Kind, r.Verdict)
	require.Equal(t, KindService, r.Findings[len(r.Findings)-1].Kind)

	require.NoError(t, os.WriteFile(file, []byte(answer[:len(answer)/2]), 0o600))
	r = analyze(t, file)
	require.Equal(t, KindFile, r.Kind)
	require.Contains(t, r.Verdict, "not JSON of NCCL's RAS service")
}

func TestAnalyzeBadFiles(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"empty":             {"", "the file is empty"},
		"truncated":         {`{"pg_config": {"0": {"name"`, "the file is truncated"},
		"truncated at once": {`{`, "the file is truncated"},
		"other JSON":        {`[1]`, "not a dump of a flight recorder"},
		"no groups":         {`{"entries": []}`, `it has no "pg_config"`},
		"other type":        {`{"pg_config": 7}`, `: "pg_config" is a JSON number`},
		"other field":       {`{"pg_config": {}, "entries": [{"pg_id": "x"}]}`, `entry 0: "entries.pg_id" is a JSON string`},
		"bad ranks":         {`{"pg_config": {"0": {"ranks": "all", "rank": 0}}}`, `the ranks of a group are "all"`},
		"bad rank":          {`{"pg_config": {"0": {"ranks": "[0]", "rank": 3}}}`, "rank 3 of 1 ranks"},
		"odd transfer":      {`{"entries": [{"is_p2p": true, "profiling_name": "nccl:isend"}]}`, `want "send A->B"`},
		"control":           {`{"pg_config": {"0": {"ranks": "\u001b[2J", "rank": 0}}}`, `x1b[2J`},
		"classes":           {"\x80\x02cos\nsystem\n.", "pickle"},
		"bad torch ranks":   {`{"pg_config": {"0": {"ranks": "0-7"}}}`, `the ranks of a group are "0-7": want a list`},
	} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "trace")
			require.NoError(t, os.WriteFile(file, []byte(c.text), 0o600))
			r := analyze(t, file)
			require.Equal(t, KindFile, r.Kind)
			require.Contains(t, r.Verdict, c.want)
			require.NotContains(t, r.Verdict, "\x1b")
		})
	}
	_, err := Load([]string{t.TempDir()}, nil)
	require.ErrorContains(t, err, "have no files")
	_, err = Load([]string{filepath.Join(t.TempDir(), "no")}, nil)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// A pickle has the same operations as JSON.
func TestAnalyzePickle(t *testing.T) {
	r := analyze(t, "testdata/pickle/nccl_trace_rank_0", "testdata/torch/nccl_trace_rank_1")
	require.Equal(t, KindBehind, r.Kind, r.Verdict)
	require.Equal(t, []int{1}, culprits(r))
}

// The decoder refuses lists and values without end instead of using all memory.
func TestAnalyzeLimits(t *testing.T) {
	_, err := decode(repeated(`{"a": "`))
	require.ErrorContains(t, err, "the value at byte 4 has more than 16777216 bytes")
	entry := `{"pg_id": 1, "x": "` + strings.Repeat("x", 1<<20) + `"},`
	d, err := decode(strings.NewReader(`{"pg_config": {}, "entries": [` + strings.Repeat(entry, 20) + `{}]}`))
	require.NoError(t, err, "the limit is for one entry")
	require.Len(t, d.entries, 21)
}

// TestAnalyzeMemory: the memory for a dump is proportional to the file, also if the file is compressed, or if its values share others.
func TestAnalyzeMemory(t *testing.T) {
	_, err := decode(strings.NewReader(`{"pg_config": {}, "entries": [` + strings.Repeat("{},", 1<<18) + `{}]}`))
	require.ErrorContains(t, err, "no recorder writes entries of so few bytes")

	var packed bytes.Buffer
	z, err := gzip.NewWriterLevel(&packed, gzip.BestSpeed)
	require.NoError(t, err)
	_, err = io.Copy(z, strings.NewReader(`{"pg_config": {}, "entries": [`+strings.Repeat(`{"pg_id": 1, "x": "`+strings.Repeat("x", 1<<20)+`"},`, 300)+`{}]}`))
	require.NoError(t, err)
	require.NoError(t, z.Close())
	_, err = decode(&packed)
	require.ErrorContains(t, err, "if you trust the file, decompress it first")
	packed.Reset()
	z.Reset(&packed)
	_, err = io.Copy(z, strings.NewReader(`{"pg_config": {}, "entries": [`+strings.Repeat(`{"pg_id": 1, "x": "`+strings.Repeat("x", 64)+`"},`, 1<<18)+`{}]}`))
	require.NoError(t, err)
	require.NoError(t, z.Close())
	_, err = decode(&packed)
	require.ErrorContains(t, err, "compressed bytes: if you trust the file, decompress it first")

	text := func(s string) string { return "X" + string(binary.LittleEndian.AppendUint32(nil, uint32(len(s)))) + s }
	pickle := func(key string) string {
		return "\x80\x02}(" + text("pg_config") + "}" + text("entries") + "(}(" + key + text(strings.Repeat("n", 1<<20)) + "uq\x00" + strings.Repeat("h\x00", 4000) + "lu."
	}
	_, err = decode(strings.NewReader(pickle(text("profiling_name"))))
	require.ErrorContains(t, err, "because values share them")

	// PyTorch's entries share frames, and names of C++ functions are long.
	shared := "\x80\x02}(" + text("pg_config") + "}" + text("entries") + "(}(" + text("frames") + "(}(" + text("name") + text(strings.Repeat("n", 500)) + "uq\x00lq\x01u" +
		strings.Repeat("}("+text("frames")+"("+strings.Repeat("h\x00", 100)+"lu", 3000) + "lu."
	d, err := decode(strings.NewReader(shared))
	require.NoError(t, err)
	require.Len(t, d.entries, 3001)

	pairs := "K\x01q\x00" // twice as many values at each level
	for i := range 60 {
		pairs += fmt.Sprintf("h%c\x86q%c", i, i+1)
	}
	d, err = decode(strings.NewReader("\x80\x02}(" + text("pg_config") + "}(" + text("0") + "}(" + pairs + "Nuu" + text("entries") + "]u."))
	require.NoError(t, err, "a key that is not a text is ignored")
	require.Len(t, d.config, 1)

	wide := "(NNNNNNNNNNNNNNNNtq\x00"
	for i := range 6 {
		wide += "(" + strings.Repeat(fmt.Sprintf("h%c", i), 16) + fmt.Sprintf("tq%c", i+1)
	}
	_, err = decode(strings.NewReader("\x80\x02}(" + text("a") + "(" + wide + "l" + text("entries") + "(}(" + text("a") + "h\x06ulu."))
	require.ErrorContains(t, err, "the pickle has more than 1")
}

// An endless is a text and then blanks without end.
type endless struct{ s string }

func repeated(s string) *endless { return &endless{s} }

func (r *endless) Read(b []byte) (int, error) {
	if r.s != "" {
		n := copy(b, r.s)
		r.s = r.s[n:]
		return n, nil
	}
	for i := range b {
		b[i] = ' '
	}
	return len(b), nil
}

// The rank of a dump of PyTorch is behind "rank_" in its name, and two files of one rank are named.
func TestAnalyzeNamesOfTorchFiles(t *testing.T) {
	dump := func(dir, name, rank string) string {
		text, err := os.ReadFile(filepath.Join("testdata/torch", "nccl_trace_rank_"+rank))
		require.NoError(t, err)
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, text, 0o600))
		return path
	}
	want := analyze(t, "testdata/torch/nccl_trace_rank_0", "testdata/torch/nccl_trace_rank_1")
	for _, names := range [][2]string{{"nccl_trace_rank_0.1", "nccl_trace_rank_1.1"}, {"rank_0_attempt_1", "rank_1_attempt_1"}} {
		dir := t.TempDir()
		r := analyze(t, dump(dir, names[0], "0"), dump(dir, names[1], "1"))
		require.Equal(t, want.Verdict, r.Verdict, names)
	}
	dir := t.TempDir()
	dump(dir, "nccl_trace_rank_0", "0")
	dump(dir, "nccl_trace_rank_0.copy", "0")
	dump(dir, "nccl_trace_rank_1", "1")
	r := analyze(t, dir)
	require.Equal(t, KindTwice, r.Kind, r.Verdict)
	require.Contains(t, r.Verdict, "nccl_trace_rank_0 and ")
	require.Contains(t, r.Verdict, "nccl_trace_rank_0.copy are of the same rank")
	other := t.TempDir()
	dump(other, "nccl_trace_rank_7", "0")
	require.Contains(t, analyze(t, other).Files[0].Error, "it is of another rank or of another job")
}

// A compressed dump is read.
func TestAnalyzeGzip(t *testing.T) {
	dir, packed := t.TempDir(), t.TempDir()
	for rank := range 3 {
		writeRank(t, dir, rank, 0, []string{"world"}, []op{sum(rank != 1)})
		name := fmt.Sprint("trace-", rank)
		text, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		var b bytes.Buffer
		z := gzip.NewWriter(&b)
		_, err = z.Write(text)
		require.NoError(t, err)
		require.NoError(t, z.Close())
		require.NoError(t, os.WriteFile(filepath.Join(packed, name+".gz"), b.Bytes(), 0o600))
	}
	require.Equal(t, analyze(t, dir).Verdict, analyze(t, packed).Verdict)
}

// Sizes whose product does not fit are an error, not a small number.
func TestAnalyzeSizesThatOverflow(t *testing.T) {
	require.EqualValues(t, -1, elements([][]int64{{1 << 32, 1 << 32}}))
	require.EqualValues(t, -1, elements([][]int64{{1 << 62}, {1 << 62}}))
	require.EqualValues(t, -1, elements([][]int64{{-1}}))
	require.EqualValues(t, 0, elements([][]int64{{0, 1 << 62, 1 << 62}}))
	require.EqualValues(t, 14, elements([][]int64{{3, 4}, {2}}))
	var r rawEntry
	r.InputSizes = [][]int64{{1 << 32, 1 << 32}}
	_, err := r.entry(texts{})
	require.ErrorContains(t, err, "have more than 9223372036854775807 elements")
}

// The recorders have no launches of graphs, only how many collectives these had. A rank that has launched less is named if no
// operation explains more, and never said to be certain. A report does not say that no rank waits while launches may.
func TestLaunchesOfGraphs(t *testing.T) {
	for name, c := range map[string]struct {
		launched [3]uint64
		waits    []int // the ranks whose launches are not known to have ended
		ops      map[int][]op
		kind     string
		culprits []int
		texts    []string
	}{
		"a rank is behind": {[3]uint64{12, 9, 12}, []int{0, 2}, nil, KindBehind, []int{1},
			[]string{"Rank 0 (PID 100 on n0) has launched 12 collectives of world in graphs", "rank 1 (PID 101 on n1) has launched 9"}},
		"two are":         {[3]uint64{9, 12, 11}, []int{1}, nil, KindBehind, []int{0, 2}, []string{"rank 0 (PID 100 on n0) has launched 9, rank 2 (PID 102 on n2) has launched 11"}},
		"all have ended":  {[3]uint64{12, 9, 12}, nil, nil, KindNone, nil, []string{"none of them waits for another."}},
		"all are as far":  {[3]uint64{12, 12, 12}, []int{2}, nil, KindNone, nil, []string{"But launches of graphs or one-sided operations of rank 2 (PID 102 on n2) in world are not known to have ended"}},
		"an operation is": {[3]uint64{12, 9, 12}, []int{0, 2}, map[int][]op{0: {sum(false)}, 1: {sum(false)}, 2: {}}, KindBehind, []int{2}, []string{"has not issued collective 1"}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			for rank := range 3 {
				writeRank(t, dir, rank, 0, []string{"world"}, c.ops[rank])
				file := filepath.Join(dir, fmt.Sprint("trace-", rank))
				text, err := os.ReadFile(file)
				require.NoError(t, err)
				more := fmt.Sprintf(`"launched":%d,"launches":%v,"capacity":2000`, c.launched[rank], slices.Contains(c.waits, rank))
				require.NoError(t, os.WriteFile(file, bytes.Replace(text, []byte(`"capacity":2000`), []byte(more), 1), 0o600))
			}
			r := analyze(t, dir)
			require.Equal(t, c.kind, r.Kind, r.Verdict)
			require.ElementsMatch(t, c.culprits, culprits(r), r.Verdict)
			for _, want := range c.texts {
				require.Contains(t, r.Verdict, want)
			}
			require.Equal(t, r.Kind == KindBehind && c.ops == nil, r.Sure == Likely)
		})
	}
}
