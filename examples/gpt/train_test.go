package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// A run that stops after half of its steps and is resumed has the losses of an undisturbed run: the
// same bits on the same number of ranks, and the same up to rounding on another number.
func TestResume(t *testing.T) {
	for _, x := range []struct {
		bf16, graph bool
		from, to    int
	}{{true, true, 2, 2}, {false, true, 2, 1}} {
		t.Run(fmt.Sprintf("%+v", x), func(t *testing.T) {
			testgpu.Each(t, max(x.from, x.to), func(t *testing.T, devs []*device.Device) {
				const half, all = 1, 3
				dir := t.TempDir()
				cfg := config{steps: all, accum: 1, graph: x.graph, bf16: x.bf16}
				want := trainOn(t, devs[:x.from], cfg)
				cfg.ckpt, cfg.every, cfg.resume = filepath.Join(dir, "run"), 1, true // nothing to resume yet
				cfg.steps = half
				got := trainOn(t, devs[:x.from], cfg)
				require.Zero(t, got.First)
				require.Equal(t, want.Losses[:half], got.Losses, "saving changes nothing")
				left, err := os.ReadDir(cfg.ckpt)
				require.NoError(t, err)
				require.Len(t, left, half)
				cfg.steps = all
				got = trainOn(t, devs[:x.to], cfg)
				require.Equal(t, half, got.First)
				require.Len(t, got.Losses, all-half)
				for i, w := range want.Losses[half:] {
					if x.from == x.to {
						require.Equal(t, w, got.Losses[i], "loss of step %d", half+i)
						require.Equal(t, want.GradNorms[half+i], got.GradNorms[i], "norm of step %d", half+i)
					}
					require.InEpsilon(t, w, got.Losses[i], 1e-3, "loss of step %d", half+i)
				}
			})
		})
	}
}

func trainOn(t *testing.T, devs []*device.Device, cfg config) *result {
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.Close()) }()
	res, err := trainGroup(testgpu.Context(t), g, &cfg)
	require.NoError(t, err)
	return res
}

// Flags without a folder are an error. A training that is complete is not.
func TestResumeErrors(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.Close()) }()
	_, err = trainGroup(testgpu.Context(t), g, &config{steps: 1, accum: 1, resume: true})
	require.ErrorContains(t, err, "need -ckpt")
	cfg := config{steps: 1, accum: 1, ckpt: t.TempDir(), resume: true}
	_, err = trainGroup(testgpu.Context(t), g, &cfg)
	require.NoError(t, err)
	res, err := trainGroup(testgpu.Context(t), g, &cfg)
	require.NoError(t, err)
	require.Contains(t, res.String(), "steps 0")
	require.NoError(t, os.Remove(filepath.Join(cfg.ckpt, "step-00000001", "manifest.json")))
	_, err = trainGroup(testgpu.Context(t), g, &cfg)
	require.ErrorContains(t, err, "none of the 1 checkpoints in "+cfg.ckpt+" is complete")
}
