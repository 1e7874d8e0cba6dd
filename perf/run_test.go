package perf

import (
	"context"
	"fmt"
	"math"
	"slices"
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
		Operations: Operations(), MinBytes: 1 << 12, Iterations: 2, Checks: 2,
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
				p.Operations = Operations()[:len(Operations())-1] // no hypercube
			}
			for i, how := range []struct {
				launches int
				reg      int
			}{{}, {2, unregistered}, {0, registered}, {2, windows}} {
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
		for i, o := range []string{"all_reduce", "reduce_scatter", "reduce"} {
			if turns(0, i) {
				p.Operations = append(p.Operations, o)
			}
		}
		p.Types, p.Reductions = []string{"all"}, []string{"all"}
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
		o, err := find(name + "_perf")
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
	list := func(p *Plan) []int {
		l, err := p.sizes()
		require.NoError(t, err)
		return l
	}
	require.Equal(t, []int{8, 16, 32}, list(&Plan{MinBytes: 8, MaxBytes: 40, StepFactor: 2, StepBytes: 1}))
	require.Equal(t, []int{8, 18, 28}, list(&Plan{MinBytes: 8, MaxBytes: 30, StepBytes: 10}))
	require.Equal(t, []int{8}, list(&Plan{MinBytes: 8, MaxBytes: 8}))
	for _, p := range []Plan{{MinBytes: 0, MaxBytes: 1}, {MinBytes: 9, MaxBytes: 8}, {MinBytes: 1, MaxBytes: 2}, {MinBytes: 1, MaxBytes: 2, StepFactor: 1}, {MinBytes: 1, MaxBytes: 2, StepBytes: -1}} {
		_, err := p.sizes()
		require.Error(t, err, "%+v", p)
	}
}

func TestBadPlans(t *testing.T) {
	for want, change := range map[string]func(*Plan){
		"want at least one operation":         func(p *Plan) { p.Operations = nil },
		"want 1 iteration":                    func(p *Plan) { p.Iterations = 0 },
		"want a rank from 0 to 2":             func(p *Plan) { p.Root = 3 },
		"want a power of two":                 func(p *Plan) {},
		"registration 3":                      func(p *Plan) { p.Register = 3 },
		"less than one element for each of 3": func(p *Plan) { p.MinBytes, p.Operations = 4, []string{"all_gather"} },
		"unknown operation \"all_sum\"":       func(p *Plan) { p.Operations = []string{"all_sum"} },
		"unknown element type \"half2\"":      func(p *Plan) { p.Types = []string{"half2"} },
		"unknown reduction \"mean\"":          func(p *Plan) { p.Reductions = []string{"mean"} },
		"want a step or a factor":             func(p *Plan) { p.MinBytes, p.MaxBytes = 1, 2 },
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
	p.Operations = Operations()[:3]
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
		Form: Form, Host: "node", Backend: "cuda", Device: "NVIDIA H200", NCCL: "2.28.3", Ranks: 2, Locals: 2, Link: 450,
		Plan: &Plan{Iterations: 20, Checks: 1},
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

// The numbers of all ranks make one measure: the mean of the means, the slowest of each
// operation, all that is wrong.
func TestSum(t *testing.T) {
	o, err := find("all_reduce")
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
	m := j.combine(all, 2, true)
	require.InDelta(t, 30.0/2, m.Time, 1e-9, "of one of the two operations of a launch")
	require.InDelta(t, (2*49+4)/2, m.P50, 1e-9)
	require.InDelta(t, (2*98+4)/2, m.P99, 1e-9)
	require.Equal(t, int64(8), *m.Wrong)
	require.InDelta(t, 12000/15.0/1e3, m.AlgBW, 1e-9)
	require.InDelta(t, m.AlgBW*4/3, m.BusBW, 1e-9)
	require.Nil(t, j.combine(all, 1, false).Wrong)
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

func TestNothingGiven(t *testing.T) {
	g, err := comm.Local(testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), nil)
	require.NoError(t, err)
	defer g.Close()
	_, err = Run(t.Context(), nil, &Plan{}, nil)
	require.ErrorIs(t, err, errNoGroup)
	_, err = Run(t.Context(), g, nil, nil)
	require.ErrorIs(t, err, errNoPlan)
	_, err = MeasurePairs(t.Context(), nil, &PairPlan{})
	require.ErrorIs(t, err, errNoGroup)
	_, err = MeasurePairs(t.Context(), g, nil)
	require.ErrorIs(t, err, errNoPlan)
	_, err = Describe(nil)
	require.ErrorIs(t, err, errNoGroup)
	_, err = Check(t.Context(), nil, nil)
	require.ErrorIs(t, err, errNoGroup)
	require.NoError(t, g.Err())
}
