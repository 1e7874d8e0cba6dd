package checkpoint

import (
	"context"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// saveSteps saves a tensor "w" in the given steps. Each step has the number of the step as its elements.
func saveSteps(t *testing.T, dev *device.Device, folder string, steps ...int64) {
	g := localGroup(t, []*device.Device{dev})
	for _, step := range steps {
		n := int32(step)
		w := makeTensor(t, g.Stream(0), []int32{n, n, n}, []int{3})
		v, err := NewSaver(t.Context(), g, folder, [][]Part{{{Name: "w", Data: w}}}, nil)
		require.NoError(t, err)
		require.NoError(t, v.Save(t.Context(), step, groupStreams(g)))
		require.NoError(t, v.Close())
	}
}

// A refusal is a call of Restore by three ranks in which one or several ranks must refuse.
type refusal struct {
	step  func(rank int) int64
	cfg   func(rank int) *RestoreConfig
	names func(rank int) []string // of the rank's parts
	says  []string
}

func (x *refusal) restore(t *testing.T, ctx context.Context, g *comm.Group, folder string) (*Restored, error) {
	step, names, cfg := int64(1), []string{"w"}, (*RestoreConfig)(nil)
	if x.step != nil {
		step = x.step(g.Rank())
	}
	if x.names != nil {
		names = x.names(g.Rank())
	}
	if x.cfg != nil {
		cfg = x.cfg(g.Rank())
	}
	s, err := OpenSaved(filepath.Join(folder, stepName(step)))
	require.NoError(t, err)
	defer s.Close()
	var parts []Part
	for _, name := range names {
		parts = append(parts, Part{Name: name, Data: makeTensor(t, g.Stream(0), make([]int32, 3), []int{3})})
	}
	return s.Restore(ctx, g, [][]Part{parts}, cfg)
}

// TestRanksAgreeToRestore lets ranks of several processes disagree. All ranks return soon, and their
// errors say why. Then the group restores.
func TestRanksAgreeToRestore(t *testing.T) {
	last := func(rank int) bool { return rank == 2 }
	for name, x := range map[string]refusal{
		"other step": {step: func(rank int) int64 {
			if last(rank) {
				return 2
			}
			return 1
		}, says: []string{"rank 2", "has opened step 2", "rank 0 step 1", stepName(1)}},
		"other Partial": {cfg: func(rank int) *RestoreConfig { return &RestoreConfig{Partial: !last(rank)} },
			names: func(int) []string { return []string{"w", "absent"} },
			says:  []string{"rank 2", `the checkpoint lacks tensors ["absent"]: set Partial`}},
		"other Rename": {cfg: func(rank int) *RestoreConfig { // without any tensor, the last rank would not wait for the others
			return &RestoreConfig{Partial: true, Rename: func(name string) string {
				if last(rank) {
					return "absent"
				}
				return name
			}}
		}, says: []string{"has another plan, other files or other options"}},
	} {
		t.Run(name, func(t *testing.T) {
			onVirtual(t, 3, func(t *testing.T, devs []*device.Device) {
				folder := t.TempDir()
				saveSteps(t, devs[0], folder, 1, 2)
				gs := joined(t, devs)
				results, errs := restoreOnAll(t, gs, folder, &x)
				for rank, err := range errs {
					require.Error(t, err, "rank %d", rank)
					require.Nil(t, results[rank])
					for _, says := range x.says {
						require.ErrorContains(t, err, says, "rank %d", rank)
					}
				}
				_, errs = restoreOnAll(t, gs, folder, &refusal{})
				require.Equal(t, make([]error, len(gs)), errs, "the group still restores")
			})
		})
	}
}

// joined returns a group of several processes, each with one rank.
func joined(t *testing.T, devs []*device.Device) []*comm.Group {
	gs, errs := make([]*comm.Group, len(devs)), make([]error, len(devs))
	var wg sync.WaitGroup
	for i, b := range testgpu.Exchanges(testgpu.Context(t), len(devs)) {
		wg.Go(func() { gs[i], errs[i] = comm.Join(testgpu.Context(t), b, devs[i], nil) })
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, g := range gs {
			wg.Go(func() { _ = g.Close() })
		}
		wg.Wait()
	})
	require.Equal(t, make([]error, len(gs)), errs)
	return gs
}

func restoreOnAll(t *testing.T, gs []*comm.Group, folder string, x *refusal) ([]*Restored, []error) {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	results, errs := make([]*Restored, len(gs)), make([]error, len(gs))
	var wg sync.WaitGroup
	for rank, g := range gs {
		wg.Go(func() { results[rank], errs[rank] = x.restore(t, ctx, g, folder) })
	}
	wg.Wait()
	require.NoError(t, ctx.Err(), "the ranks wait for each other")
	return results, errs
}

// TestLatestComparesTheSaves: one rank sees another save of the newest step, because its folder is not the
// same. All ranks skip that step.
func TestLatestComparesTheSaves(t *testing.T) {
	onVirtual(t, 3, func(t *testing.T, devs []*device.Device) {
		same, other := t.TempDir(), t.TempDir()
		saveSteps(t, devs[0], same, 1, 2)
		saveSteps(t, devs[0], other, 2)
		copyFolder(t, filepath.Join(same, stepName(1)), filepath.Join(other, stepName(1)))
		gs := joined(t, devs)
		var wg sync.WaitGroup
		steps, reasons, errs := make([]int64, len(gs)), make([]string, len(gs)), make([]error, len(gs))
		for rank, g := range gs {
			folder := same
			if rank == 1 {
				folder = other
			}
			wg.Go(func() {
				saved, skipped, err := Latest(t.Context(), g, folder)
				if errs[rank] = err; err != nil || saved == nil || len(skipped) != 1 {
					return
				}
				steps[rank], reasons[rank] = saved.Step(), skipped[0].Reason
				errs[rank] = saved.Close()
			})
		}
		wg.Wait()
		require.Equal(t, make([]error, len(gs)), errs)
		require.Equal(t, []int64{1, 1, 1}, steps)
		for _, reason := range reasons {
			require.Equal(t, "rank 1 sees another checkpoint of this step than rank 0", reason)
		}
	})
}
