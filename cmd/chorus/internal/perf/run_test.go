package perf

import (
	"bytes"
	"context"
	"encoding/csv"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

func group(t *testing.T, devs []*device.Device) *comm.Group {
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

// smallPlan is every operation with one small size.
func smallPlan() *Plan {
	return &Plan{
		Operations: Operations, DTypes: []memory.DType{memory.Float32}, Reductions: []Reduction{Sum},
		Sizes: Sizes{Min: 1 << 12, Max: 1 << 12}, Iterations: 2, Checks: 2,
	}
}

// Every operation moves what it should, in and out of place, with one rank and with
// several, as single launches, in graphs, and registered.
func TestOperationsAreRight(t *testing.T) {
	turns := testgpu.TurnsRaced(t, 4)
	for _, n := range []int{1, 2, 3, 4} {
		testgpu.Each(t, n, func(t *testing.T, devs []*device.Device) {
			g := group(t, devs[:n])
			p := smallPlan()
			p.Root = AllRoots
			if n == 3 {
				p.Operations = Operations[:len(Operations)-1] // no hypercube
			}
			for i, how := range []struct {
				launches int
				reg      Registration
			}{{}, {2, Unregistered}, {0, Registered}, {2, Windows}} {
				if !turns(n, i) {
					continue
				}
				p.Launches, p.Register = how.launches, how.reg
				seen := 0
				r, err := Run(testgpu.Context(t), g, p, func(*Row) { seen++ })
				require.NoError(t, err)
				require.Len(t, r.Rows, seen)
				rooted := 0
				for _, row := range r.Rows {
					for i, m := range row.Sides() {
						require.Zero(t, *m.Wrong, "%s, place %d", row.Operation, i)
						require.Positive(t, m.Time, row.Operation)
						require.GreaterOrEqual(t, m.P99, m.P50)
					}
					if row.Operation == "broadcast" {
						require.Equal(t, rooted, row.Root)
						rooted++
					}
				}
				require.Equal(t, n, rooted)
				require.Zero(t, r.Wrong)
			}
		})
	}
}

// Every element type with every reduction.
func TestReductionsAreRight(t *testing.T) {
	turns := testgpu.TurnsRaced(t, 3)
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		p := smallPlan()
		p.Operations = nil
		for i, o := range []*Operation{Operations[0], Operations[2], Operations[4]} {
			if turns(0, i) {
				p.Operations = append(p.Operations, o)
			}
		}
		p.DTypes, p.Reductions = nil, nil
		p.DTypes = append(p.DTypes, dtypes...)
		for op := Sum; op <= MulSum; op++ {
			p.Reductions = append(p.Reductions, op)
		}
		p.Iterations = 1
		r, err := Run(testgpu.Context(t), group(t, devs[:3]), p, nil)
		require.NoError(t, err)
		require.Len(t, r.Rows, len(p.Operations)*len(dtypes)*6)
		for _, row := range r.Rows {
			for _, m := range row.Sides() {
				require.Zero(t, *m.Wrong, "%s %s %s", row.Operation, row.Type, row.Reduction)
			}
		}
	})
}

// nccl-tests' counts and factors for 1 MiB of floats on 8 ranks.
func TestLayouts(t *testing.T) {
	const n, all = 8, 1 << 18
	for name, want := range map[string]struct {
		l      layout
		factor float64
	}{
		"all_reduce":     {layout{all, all, all, all}, 1.75},
		"all_gather":     {layout{all / n, all, all / n, all}, 0.875},
		"reduce_scatter": {layout{all, all / n, all / n, all}, 0.875},
		"broadcast":      {layout{all, all, all, all}, 1},
		"reduce":         {layout{all, all, all, all}, 1},
		"alltoall":       {layout{all, all, all / n, all}, 0.875},
		"gather":         {layout{all / n, all, all / n, all}, 0.875},
		"scatter":        {layout{all, all / n, all / n, all}, 0.875},
		"sendrecv":       {layout{all, all, all, all}, 1},
		"hypercube":      {layout{all / n, all, all / n, all / n * 7}, 1},
	} {
		o, err := Find(name + "_perf")
		require.NoError(t, err)
		require.Equal(t, want.l, o.layout(all, n, 4), name)
		require.InDelta(t, want.factor, o.factor(n), 1e-12, name)
	}
	require.Equal(t, 4, chunk(35, 8, 4), "a multiple of 16 bytes")
	for _, n := range []int{2, 3, 5, 8} {
		for from := range n {
			out, in := counts(101, n, from)
			require.Equal(t, 101*n, sumInts(out))
			require.Equal(t, 101*n, sumInts(in))
			require.NotEqual(t, slices.Min(out), slices.Max(out), "the parts differ")
		}
	}
}

