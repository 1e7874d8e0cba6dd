package main

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/internal/testgpu"
)

// A run that is resumed in the middle of an epoch has the losses of an undisturbed run: the same
// bits on the same number of ranks, and the same up to rounding on another number.
func TestResume(t *testing.T) {
	const every, lost = 13, 52 // the newest checkpoint is of step 60, and is lost
	for _, x := range [][2]int{{1, 1}, {3, 3}, {3, 2}, {2, 4}} {
		t.Run(fmt.Sprintf("%d to %d", x[0], x[1]), func(t *testing.T) {
			testgpu.Each(t, max(x[0], x[1]), func(t *testing.T, devs []*device.Device) {
				cfg := &config{ckpt: filepath.Join(t.TempDir(), "run"), every: every, resume: true}
				want, err := train(testgpu.Context(t), group(t, devs[:x[0]]), cfg)
				require.NoError(t, err)
				require.Len(t, want.Losses, training.Epochs*training.Steps)
				require.NoError(t, os.RemoveAll(filepath.Join(cfg.ckpt, "step-00000060")))
				got, err := train(testgpu.Context(t), group(t, devs[:x[1]]), cfg)
				require.NoError(t, err)
				require.Equal(t, lost, got.First)
				require.Len(t, got.Losses, len(want.Losses)-lost)
				for i, w := range want.Losses[lost:] {
					if x[0] == x[1] {
						require.Equal(t, w, got.Losses[i], "loss of step %d", lost+i)
					}
					require.InEpsilon(t, w, got.Losses[i], 1e-5, "loss of step %d", lost+i)
				}
			})
		})
	}
}

// A run that is complete is not an error. A run without an undamaged checkpoint is an error.
func TestResumeComplete(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	cfg := &config{ckpt: filepath.Join(t.TempDir(), "run"), resume: true}
	want, err := train(testgpu.Context(t), group(t, devs), cfg)
	require.NoError(t, err)
	got, err := train(testgpu.Context(t), group(t, devs), cfg)
	require.NoError(t, err)
	require.Contains(t, got.String(), "steps 0, test accuracy")
	require.Equal(t, want.TestAccuracy, got.TestAccuracy)
	require.NoError(t, os.Remove(filepath.Join(cfg.ckpt, "step-00000060", "manifest.json")))
	_, err = train(testgpu.Context(t), group(t, devs), cfg)
	require.ErrorContains(t, err, "none of the 1 checkpoints in "+cfg.ckpt+" is complete")
}
