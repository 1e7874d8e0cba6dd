package results

import (
	"bytes"
	"encoding/csv"
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/perf"
)

// made is a report of two operations on two GPUs.
func made() *perf.Report {
	zero := int64(0)
	measure := func(us, bus float64) *perf.Measure {
		return &perf.Measure{Time: us, AlgBW: bus, BusBW: bus, P50: us, P99: us * 1.5, Wrong: &zero}
	}
	r := &perf.Report{
		Form: perf.Form, Host: "node", Backend: "cuda", Device: "NVIDIA H200", NCCL: "2.28.3", Ranks: 2, Locals: 2, Link: 450,
		Plan: &perf.Plan{Iterations: 20, Checks: 1},
		Rows: []*perf.Row{
			{Operation: "all_reduce", Bytes: 1 << 10, Count: 256, Type: "float", Reduction: "sum", Root: -1, OutOfPlace: measure(10, 0.1), InPlace: measure(9, 0.11)},
			{Operation: "all_reduce", Bytes: 256 << 20, Count: 64 << 20, Type: "float", Reduction: "sum", Root: -1, OutOfPlace: measure(900, 290), InPlace: measure(890, 300)},
			{Operation: "alltoall", Bytes: 256 << 20, Count: 64 << 20, Type: "float", Reduction: "none", Root: -1, OutOfPlace: measure(500, 270), InPlace: nil},
		},
	}
	r.AvgBusBW = (0.1 + 0.11 + 290 + 300 + 270) / 5
	r.SetLink(450)
	return r
}

func TestFormats(t *testing.T) {
	r := made()
	var b bytes.Buffer
	require.NoError(t, WriteJSON(r, &b))
	back, err := Read(bytes.NewReader(b.Bytes()))
	require.NoError(t, err)
	require.Equal(t, r, back)
	var tree map[string]any
	require.NoError(t, json.Unmarshal(b.Bytes(), &tree))
	first := tree["results"].([]any)[0].(map[string]any)
	require.Equal(t, 10.0, first["out_of_place"].(map[string]any)["time"])
	require.Equal(t, 0.0, first["in_place"].(map[string]any)["nwrong"])

	b.Reset()
	require.NoError(t, WriteCSV(r, &b))
	lines, err := csv.NewReader(&b).ReadAll()
	require.NoError(t, err)
	require.Len(t, lines, 1+5)
	require.Equal(t, []string{"alltoall", "2", "268435456", "67108864", "float", "none", "-1", "false", "500", "270", "270", "500", "750", "0", "", "false"}, lines[5])

	b.Reset()
	require.NoError(t, WriteBench(r, &b))
	require.Contains(t, b.String(), "BenchmarkAllReduce/type=float/redop=sum/inplace/bytes=268435456-2\t20\t890000.0 ns/op\t300.000 algbw-GB/s")

	b.Reset()
	table := NewTable(&b, r.Link)
	for _, row := range r.Rows {
		require.NoError(t, table.Row(row))
	}
	require.NoError(t, WriteEnd(r, &b))
	require.Contains(t, b.String(), "   268435456     67108864    float    sum     -1  900.00  290.00  290.00      0  890.00  300.00  300.00      0")
	require.Contains(t, b.String(), "890.00   1335.0    66.7\n", "the link's part")
	require.Contains(t, b.String(), "# Out of bounds values : 0 OK\n")
	require.Equal(t, 2, strings.Count(b.String(), "out-of-place                       in-place"), "one head for each operation")

	b.Reset()
	r.Host = `<script>"`
	require.NoError(t, WriteHTML(r, &b))
	require.NotContains(t, b.String(), `<script>"`)
	require.Equal(t, 3, strings.Count(b.String(), "<svg "))
	require.Equal(t, 3*5, strings.Count(b.String(), "<circle "), "five values in each chart")
	require.Contains(t, b.String(), "<title>all-reduce, sum, in place, 256 MiB: 300 GB/s</title>")
	require.Contains(t, b.String(), ">Bus bandwidth: float</text>", "all curves share the type")
	for _, name := range []string{"all-reduce, sum, out of place", "all-reduce, sum, in place", "alltoall, out of place"} {
		require.Equal(t, 3, strings.Count(b.String(), ">"+name+"</text>"), name)
	}
	for _, far := range []string{"http:", "https:", "src=", "@import"} {
		require.NotContains(t, b.String(), far, "the page needs no network")
	}
}