func sumInts(x []int) (n int) {
	for _, v := range x {
		n += v
	}
	return n
}

func TestSizes(t *testing.T) {
	for text, want := range map[string]int{"8": 8, "8B": 8, "64K": 1 << 16, "1m": 1 << 20, "1.5G": 3 << 29, "2MiB": 2 << 20, "1T": 1 << 40} {
		n, err := ParseBytes(text)
		require.NoError(t, err, text)
		require.Equal(t, want, n, text)
	}
	for _, text := range []string{"", "K", "-1", "1X", "1e30", "9999999T", "nan"} {
		_, err := ParseBytes(text)
		require.ErrorContains(t, err, "is not a size", text)
	}
	list := func(s Sizes) []int {
		l, err := s.list()
		require.NoError(t, err)
		return l
	}
	require.Equal(t, []int{8, 16, 32}, list(Sizes{Min: 8, Max: 40, Factor: 2, Step: 1}))
	require.Equal(t, []int{8, 18, 28}, list(Sizes{Min: 8, Max: 30, Step: 10}))
	require.Equal(t, []int{8}, list(Sizes{Min: 8, Max: 8}))
	for _, s := range []Sizes{{Min: 0, Max: 1}, {Min: 9, Max: 8}, {Min: 1, Max: 2}, {Min: 1, Max: 2, Factor: 1}, {Min: 1, Max: 2, Step: -1}} {
		_, err := s.list()
		require.Error(t, err, "%+v", s)
	}
}

func TestBadPlans(t *testing.T) {
	for want, change := range map[string]func(*Plan){
		"want at least one operation":         func(p *Plan) { p.Operations = nil },
		"want 1 iteration":                    func(p *Plan) { p.Iterations = 0 },
		"want a rank from 0 to 2":             func(p *Plan) { p.Root = 3 },
		"want a power of two":                 func(p *Plan) {},
		"registration 3":                      func(p *Plan) { p.Register = 3 },
		"less than one element for each of 3": func(p *Plan) { p.Sizes, p.Operations = Sizes{Min: 4, Max: 4}, Operations[1:2] },
		"want a step or a factor":             func(p *Plan) { p.Sizes = Sizes{Min: 1, Max: 2} },
	} {
		p := smallPlan()
		change(p)
		require.ErrorContains(t, p.Check(3), want)
	}
}

// A rank that fails ends the others' waits, and its error is the one that is told.
func TestFailureOfOneRank(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: "cuLaunchKernel#9=CUDA_ERROR_OUT_OF_MEMORY"})
	p := smallPlan()
	p.Operations = Operations[:3]
	_, err := Run(testgpu.Context(t), group(t, devs), p, nil)
	require.ErrorContains(t, err, "OUT_OF_MEMORY")
}

func TestContextEndsARun(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx, cancel := context.WithCancel(testgpu.Context(t))
		p := smallPlan()
		p.Iterations = 1
		_, err := Run(ctx, group(t, devs[:2]), p, func(*Row) { cancel() })
		require.ErrorIs(t, err, context.Canceled)
	})
}

func TestPairs(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		g := group(t, devs[:3])
		r, err := MeasurePairs(testgpu.Context(t), g, &PairPlan{Bytes: 1 << 12, Iterations: 2})
		require.NoError(t, err)
		for a := range 3 {
			for b := range 3 {
				if a != b {
					require.Positive(t, r.Pairs.Bandwidth[a][b])
					require.Positive(t, r.Pairs.Latency[a][b])
				}
			}
		}
		require.Equal(t, r.Pairs.Latency[0][2], r.Pairs.Latency[2][0])
		var b strings.Builder
		require.NoError(t, r.Pairs.WriteText(&b))
		require.Equal(t, 2*4, strings.Count(b.String(), "\n")-3)
	})
	m := &Pairs{Bandwidth: [][]float64{{0, 100, 70}, {101, 0, 99}, {100, 98, 0}}}
	require.Equal(t, [][2]int{{0, 2}}, m.Slow())
	require.Contains(t, m.judge().Reason, "0→2 (70.0 GB/s)")
}

