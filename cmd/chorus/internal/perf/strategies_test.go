package perf

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/groups"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// Marks compare a time with that of the chosen strategy of the same size.
func TestMarksAreOfOneSize(t *testing.T) {
	row := func(bytes int, s comm.Strategy, us float64, chosen bool) *Row {
		return &Row{Operation: "all_reduce", Type: "float", Reduction: "sum", Root: -1, Bytes: bytes,
			OutOfPlace: &Measure{Time: us}, Strategy: string(s), Chosen: chosen}
	}
	r := &Report{Rows: []*Row{
		row(8, comm.NCCLOnly, 10, false), row(8, comm.OwnKernels, 5, true), row(8, comm.Windows, 4, false),
		row(16, comm.NCCLOnly, 3, true), row(16, comm.OwnKernels, 4, false), row(16, comm.Windows, 2, false),
		row(32, comm.NCCLOnly, 9, false), row(32, comm.Windows, 8, true),
	}}
	var text bytes.Buffer
	require.NoError(t, r.WriteStrategies(&text))
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

// What is chosen is so for a call that has all ranks of the process: copy engines too,
// which may be the fastest in graphs only. Either way the sums are right.
func TestChosenOfAllRanks(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		at, err := group(t, devs).Site()
		require.NoError(t, err)
		g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: at, Choices: []comm.Choice{
			{Operation: "all-gather", Bytes: 1 << 10, Times: []comm.Timing{{Strategy: comm.CopyEngines, Eager: 2}, {Strategy: comm.OwnKernels, Micros: 1}}},
		}}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, g.Close()) })
		for launches, want := range map[int]string{0: "own", 3: "copy-engines"} {
			r, err := RunStrategies(testgpu.Context(t), g, &Plan{
				Operations: Operations[:2], DTypes: []memory.DType{memory.Float32}, Reductions: []Reduction{Sum},
				Sizes: Sizes{Min: 1 << 10, Max: 1 << 10}, Iterations: 2, Launches: launches, Checks: 1,
			})
			require.NoError(t, err)
			chosen := map[string]string{}
			for _, row := range r.Rows {
				if row.Chosen {
					chosen[row.Operation] += row.Strategy
				}
			}
			require.Equal(t, map[string]string{Operations[0].Name: "nccl", Operations[1].Name: want}, chosen)
			require.Zero(t, r.Wrong)
		}
	})
}

// Each strategy is measured with all that it can, so that what is chosen has a time.
func TestChosenHasATime(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		at, err := group(t, devs).Site()
		require.NoError(t, err)
		g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: at, Choices: []comm.Choice{
			{Operation: "broadcast", Bytes: 1 << 20, Times: []comm.Timing{{Strategy: comm.OwnKernels}}},
		}}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, g.Close()) })
		i := slices.IndexFunc(Operations, func(o *Operation) bool { return o.Name == "broadcast" })
		r, err := RunStrategies(testgpu.Context(t), g, &Plan{
			Operations: Operations[i : i+1], DTypes: []memory.DType{memory.Float32}, Reductions: []Reduction{Sum},
			Sizes: Sizes{Min: 1 << 20, Max: 1 << 20}, Iterations: 1, Checks: 1,
		})
		require.NoError(t, err)
		i = slices.IndexFunc(r.Rows, func(row *Row) bool { return row.Chosen })
		require.GreaterOrEqual(t, i, 0)
		require.Equal(t, "own", r.Rows[i].Strategy)
		require.Zero(t, r.Wrong)
		require.Equal(t, comm.Tuned, g.Strategy())
		require.Equal(t, string(comm.OwnKernels), groups.Of(g).Chosen(collective.Op{Op: flight.Op{Request: flight.Request{Kind: flight.Broadcast, DType: memory.Float32, N: 1 << 18}}}))
		require.NoError(t, g.Use(testgpu.Context(t), comm.OwnKernels))
		require.Equal(t, string(comm.NCCLOnly), groups.Of(g).Chosen(collective.Op{Op: flight.Op{Request: flight.Request{Kind: flight.Broadcast, DType: memory.Float32, N: 1 << 18}}}))
	})
}
