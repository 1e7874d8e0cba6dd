package perf

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

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
			r, err := Run(testgpu.Context(t), g, &Plan{
				Operations: Operations()[:2], MinBytes: 1 << 10, Iterations: 2, Launches: launches, Checks: 1, Strategies: true,
			}, nil)
			require.NoError(t, err)
			chosen := map[string]string{}
			for _, row := range r.Rows {
				if row.Chosen {
					chosen[row.Operation] += row.Strategy
				}
			}
			require.Equal(t, map[string]string{"all_reduce": "nccl", "all_gather": want}, chosen)
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
		r, err := Run(testgpu.Context(t), g, &Plan{
			Operations: []string{"broadcast"}, MinBytes: 1 << 20, Iterations: 1, Checks: 1, Strategies: true,
		}, nil)
		require.NoError(t, err)
		i := slices.IndexFunc(r.Rows, func(row *Row) bool { return row.Chosen })
		require.GreaterOrEqual(t, i, 0)
		require.Equal(t, "own", r.Rows[i].Strategy)
		require.Zero(t, r.Wrong)
		require.Equal(t, comm.Tuned, g.Strategy())
		require.Equal(t, string(comm.OwnKernels), route.GroupOf(g).Chosen(collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.Broadcast, DType: memory.Float32, N: 1 << 18}}}))
		require.NoError(t, g.Use(testgpu.Context(t), comm.OwnKernels))
		require.Equal(t, string(comm.NCCLOnly), route.GroupOf(g).Chosen(collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.Broadcast, DType: memory.Float32, N: 1 << 18}}}))
	})
}
