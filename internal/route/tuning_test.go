package route

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// TestTunedChoice finds choices by operation, type, reduction, size, and whether the size is a
// multiple of 16 bytes.
func TestTunedChoice(t *testing.T) {
	choice := func(op, dtype, red string, bytes int, order ...Strategy) Choice {
		c := Choice{Operation: op, Type: dtype, Reduction: red, Bytes: bytes}
		for i, s := range order {
			c.Times = append(c.Times, Timing{Strategy: s.Name(), Micros: float64(i)})
		}
		return c
	}
	tuning := &Tuning{Choices: []Choice{
		choice("all-reduce", "float32", "sum", 16, OneShot),
		choice("all-reduce", "float32", "sum", 12, TwoShot),
		choice("all-reduce", "float32", "sum", 1024, TwoShotPackets, OneShot),
		choice("all-reduce", "float32", "sum", 1<<20, NCCLOnly, OneShot),
		choice("all-reduce", "bfloat16", "sum", 16, Windows),
		choice("all-reduce", "int64", "max", 16, Windows, TwoShot), // windows cannot
		choice("all-reduce", "int32", "min", 16, OneShot),
		choice("all-gather", "", "", 1<<20, Windows, OwnKernels), // too much for both
		choice("all-gather", "", "", 4<<10, OwnKernels),
	}}
	index, err := IndexOf(tuning)
	require.NoError(t, err)
	g := newRig(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), Tuned)
	g.routers.UseTuning(index)
	of := func(kind collective.Kind, dtype memory.DType, op nccl.Op, count int) Strategy {
		return g.routers.Chosen(collective.Op{Call: collective.Call{Request: collective.Request{Kind: kind, DType: dtype, Reduction: collective.Reduction(op), N: count}}})
	}
	for _, c := range []struct {
		want, got Strategy
	}{
		{OneShot, of(collective.AllReduce, memory.Float32, nccl.Sum, 4)},
		{OneShot, of(collective.AllReduce, memory.Float32, nccl.Sum, 28)}, // 112 bytes are nearer to 16 than to 1024
		{TwoShotPackets, of(collective.AllReduce, memory.Float32, nccl.Sum, 36)},
		{TwoShotPackets, of(collective.AllReduce, memory.Float32, nccl.Sum, 4<<10)},
		{NCCLOnly, of(collective.AllReduce, memory.Float32, nccl.Sum, 16<<10)},
		{NCCLOnly, of(collective.AllReduce, memory.Float32, nccl.Sum, 1<<24)},
		{TwoShot, of(collective.AllReduce, memory.Float32, nccl.Sum, 1001)}, // odd, as 12 are
		{Windows, of(collective.AllReduce, memory.BFloat16, nccl.Sum, 8)},
		{Windows, of(collective.AllReduce, memory.BFloat16, nccl.Sum, 7)},
		{TwoShot, of(collective.AllReduce, memory.Int64, nccl.Max, 2)},
		{TwoShot, of(collective.AllReduce, memory.Float64, nccl.Sum, 2)}, // as int64 rather than float32's sums
		{OneShot, of(collective.AllReduce, memory.Int32, nccl.Max, 4)},   // as its type rather than its reduction
		{TwoShot, of(collective.AllReduce, memory.Uint64, nccl.Max, 1)},  // as its reduction; whole 16 bytes count less
		{OneShot, of(collective.AllReduce, memory.Float16, nccl.Sum, 8)}, // as the first of equals
		{NCCLOnly, of(collective.AllReduce, memory.Float32, 9, 4)},       // a reduction of the user's
		{OwnKernels, of(collective.AllGather, memory.Float64, 0, 1)},
		{NCCLOnly, of(collective.AllGather, memory.Float64, 0, 1<<20)},
		{NCCLOnly, of(collective.Broadcast, memory.Float64, 0, 1)}, // not measured
		{NCCLOnly, of(collective.AllGather, memory.Float64, 0, 0)},
	} {
		require.Equal(t, c.want, c.got)
	}
}

// TestTuningUsesTheSlowestRank sorts strategies by the times of the slowest ranks.
func TestTuningUsesTheSlowestRank(t *testing.T) {
	times := func(list ...Strategy) (all []Timing) {
		for _, s := range list {
			all = append(all, Timing{Strategy: s.Name()})
		}
		return all
	}
	tuning := Tuning{Choices: []Choice{{Times: times(NCCLOnly, OwnKernels)}, {Times: times(NCCLOnly)}}}
	require.NoError(t, tuning.fill([][]float64{{3, 9, 1}, {4, 2, 7}, {1, 1, 2}}))
	tuning.sort()
	require.Equal(t, []Timing{{Strategy: NCCLOnly.Name(), Micros: 4}, {Strategy: OwnKernels.Name(), Micros: 9}}, tuning.Choices[0].Times)
	require.Equal(t, []Timing{{Strategy: NCCLOnly.Name(), Micros: 7}}, tuning.Choices[1].Times)
}

