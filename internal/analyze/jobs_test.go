package analyze

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
)

// A torchJob writes dumps with PyTorch's fields. Of each rank's operations it has the names, by group.
type torchJob struct {
	groups [][]int // by number; the first is the world
	ops    map[int][]torchOp
}

type torchOp struct {
	group int
	name  string // such as all_reduce, or "send 0->1"
	n     int
	done  bool
}

func (j *torchJob) dump(t *testing.T, rank int) []byte {
	t.Helper()
	config, entries := map[string]any{}, []any{}
	for id, ranks := range j.groups {
		text, err := json.Marshal(ranks)
		require.NoError(t, err)
		config[fmt.Sprint(id)] = map[string]any{"name": fmt.Sprint(id), "desc": map[bool]string{true: "default_pg", false: "undefined"}[id == 0], "ranks": string(text)}
	}
	seq := map[int]int{}
	for i, o := range j.ops[rank] {
		transfer := strings.Contains(o.name, " ")
		if !transfer && o.name != "coalesced" {
			seq[o.group]++
		}
		state := "scheduled"
		if o.done {
			state = "completed"
		}
		entries = append(entries, map[string]any{"record_id": i, "pg_id": o.group, "process_group": []string{fmt.Sprint(o.group), "undefined"},
			"collective_seq_id": seq[o.group], "is_p2p": transfer, "profiling_name": "nccl:" + o.name, "time_created_ns": 1e18 + i, "input_sizes": [][]int{{o.n}},
			"output_sizes": [][]int{{o.n}}, "input_dtypes": []string{"Float"}, "output_dtypes": []string{"Float"}, "state": state, "frames": []any{}})
	}
	b, err := json.Marshal(map[string]any{"version": "2.11", "pg_config": config, "entries": entries})
	require.NoError(t, err)
	return b
}

// skipping is a job of n ranks in which one rank omits the last collective.
func skipping(n, guilty int) *torchJob {
	j := &torchJob{groups: [][]int{nil}, ops: map[int][]torchOp{}}
	for rank := range n {
		j.groups[0] = append(j.groups[0], rank)
		j.ops[rank] = []torchOp{{0, "all_reduce", 8, true}, {0, "all_reduce", 16, false}}
	}
	j.ops[guilty] = j.ops[guilty][:1]
	return j
}

func put(t *testing.T, path string, b []byte) string {
	t.Helper()
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o700))
	require.NoError(t, os.WriteFile(path, b, 0o600))
	return path
}

func packed(t *testing.T, b []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z, err := zstd.NewWriter(&out)
	require.NoError(t, err)
	_, err = z.Write(b)
	require.NoError(t, err)
	require.NoError(t, z.Close())
	return out.Bytes()
}

// Dumps under any name have their rank from a pattern, from transfers, or by elimination; else the file is named.
func TestRanksOfAnyNames(t *testing.T) {
	j := skipping(3, 2)
	dir := t.TempDir()
	for rank, name := range []string{"nodeA/r0x.bin.zst", "nodeA/r1x.bin", "nodeB/r2x.bin"} {
		b := j.dump(t, rank)
		if strings.HasSuffix(name, ".zst") {
			b = packed(t, b)
		}
		put(t, filepath.Join(dir, name), b)
	}
	files := []string{filepath.Join(dir, "nodeA"), filepath.Join(dir, "nodeB")}
	loaded, err := Load(files, regexp.MustCompile(`r([0-9]+)x\.bin`))
	require.NoError(t, err)
	r := loaded.Analyze()
	require.Equal(t, KindBehind, r.Kind, r.Verdict)
	require.Equal(t, []int{2}, culprits(r))
	require.Equal(t, Likely, r.Sure)

	r = analyze(t, files...)
	require.Equal(t, KindBehind, r.Kind, r.Verdict)
	require.Contains(t, r.Verdict, "The rank of r2x.bin has not issued collective 2 (all_reduce(16 x Float)) of default_pg, and other ranks, such as the rank of r0x.bin.zst")
	require.Nil(t, r.Culprits[0].World)
	require.Contains(t, strings.Join(r.Doubts, " "), "the ranks of some files are not known, neither by their names nor by their contents")
	r = analyze(t, filepath.Join(dir, "nodeA"))
	require.Equal(t, KindMissing, r.Kind, r.Verdict)
	require.Contains(t, r.Verdict, "No file has the operations of a rank without a file")

	for _, rank := range []int{0, 1} { // the third is the only one left
		j.ops[rank] = append([]torchOp{{0, fmt.Sprintf("send %d->%d", rank, 2), 4, true}}, j.ops[rank]...)
	}
	other := t.TempDir()
	for rank, name := range []string{"x", "y", "z"} {
		put(t, filepath.Join(other, name), j.dump(t, rank))
	}
	r = analyze(t, other)
	require.Contains(t, r.Verdict, "Rank 2 has not issued")
	require.Equal(t, []int{2}, culprits(r))
	require.Contains(t, strings.Join(r.Doubts, " "), "the files of rank 2 have ranks because no other file has them")

	_, err = Load([]string{other}, regexp.MustCompile(`z(x*)`))
	require.NoError(t, err)
	bad, err := Load([]string{other}, regexp.MustCompile(`q([0-9])`))
	require.NoError(t, err)
	require.Contains(t, bad.Analyze().Verdict, `the pattern "q([0-9])" of the flag --rank-pattern does not match the file's path`)
}

// Two jobs of PyTorch in one folder, whose groups have the same names, are told apart by the names of their files.
func TestTorchJobsInOneFolder(t *testing.T) {
	dir := t.TempDir()
	a, b := skipping(2, 0), skipping(4, 3)
	for rank := range 2 {
		put(t, filepath.Join(dir, fmt.Sprint("a_rank_", rank)), a.dump(t, rank))
	}
	for rank := range 4 {
		put(t, filepath.Join(dir, fmt.Sprint("b_rank_", rank)), b.dump(t, rank))
	}
	r := analyze(t, dir)
	require.Len(t, r.Jobs, 2, "%s", r.Verdict)
	require.Equal(t, []string{filepath.Join(dir, "a_rank"), filepath.Join(dir, "b_rank")}, []string{r.Jobs[0].Job, r.Jobs[1].Job})
	require.Equal(t, []int{0}, culprits(r.Jobs[0]))
	require.Equal(t, []int{3}, culprits(r.Jobs[1]))
	for _, f := range r.Findings {
		require.NotEmpty(t, f.Job)
	}
}

// PyTorch's entry for a coalesced call has the number of the last collective. It is no collective, and tells the state of the
// sends and receives before it.
func TestCoalescedTransfers(t *testing.T) {
	j := &torchJob{groups: [][]int{{0, 1, 2}}, ops: map[int][]torchOp{}}
	for rank := range 3 {
		j.ops[rank] = []torchOp{{0, "all_reduce", 8, true}}
	}
	j.ops[0] = append(j.ops[0], torchOp{0, "send 0->1", 4, false}, torchOp{0, "coalesced", 0, true})
	j.ops[1] = append(j.ops[1], torchOp{0, "recv 1<-0", 4, false}, torchOp{0, "coalesced", 0, true})
	dir := t.TempDir()
	for rank := range 3 {
		put(t, filepath.Join(dir, fmt.Sprint("rank_", rank)), j.dump(t, rank))
	}
	r := analyze(t, dir)
	require.Equal(t, KindNone, r.Kind, r.Verdict)
}