// made is a report of two operations on two GPUs.
func made() *Report {
	zero := int64(0)
	measure := func(us, bus float64) *Measure {
		return &Measure{Time: us, AlgBW: bus, BusBW: bus, P50: us, P99: us * 1.5, Wrong: &zero}
	}
	r := &Report{
		Form: form, Host: "node", Backend: "cuda", Device: "NVIDIA H200", NCCL: "2.28.3", Ranks: 2, Locals: 2, Link: 450,
		Plan: &Summary{Iterations: 20, Checks: 1},
		Rows: []*Row{
			{Operation: "all_reduce", Bytes: 1 << 10, Count: 256, Type: "float", Reduction: "sum", Root: -1, OutOfPlace: measure(10, 0.1), InPlace: measure(9, 0.11)},
			{Operation: "all_reduce", Bytes: 256 << 20, Count: 64 << 20, Type: "float", Reduction: "sum", Root: -1, OutOfPlace: measure(900, 290), InPlace: measure(890, 300)},
			{Operation: "alltoall", Bytes: 256 << 20, Count: 64 << 20, Type: "float", Reduction: "none", Root: -1, OutOfPlace: measure(500, 270), InPlace: nil},
		},
	}
	r.sumUp()
	return r
}

func TestVerdict(t *testing.T) {
	r := made()
	require.Equal(t, &Verdict{true, "all_reduce reaches 300 GB/s, 67 % of the link's 450, as expected"}, r.Verdict)
	require.InDelta(t, (0.1+0.11+290+300+270)/5, r.AvgBusBW, 1e-9)
	r.Rows[2].OutOfPlace.BusBW = 100
	require.False(t, r.judge().OK)
	require.Contains(t, r.judge().Reason, "alltoall reaches only 100 GB/s, expected 225")
	r.SetLink(150)
	require.True(t, r.Verdict.OK)
	*r.Rows[0].OutOfPlace.Wrong = 3
	r.Wrong = 0
	r.sumUp()
	require.False(t, r.Verdict.OK)
	require.Contains(t, r.Verdict.Reason, "elements are wrong")
	r = made()
	r.Ranks = 1
	require.False(t, r.judge().OK, "one rank is no success")
	require.Equal(t, 450.0, LinkOf("NVIDIA H200"))
	require.Equal(t, 450.0, LinkOf("NVIDIA H100 80GB HBM3"))
	require.Zero(t, LinkOf("NVIDIA H100 PCIe"))
	require.Zero(t, LinkOf("Chorus Virtual Device"))
}

func TestFormats(t *testing.T) {
	r := made()
	var b bytes.Buffer
	require.NoError(t, r.WriteJSON(&b))
	back, err := ReadReport(bytes.NewReader(b.Bytes()))
	require.NoError(t, err)
	require.Equal(t, r, back)
	var tree map[string]any
	require.NoError(t, json.Unmarshal(b.Bytes(), &tree))
	first := tree["results"].([]any)[0].(map[string]any)
	require.Equal(t, 10.0, first["out_of_place"].(map[string]any)["time"])
	require.Equal(t, 0.0, first["in_place"].(map[string]any)["nwrong"])

	b.Reset()
	require.NoError(t, r.WriteCSV(&b))
	lines, err := csv.NewReader(&b).ReadAll()
	require.NoError(t, err)
	require.Len(t, lines, 1+5)
	require.Equal(t, []string{"alltoall", "2", "268435456", "67108864", "float", "none", "-1", "false", "500", "270", "270", "500", "750", "0", "", "false"}, lines[5])

	b.Reset()
	require.NoError(t, r.WriteBench(&b))
	require.Contains(t, b.String(), "BenchmarkAllReduce/type=float/redop=sum/inplace/bytes=268435456-2\t20\t890000.0 ns/op\t300.000 algbw-GB/s")

	b.Reset()
	table := NewTable(&b, r.Link)
	for _, row := range r.Rows {
		require.NoError(t, table.Row(row))
	}
	require.NoError(t, r.WriteEnd(&b))
	require.Contains(t, b.String(), "   268435456     67108864    float    sum     -1  900.00  290.00  290.00      0  890.00  300.00  300.00      0")
	require.Contains(t, b.String(), "890.00   1335.0    66.7\n", "the link's part")
	require.Contains(t, b.String(), "# Out of bounds values : 0 OK\n")
	require.Equal(t, 2, strings.Count(b.String(), "out-of-place                       in-place"), "one head for each operation")

	b.Reset()
	r.Host = `<script>"`
	require.NoError(t, r.WriteHTML(&b))
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
	of := func(m *Measure) float64 { return m.BusBW }
	c := r.chart("title", "GB/s", of)
	require.Len(t, c.Series, 2)
	require.Equal(t, "title: all-reduce, float, sum", c.Title)
	require.Equal(t, []string{"in place", "out of place"}, []string{c.Series[0].Name, c.Series[1].Name})
	require.Contains(t, c.SVG(), "<title>out of place, 256 MiB: 290 GB/s</title>")
	require.Nil(t, (&Report{Rows: r.Rows[2:]}).chart("title", "GB/s", of))
	require.Empty(t, (&Report{}).charts())
}

