package comm_test

import (
	"errors"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

var fewPoints = &comm.TuneConfig{MaxBytes: 1024, Types: []memory.DType{memory.Float32, memory.Int64}, Ops: []comm.Op{comm.Sum}}

// TestTune measures, writes, and goes by what was written.
func TestTune(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		file := filepath.Join(t.TempDir(), "tuning.json")
		t.Setenv(env.TuningFile.Name, file)
		at := siteOf(t, devs)
		require.NoError(t, (&comm.Tuning{For: at}).Save(t.Context(), file))
		g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned})
		tuning, err := comm.Tune(testgpu.Context(t), g, fewPoints)
		require.NoError(t, err)
		require.Equal(t, at, tuning.For)
		require.Equal(t, comm.Tuned, g.Strategy())
		have := map[string]int{}
		for _, c := range tuning.Choices {
			have[c.Operation]++
			require.True(t, slices.IsSortedFunc(c.Times, func(a, b comm.Timing) int { return int(a.Micros*1e3) - int(b.Micros*1e3) }), "%+v", c)
			if devs[0].System().Backend() == "cuda" {
				require.Positive(t, c.Times[0].Micros)
			}
			var all []comm.Strategy
			for _, x := range c.Times {
				all = append(all, x.Strategy)
			}
			want := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels}
			if c.Operation == "all-reduce" {
				want = []comm.Strategy{comm.NCCLOnly, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines}
			}
			if (c.Type == "float32" || c.Operation == "all-gather") && (c.Operation == "all-reduce" || c.Bytes%8 == 0) {
				want = append(want, comm.Windows)
			}
			require.ElementsMatch(t, want, all, "%+v", c)
		}
		require.Equal(t, map[string]int{"all-reduce": 28, "all-gather": 14, "reduce-scatter": 28, "broadcast": 14, "all-to-all": 14}, have)
		require.NoError(t, conform(testgpu.Context(t), g))

		// Copy engines are for what is large.
		large, err := comm.TunePlan(g, &comm.TuneConfig{MaxBytes: 1 << 20, Types: fewPoints.Types, Ops: fewPoints.Ops})
		require.NoError(t, err)
		for _, c := range large {
			has := slices.ContainsFunc(c.Times, func(x comm.Timing) bool { return x.Strategy == comm.CopyEngines })
			require.Equal(t, c.Bytes >= 256<<10 && (c.Operation == "all-gather" || c.Operation == "all-to-all"), has, "%+v", c)
		}

		// What another group reads is the same.
		require.NoError(t, tuning.Save(t.Context(), file))
		again, err := comm.LoadTuning(file, at)
		require.NoError(t, err)
		require.Equal(t, tuning, again)
		h := groupBy(t, devs, comm.Config{Strategy: comm.Tuned})
		for _, kind := range []flight.Kind{flight.AllReduce, flight.AllGather, flight.AllToAll} {
			for count := 1; count < 400; count++ {
				x := ranks.Collective{Kind: kind, DType: memory.Float32, Count: count}
				require.Equal(t, g.Choice(0, x), h.Choice(1, x))
			}
		}
	})
}

func TestTunePlanRefuses(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: siteOf(t, devs)}})
	for text, cfg := range map[string]comm.TuneConfig{
		"MaxBytes is 7":            {MaxBytes: 7},
		"MaxBytes is -1":           {MaxBytes: -1},
		"type bool":                {Types: []memory.DType{memory.Bool}},
		"type invalid":             {Types: []memory.DType{memory.Invalid}},
		"there is no reduction op": {Ops: []comm.Op{17}},
	} {
		_, err := comm.Tune(testgpu.Context(t), g, &cfg)
		require.ErrorContains(t, err, text)
		require.ErrorIs(t, err, comm.ErrMismatch)
	}
	_, err := comm.Tune(testgpu.Context(t), groupBy(t, devs, comm.Config{Strategy: comm.OwnKernels}), fewPoints)
	require.ErrorContains(t, err, "the group was made with the strategy own: make it with tuned")
	plain := local(t, devs)
	tuning, err := comm.Tune(testgpu.Context(t), plain, fewPoints)
	require.NoError(t, err)
	require.Empty(t, tuning.Choices, "there is no choice")
	require.NoError(t, g.Close())
	_, err = comm.Tune(testgpu.Context(t), g, nil)
	require.ErrorIs(t, err, device.ErrClosed)
}

// TestTunePlansThatDiffer gives ranks different things to measure.
func TestTunePlansThatDiffer(t *testing.T) {
	gs, errs := make([]*comm.Group, 2), make([]error, 2)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	var wg sync.WaitGroup
	for i, b := range boards(t.Context(), 2) {
		wg.Go(func() {
			gs[i], errs[i] = comm.Join(testgpu.Context(t), b, devs[i], &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}})
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	for i, g := range gs {
		wg.Go(func() { _, errs[i] = comm.Tune(testgpu.Context(t), g, &comm.TuneConfig{MaxBytes: 64 << i}) })
	}
	wg.Wait()
	for i, g := range gs {
		require.ErrorContains(t, errs[i], "comm: tune: rank 0 has the options {MaxBytes:64 ")
		require.ErrorContains(t, errs[i], "and rank 1 the options {MaxBytes:128 ")
		wg.Go(func() { errs[i] = errors.Join(conform(testgpu.Context(t), g), g.Shutdown(testgpu.Context(t))) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...), "the group is as before")
}

// TestTuneFails has an operation fail while it is measured.
func TestTuneFails(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclAlltoAll#*=ncclInternalError"})
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: siteOf(t, devs)}})
	_, err := comm.Tune(testgpu.Context(t), g, fewPoints)
	require.ErrorIs(t, err, comm.ErrBroken)
	// One rank may be at another operation when it hears of the other's.
	require.Regexp(t, `tune: [a-z-]+ of \d+ bytes by [a-z-]+ on rank \d.*ncclAlltoAll on rank \d of 2`, err.Error())
}
