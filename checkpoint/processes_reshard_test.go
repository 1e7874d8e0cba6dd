package checkpoint

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// What a process of TestProcessesReshard does.
const (
	savesModel    = "model to the folder"
	restoresModel = "model from the folder"
)

// saveModel saves the random model of a seed in a layout that the number of ranks decides.
func saveModel(t *testing.T, ctx context.Context, g *comm.Group, folder string, seed uint64) {
	model := randomState(rand.New(rand.NewPCG(seed, 6)))
	r := rand.New(rand.NewPCG(seed, uint64(10+g.Size())))
	parts, _ := layOutParts(t, r, g, model, true)
	v, err := NewSaver(ctx, g, folder, parts, &SaverConfig{HostBytes: int64(r.IntN(2) * 5000)})
	require.NoError(t, err)
	require.NoError(t, v.Save(ctx, 7, groupStreams(g)))
	require.NoError(t, v.Close())
}

// restoreModel restores the model of saveModel in another layout, and compares every element.
func restoreModel(t *testing.T, ctx context.Context, g *comm.Group, folder string, seed uint64) {
	model := randomState(rand.New(rand.NewPCG(seed, 6)))
	r := rand.New(rand.NewPCG(seed, uint64(100+g.Size())))
	parts, wants := layOutParts(t, r, g, model, false)
	saved, skipped, err := Latest(ctx, g, folder)
	require.NoError(t, err)
	require.Empty(t, skipped)
	require.NotNil(t, saved)
	defer saved.Close()
	_, err = saved.Restore(ctx, g, parts, &RestoreConfig{RoundBytes: 1 << (6 + r.IntN(12))})
	require.NoError(t, err)
	checkParts(t, g, parts, wants)
}

// A team is ranks in several processes of one rank each, or in one process.
type team struct {
	ranks int
	alone bool // in one process
}

func (m team) String() string {
	if m.alone {
		return fmt.Sprintf("1 process of %d ranks", m.ranks)
	}
	return fmt.Sprintf("%d processes", m.ranks)
}

// run lets the team save or restore the model.
func (m team) run(t *testing.T, backend, deed, folder string, seed uint64) {
	if !m.alone {
		code, out := runJobIn(t, backend, deed, m.ranks, folder, seed)
		require.Zero(t, code, out)
		return
	}
	work := saveModel
	if deed == restoresModel {
		work = restoreModel
	}
	var devs []*device.Device
	if backend == "virtual" {
		devs = testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: m.ranks})
	} else {
		devs = testgpu.CUDA(t, m.ranks)
	}
	work(t, t.Context(), localGroup(t, devs), folder, seed)
}

// TestProcessesReshard saves random models by some processes, and restores them by another number
// of processes, or by several ranks of one process, and the other way round.
func TestProcessesReshard(t *testing.T) {
	backends(t, 3, func(t *testing.T, backend string, most int) {
		all := []team{{most, false}, {most - 1, false}, {most + 1, true}}
		if backend != "virtual" {
			all[2].ranks = most
		}
		for _, from := range all {
			for _, to := range all {
				if from == to {
					continue
				}
				seed := rand.Uint64()
				t.Run(fmt.Sprintf("seed=%d,%v to %v", seed, from, to), func(t *testing.T) {
					folder := t.TempDir()
					from.run(t, backend, savesModel, folder, seed)
					to.run(t, backend, restoresModel, folder, seed)
				})
			}
		}
	})
}