// A logarithmic axis has no place for some values. A chart without values is omitted.
func TestChartValues(t *testing.T) {
	r := made()
	r.Rows[0].OutOfPlace.BusBW, r.Rows[1].InPlace.BusBW, r.Rows[2].OutOfPlace.BusBW = math.Inf(1), 0, math.NaN()
	of := func(m *perf.Measure) float64 { return m.BusBW }
	c := chartOf(r, "title", "GB/s", of)
	require.Len(t, c.Series, 2)
	require.Equal(t, "title: all-reduce, float, sum", c.Title)
	require.Equal(t, []string{"in place", "out of place"}, []string{c.Series[0].Name, c.Series[1].Name})
	require.Contains(t, c.SVG(), "<title>out of place, 256 MiB: 290 GB/s</title>")
	require.Nil(t, chartOf(&perf.Report{Rows: r.Rows[2:]}, "title", "GB/s", of))
	require.Empty(t, charts(&perf.Report{}))
}

func TestBaseline(t *testing.T) {
	base, now := made(), made()
	now.Rows[1].InPlace.Time *= 1.3
	now.Rows[0].InPlace.Time *= 0.7
	now.Rows = now.Rows[:2]
	both, missing, err := Compare(now, base)
	require.NoError(t, err)
	require.Len(t, both, 4)
	require.Equal(t, []string{"Alltoall/type=float/bytes=268435456"}, missing)
	var b strings.Builder
	slower, err := WriteChanges(&b, both, missing, 0.1)
	require.NoError(t, err)
	require.Equal(t, 1, slower)
	require.Contains(t, b.String(), "2 rows equal within 10 %, 1 faster, 1 slower, 1 not measured now")
	require.Contains(t, b.String(), "slower: AllReduce/type=float/redop=sum/inplace/bytes=268435456: 1157.0 us, was 890.00 (1.30 times)")

	now.Ranks = 8
	_, _, err = Compare(now, base)
	require.ErrorContains(t, err, "ranks 2 in the baseline, 8 here")
	now = made()
	now.Plan.Launches = 3
	_, _, err = Compare(now, base)
	require.ErrorContains(t, err, "has other settings for graphs")
	now = made()
	now.Plan.Register = 1
	_, _, err = Compare(now, base)
	require.ErrorContains(t, err, "has other settings for graphs")
	now = made()
	now.Rows = nil
	_, _, err = Compare(now, base)
	require.ErrorContains(t, err, "none of the rows")

	for text, want := range map[string]string{
		"":            "not a report",
		"[]":          "not a report",
		`{"form":99}`: "format 99",
		`{"form":1,"results":[{"operation":"all_reduce"}]}`:                                  "result 1",
		`{"form":1,"results":[{"operation":"all_reduce","out_of_place":{"time":0}}]}`:        "has the time 0",
		`{"form":1,"results":[{"operation":"all_reduce","out_of_place":{"time":-1}}, null]}`: "has the time -1",
	} {
		_, err := Read(strings.NewReader(text))
		require.ErrorContains(t, err, want, text)
	}
}

// A matrix has a line for each rank.
func TestWritePairs(t *testing.T) {
	m := &perf.Pairs{Bytes: 1 << 12, Bandwidth: [][]float64{{0, 100, 70}, {101, 0, 99}, {100, 98, 0}}, Latency: [][]float64{{0, 1, 2}, {1, 0, 3}, {2, 3, 0}}}
	var b strings.Builder
	require.NoError(t, WritePairs(m, &b))
	require.Equal(t, 2*4, strings.Count(b.String(), "\n")-3)
}

// Marks compare a time with that of the chosen strategy of the same size.
func TestMarksAreOfOneSize(t *testing.T) {
	row := func(bytes int, s comm.Strategy, us float64, chosen bool) *perf.Row {
		return &perf.Row{Operation: "all_reduce", Type: "float", Reduction: "sum", Root: -1, Bytes: bytes,
			OutOfPlace: &perf.Measure{Time: us}, Strategy: string(s), Chosen: chosen}
	}
	r := &perf.Report{Rows: []*perf.Row{
		row(8, comm.NCCLOnly, 10, false), row(8, comm.OwnKernels, 5, true), row(8, comm.Windows, 4, false),
		row(16, comm.NCCLOnly, 3, true), row(16, comm.OwnKernels, 4, false), row(16, comm.Windows, 2, false),
		row(32, comm.NCCLOnly, 9, false), row(32, comm.Windows, 8, true),
	}}
	var text bytes.Buffer
	require.NoError(t, WriteStrategies(r, &text))
	var lines [][]string
	for line := range strings.Lines(text.String()) {
		if f := strings.Fields(line); len(f) > 0 && f[0] != "#" {
			lines = append(lines, f)
		}
	}
	require.Equal(t, [][]string{
		{"8", "10.00", "5.00*", "4.00<"},
		{"16", "3.00*", "4.00", "2.00<"},
		{"32", "9.00", "-", "8.00*"},
	}, lines, text.String())
}
