package comm_test

import (
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// siteOf is where tunings for groups of these devices hold.
func siteOf(t *testing.T, devs []*device.Device) comm.Site {
	t.Helper()
	g := local(t, devs)
	at, err := g.Site()
	require.NoError(t, err)
	return at
}

// anyTuning has each strategy as the fastest of some operations and sizes.
func anyTuning(at comm.Site, r *rand.Rand) *comm.Tuning {
	t := &comm.Tuning{For: at}
	every := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines, comm.Windows, comm.CopyEngines}
	for _, op := range []string{"all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all"} {
		for bytes := 4; bytes <= 1<<16; bytes += 1 + bytes/2 {
			c := comm.Choice{Operation: op, Bytes: bytes}
			if strings.Contains(op, "reduce") {
				c.Type, c.Reduction = "float32", "sum"
			}
			for i, k := range r.Perm(len(every)) {
				x := comm.Timing{Strategy: every[k], Micros: float64(i)}
				if x.Strategy == comm.CopyEngines {
					x.Eager = float64(r.IntN(8))
				}
				c.Times = append(c.Times, x)
			}
			t.Choices = append(t.Choices, c)
		}
	}
	return t
}

// TestTunedChoice looks choices up by operation, type, reduction, size and whether it is
// made of whole 16 bytes.
func TestTunedChoice(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	choice := func(op, dtype, red string, bytes int, order ...comm.Strategy) comm.Choice {
		c := comm.Choice{Operation: op, Type: dtype, Reduction: red, Bytes: bytes}
		for i, s := range order {
			c.Times = append(c.Times, comm.Timing{Strategy: s, Micros: float64(i)})
		}
		return c
	}
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: siteOf(t, devs), Choices: []comm.Choice{
		choice("all-reduce", "float32", "sum", 16, comm.OneShot),
		choice("all-reduce", "float32", "sum", 12, comm.TwoShot),
		choice("all-reduce", "float32", "sum", 1024, comm.TwoShotPackets, comm.OneShot),
		choice("all-reduce", "float32", "sum", 1<<20, comm.NCCLOnly, comm.OneShot),
		choice("all-reduce", "bfloat16", "sum", 16, comm.Windows),
		choice("all-reduce", "int64", "max", 16, comm.Windows, comm.TwoShot), // windows cannot
		choice("all-reduce", "int32", "min", 16, comm.OneShot),
		choice("all-gather", "", "", 1<<20, comm.Windows, comm.OwnKernels), // too much for both
		choice("all-gather", "", "", 4<<10, comm.OwnKernels),
	}}})
	of := func(kind nccl.CollectiveKind, dtype memory.DType, op nccl.Op, count int) comm.Strategy {
		return g.Choice(0, nccl.Collective{Kind: kind, DType: dtype, Op: op, Count: count})
	}
	for _, c := range []struct {
		want, got comm.Strategy
	}{
		{comm.OneShot, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 4)},
		{comm.OneShot, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 28)}, // 112 bytes are nearer to 16 than to 1024
		{comm.TwoShotPackets, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 36)},
		{comm.TwoShotPackets, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 4<<10)},
		{comm.NCCLOnly, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 16<<10)},
		{comm.NCCLOnly, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 1<<24)},
		{comm.TwoShot, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 1001)}, // odd, as 12 are
		{comm.Windows, of(nccl.AllReduceKind, memory.BFloat16T, nccl.Sum, 8)},
		{comm.Windows, of(nccl.AllReduceKind, memory.BFloat16T, nccl.Sum, 7)},
		{comm.TwoShot, of(nccl.AllReduceKind, memory.Int64, nccl.Max, 2)},
		{comm.TwoShot, of(nccl.AllReduceKind, memory.Float64, nccl.Sum, 2)},  // as int64 rather than float32's sums
		{comm.OneShot, of(nccl.AllReduceKind, memory.Int32, nccl.Max, 4)},    // as its type rather than its reduction
		{comm.TwoShot, of(nccl.AllReduceKind, memory.Uint64, nccl.Max, 1)},   // as its reduction; whole 16 bytes count less
		{comm.OneShot, of(nccl.AllReduceKind, memory.Float16T, nccl.Sum, 8)}, // as the first of equals
		{comm.NCCLOnly, of(nccl.AllReduceKind, memory.Float32, 9, 4)},        // a reduction of the user's
		{comm.OwnKernels, of(nccl.AllGatherKind, memory.Float64, 0, 1)},
		{comm.NCCLOnly, of(nccl.AllGatherKind, memory.Float64, 0, 1<<20)},
		{comm.NCCLOnly, of(nccl.BroadcastKind, memory.Float64, 0, 1)}, // not measured
		{comm.NCCLOnly, of(nccl.AllGatherKind, memory.Float64, 0, 0)},
	} {
		require.Equal(t, c.want, c.got)
	}
}

// TestTuningTakesTheSlowest sorts strategies by the times of the ranks that took longest.
func TestTuningTakesTheSlowest(t *testing.T) {
	times := func(list ...comm.Strategy) (all []comm.Timing) {
		for _, s := range list {
			all = append(all, comm.Timing{Strategy: s})
		}
		return all
	}
	tuning := comm.Tuning{Choices: []comm.Choice{{Times: times(comm.NCCLOnly, comm.OwnKernels)}, {Times: times(comm.NCCLOnly)}}}
	tuning.Fill([][]float64{{3, 9, 1}, {4, 2, 7}, {1, 1, 2}})
	require.Equal(t, []comm.Timing{{Strategy: comm.NCCLOnly, Micros: 4}, {Strategy: comm.OwnKernels, Micros: 9}}, tuning.Choices[0].Times)
	require.Equal(t, []comm.Timing{{Strategy: comm.NCCLOnly, Micros: 7}}, tuning.Choices[1].Times)
}
