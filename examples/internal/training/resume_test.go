package training_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// TestRun damages one checkpoint after the other. The program says which checkpoint it continues
// after, and does not begin again if all are damaged.
func TestRun(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, g.Close()) }()
	folder := filepath.Join(t.TempDir(), "run")
	x := &training.Resume{Folder: folder, Steps: 8}
	run := func() (lines []string, step int, err error) {
		x.Restore = func(*checkpoint.Saved) error { lines = append(lines, "restored"); return nil }
		x.Print = func(format string, args ...any) { lines = append(lines, fmt.Sprintf(format, args...)) }
		step, err = x.Run(testgpu.Context(t), g)
		return lines, step, err
	}
	lines, step, err := run()
	require.NoError(t, err)
	require.Zero(t, step)
	require.Equal(t, []string{"no checkpoint in " + folder + ": starting at step 1"}, lines)
	saveSteps(t, g, folder, 4, 8)
	old, last := filepath.Join(folder, "step-00000004"), filepath.Join(folder, "step-00000008")
	lines, step, err = run()
	require.NoError(t, err)
	require.Equal(t, 8, step)
	require.Equal(t, []string{"restored", "the training is complete: " + last + " has step 8 of 8"}, lines)
	require.NoError(t, os.Remove(filepath.Join(last, "manifest.json")))
	lines, step, err = run()
	require.NoError(t, err)
	require.Equal(t, 4, step)
	require.Len(t, lines, 3)
	require.Contains(t, lines[0], "skipped "+last+": checkpoint: ")
	require.Equal(t, []string{"restored", "resumed at step 4 from " + old}, lines[1:])
	require.NoError(t, os.Remove(filepath.Join(old, "manifest.json")))
	lines, _, err = run()
	require.EqualError(t, err, "resume: none of the 2 checkpoints in "+folder+" is complete: see chorus checkpoint verify "+folder+", or start without -resume")
	require.Len(t, lines, 2)
	require.Contains(t, lines[1], "skipped "+old)
}

func saveSteps(t *testing.T, g *comm.Group, folder string, steps ...int64) {
	t.Helper()
	s, err := stream.New(g.Device(0), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	data, err := memory.MakeFrom(s, []float32{1, 2})
	require.NoError(t, err)
	defer func() { require.NoError(t, data.Close()) }()
	of, err := tensor.Of(data, 2)
	require.NoError(t, err)
	saver, err := checkpoint.NewSaver(testgpu.Context(t), g, folder, [][]checkpoint.Part{{{Name: "x", Data: of}}}, nil)
	require.NoError(t, err)
	for _, step := range steps {
		require.NoError(t, saver.Save(testgpu.Context(t), step, []*stream.Stream{s}))
	}
	require.NoError(t, saver.Close())
}