// Times of another rank that are not those of the plan are refused.
func TestTimesOfAnotherPlan(t *testing.T) {
	for _, theirs := range [][]float64{nil, {1}, {1, 2, 3}} {
		tuning := Tuning{Choices: []Choice{{Times: make([]Timing, 2)}}}
		require.ErrorContains(t, tuning.fill([][]float64{{1, 2}, theirs}), "rank 1 has sent")
		require.Zero(t, tuning.Choices[0].Times[0].Micros)
	}
}

// TestMeasuringRestoresTheStrategy measures every strategy, and then copy engines: operations
// after it use the strategy that was in use before.
func TestMeasuringRestoresTheStrategy(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := newRig(t, devs, Tuned)
		plan, err := g.routers.Plan(PlanConfig{MaxBytes: 256 << 10, Types: []memory.DType{memory.Float32}, Ops: []collective.Reduction{collective.Sum}})
		require.NoError(t, err)
		plan = slices.DeleteFunc(plan, func(c Choice) bool { return c.Operation != "all-gather" || c.Bytes != 256<<10 })
		require.Len(t, plan, 1)
		require.Equal(t, CopyEngines.Name(), plan[0].Times[len(plan[0].Times)-1].Strategy)
		x := collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllGather, DType: memory.Float32, N: 64}}, Together: true}
		for s, want := range map[Strategy]Strategy{NCCLOnly: NCCLOnly, OwnKernels: OwnKernels, Tuned: NCCLOnly} {
			g.routers.Use(s)
			tuning := &Tuning{Choices: slices.Clone(plan)}
			tuning.Choices[0].Times = slices.Clone(plan[0].Times)
			times, err := g.routers.Measure(testgpu.Context(t), tuning.Choices)
			require.NoError(t, err)
			require.NoError(t, g.routers.Complete(testgpu.Context(t), tuning, times))
			for _, one := range tuning.Choices[0].Times {
				require.Positive(t, one.Micros, one.Strategy)
				require.Equal(t, one.Strategy == CopyEngines.Name(), one.Eager > 0)
			}
			require.Equal(t, s, g.routers.Strategy())
			for i := range devs {
				require.Equal(t, want, g.routers[i:].Chosen(x), "%s on rank %d", s, i)
			}
		}
	})
}

// TestTuningsAtOnce saves tunings for many places in one file at the same time.
func TestTuningsAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	tuning := &Tuning{For: Site{GPU: "x"}, Choices: []Choice{
		{Operation: "all-gather", Bytes: 16, Times: []Timing{{Strategy: NCCLOnly.Name()}, {Strategy: OwnKernels.Name(), Micros: 1}}},
		{Operation: "all-reduce", Type: "float32", Reduction: "sum", Bytes: 16, Times: []Timing{{Strategy: OneShot.Name()}}},
	}}
	var wg sync.WaitGroup
	for ranks := range 20 {
		wg.Go(func() {
			one := Tuning{For: tuning.For, Choices: slices.Clone(tuning.Choices)}
			one.For.Ranks = ranks
			require.NoError(t, one.Save(t.Context(), file))
		})
	}
	wg.Wait()
	at := tuning.For
	for at.Ranks = range 20 {
		one, err := LoadTuning(file, at)
		require.NoError(t, err)
		require.NotNil(t, one, "for %d ranks", at.Ranks)
	}
	entries, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

// TestTuningWhereAnotherWrites waits for another process no longer than ctx lets it.
func TestTuningWhereAnotherWrites(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	folder, err := os.Open(filepath.Dir(file))
	require.NoError(t, err)
	defer folder.Close()
	require.NoError(t, syscall.Flock(int(folder.Fd()), syscall.LOCK_EX))
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	cancel(enough)
	require.ErrorIs(t, CanSave(ctx, file), enough)
	require.ErrorIs(t, (&Tuning{}).Save(ctx, file), enough)
	require.NoFileExists(t, file)
	require.NoError(t, syscall.Flock(int(folder.Fd()), syscall.LOCK_UN))
	require.NoError(t, (&Tuning{}).Save(t.Context(), file))
}
