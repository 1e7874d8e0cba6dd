package checkpoint

import (
	"math"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// twoSavers are the savers of two processes in this one, each with one rank.
func twoSavers(t *testing.T, devs []*device.Device, cfg *SaverConfig) (vs [2]*Saver) {
	ctx, folder := testgpu.Context(t), t.TempDir()
	exchanges := testgpu.Exchanges(ctx, 2)
	onBoth(t, func(i int) error {
		g, err := comm.Join(ctx, exchanges[i], devs[i], nil)
		if err != nil {
			return err
		}
		t.Cleanup(func() { require.NoError(t, g.Close()) })
		x := makeTensor(t, g.Stream(0), []int32{1, 2, 3}, []int{3})
		vs[i], err = NewSaver(ctx, g, folder, [][]Part{{{Name: "x", Data: x}}}, cfg)
		return err
	})
	t.Cleanup(func() { onBoth(t, func(i int) error { return vs[i].Close() }) })
	return vs
}

// onBoth runs fn for both processes at the same time.
func onBoth(t *testing.T, fn func(i int) error) {
	t.Helper()
	var errs [2]error
	var all sync.WaitGroup
	for i := range errs {
		all.Go(func() { errs[i] = fn(i) })
	}
	all.Wait()
	require.Equal(t, [2]error{}, errs)
}

// saveBoth saves a step on both processes, and returns their errors.
func saveBoth(t *testing.T, vs [2]*Saver, step int64, values ...any) (errs [2]error) {
	t.Helper()
	var all sync.WaitGroup
	for i, v := range vs {
		all.Go(func() {
			var mine []any
			if values != nil {
				mine = values[i : i+1]
			}
			errs[i] = v.Save(testgpu.Context(t), step, groupStreams(v.group), mine...)
		})
	}
	all.Wait()
	return errs
}

func requireComplete(t *testing.T, vs [2]*Saver, step int64) {
	t.Helper()
	for _, v := range vs {
		require.NoError(t, v.Wait(testgpu.Context(t)))
	}
	s, err := OpenSaved(filepath.Join(vs[0].folder, stepName(step)))
	require.NoError(t, err)
	require.NoError(t, s.Close())
}

// If one rank refuses a save, the save ends on the others with the reason, and later saves go on.
func TestRefusedSaveEndsOnAllRanks(t *testing.T) {
	onVirtual(t, 2, func(t *testing.T, devs []*device.Device) {
		for refusing := range 2 {
			vs := twoSavers(t, devs, nil)
			require.Equal(t, [2]error{}, saveBoth(t, vs, 1, 1, 2))
			requireComplete(t, vs, 1)
			values := []any{1, 2}
			values[refusing] = math.NaN()
			errs := saveBoth(t, vs, 2, values...)
			require.ErrorContains(t, errs[refusing], "value 0 as JSON")
			require.NoError(t, errs[1-refusing])
			errs = saveBoth(t, vs, 3, 1, 2)
			require.NoError(t, errs[refusing])
			require.ErrorContains(t, errs[1-refusing], "the previous save: ")
			require.ErrorContains(t, errs[1-refusing], "value 0 as JSON")
			requireComplete(t, vs, 3)
			require.NoDirExists(t, filepath.Join(vs[0].folder, stepName(2)))
		}
	})
}

// A rank that is still busy refuses, and the others do not wait for it.
func TestBusyRankEndsTheSave(t *testing.T) {
	onVirtual(t, 2, func(t *testing.T, devs []*device.Device) {
		for busy := range 2 {
			vs := twoSavers(t, devs, &SaverConfig{Refuse: true})
			require.Equal(t, [2]error{}, saveBoth(t, vs, 1))
			requireComplete(t, vs, 1)
			before := vs[busy].last
			vs[busy].last = &saveJob{total: 1, done: make(chan struct{})}
			errs := saveBoth(t, vs, 2)
			require.ErrorIs(t, errs[busy], ErrBusy)
			require.NoError(t, errs[1-busy])
			require.ErrorContains(t, vs[1-busy].Wait(testgpu.Context(t)), ErrBusy.Error())
			vs[busy].last = before
			require.Equal(t, [2]error{}, saveBoth(t, vs, 3))
			requireComplete(t, vs, 3)
		}
	})
}

// The newest checkpoints of this run stay, and those that KeepEvery names. Steps after this run's
// do not count.
func TestRetention(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		g, folder := localGroup(t, devs), t.TempDir()
		x := makeTensor(t, g.Stream(0), []int32{1}, []int{1})
		require.NoError(t, os.Mkdir(filepath.Join(folder, stepName(50)), 0o777))
		require.NoError(t, os.Mkdir(filepath.Join(folder, stepName(60)), 0o777))
		v, err := NewSaver(t.Context(), g, folder, [][]Part{{{Name: "x", Data: x}}}, &SaverConfig{KeepLast: 2, KeepEvery: 10})
		require.NoError(t, err)
		for step := range int64(14) {
			require.NoError(t, v.Save(t.Context(), step+1, groupStreams(g)))
			require.NoError(t, v.Wait(t.Context()))
		}
		require.NoError(t, v.Close())
		steps, err := stepsIn(folder)
		require.NoError(t, err)
		require.Equal(t, []int64{10, 13, 14, 50, 60}, steps)
	})
}

// A file or a folder that is no checkpoint is not replaced.
func TestSaveReplacesOnlyCheckpoints(t *testing.T) {
	onVirtual(t, 1, func(t *testing.T, devs []*device.Device) {
		g, folder := localGroup(t, devs), t.TempDir()
		x := makeTensor(t, g.Stream(0), []int32{1}, []int{1})
		v, err := NewSaver(t.Context(), g, folder, [][]Part{{{Name: "x", Data: x}}}, nil)
		require.NoError(t, err)
		file := filepath.Join(folder, stepName(1))
		require.NoError(t, os.WriteFile(file, []byte("notes"), 0o666))
		require.NoError(t, v.Save(t.Context(), 1, groupStreams(g)))
		require.ErrorContains(t, v.Wait(t.Context()), "is not a checkpoint")
		text, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, "notes", string(text))
		require.NoError(t, v.Close())
	})
}