func TestBaseline(t *testing.T) {
	base, now := made(), made()
	now.Rows[1].InPlace.Time *= 1.3
	now.Rows[0].InPlace.Time *= 0.7
	now.Rows = now.Rows[:2]
	both, missing, err := now.Compare(base)
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
	_, _, err = now.Compare(base)
	require.ErrorContains(t, err, "ranks 2 in the baseline, 8 here")
	now = made()
	now.Plan.Launches = 3
	_, _, err = now.Compare(base)
	require.ErrorContains(t, err, "has other settings for graphs")
	now = made()
	now.Plan.Register = 1
	_, _, err = now.Compare(base)
	require.ErrorContains(t, err, "has other settings for graphs")
	now = made()
	now.Rows = nil
	_, _, err = now.Compare(base)
	require.ErrorContains(t, err, "none of the rows")

	for text, want := range map[string]string{
		"":            "not a report",
		"[]":          "not a report",
		`{"form":99}`: "format 99",
		`{"form":1,"results":[{"operation":"all_reduce"}]}`:                                  "result 1",
		`{"form":1,"results":[{"operation":"all_reduce","out_of_place":{"time":0}}]}`:        "has the time 0",
		`{"form":1,"results":[{"operation":"all_reduce","out_of_place":{"time":-1}}, null]}`: "has the time -1",
	} {
		_, err := ReadReport(strings.NewReader(text))
		require.ErrorContains(t, err, want, text)
	}
}

// The numbers of all ranks make one measure: the mean of the means, the slowest of each
// operation, all that is wrong.
func TestSum(t *testing.T) {
	o, err := Find("all_reduce")
	require.NoError(t, err)
	j := job{op: o, dtype: memory.Float32, layout: layout{moved: 3000}}
	times := func(slow float64) []float64 {
		var list []float64
		for i := range 100 {
			list = append(list, float64(2*i)+slow)
		}
		return list
	}
	all := [][]float64{append(times(0), 10, 3), append(times(4), 20, 0), append(times(2), 60, 5)}
	m := j.sum(all, 2, true)
	require.InDelta(t, 30.0/2, m.Time, 1e-9, "of one of the two operations of a launch")
	require.InDelta(t, (2*49+4)/2, m.P50, 1e-9)
	require.InDelta(t, (2*98+4)/2, m.P99, 1e-9)
	require.Equal(t, int64(8), *m.Wrong)
	require.InDelta(t, 12000/15.0/1e3, m.AlgBW, 1e-9)
	require.InDelta(t, m.AlgBW*4/3, m.BusBW, 1e-9)
	require.Nil(t, j.sum(all, 1, false).Wrong)
}

func TestQuantile(t *testing.T) {
	all := []float64{5, 1, 4, 2, 3}
	for q, want := range map[float64]float64{0: 1, 0.2: 1, 0.21: 2, 0.5: 3, 0.99: 5, 1: 5} {
		require.Equal(t, want, quantile(all, q), fmt.Sprint(q))
	}
	require.Equal(t, []float64{5, 1, 4, 2, 3}, all)
	least, _, _ := spreadOf(nil)
	require.True(t, math.IsNaN(least))
}
