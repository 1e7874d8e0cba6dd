package checkpoint

import (
	"context"
	"errors"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/tensor"
)

var errGivenUp = errors.New("given up")

// endedContext returns a context that has ended by errGivenUp.
func endedContext(t *testing.T) context.Context {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errGivenUp)
	return ctx
}

// All calls with a ctx that has ended return its cause, with the operation.
func TestEndedContext(t *testing.T) {
	g := localGroup(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	ctx, folder, s := endedContext(t), t.TempDir(), g.Stream(0)
	w := makeTensor(t, s, make([]int32, 3), []int{3})
	path, steps := filepath.Join(folder, "w.safetensors"), filepath.Join(folder, "steps")
	require.NoError(t, SaveTensors(t.Context(), s, path, map[string]tensor.Tensor{"w": w}, nil))
	c, err := Open([]string{path}, nil)
	require.NoError(t, err)
	defer c.Close()
	weights, err := c.Load(t.Context(), g, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, closeAll(weights)) }()
	parts := [][]Part{{{Name: "w", Data: w}}, nil}
	v, err := NewSaver(t.Context(), g, steps, parts, nil)
	require.NoError(t, err)
	require.NoError(t, v.Save(t.Context(), 1, groupStreams(g)))
	require.NoError(t, v.Close())
	saved, err := OpenSaved(filepath.Join(steps, stepName(1)))
	require.NoError(t, err)
	defer saved.Close()
	for op, call := range map[string]func() error{
		"compare":      func() error { _, err := Compare(ctx, c, c); return err },
		"verify":       func() error { return c.Verify(ctx, weights[0]) },
		"digest":       func() error { _, err := c.SHA256(ctx, "w"); return err },
		"load":         func() error { _, err := c.Load(ctx, g, nil); return err },
		"reshard":      func() error { return Reshard(ctx, path, filepath.Join(folder, "new"), nil) },
		"export":       func() error { return c.Export(ctx, filepath.Join(folder, "new.safetensors"), nil) },
		"restore":      func() error { _, err := saved.Restore(ctx, g, parts, nil); return err },
		"save":         func() error { return Save(ctx, g, filepath.Join(folder, "new.safetensors"), weights, nil) },
		"write":        func() error { return SaveTensors(ctx, s, path, map[string]tensor.Tensor{"w": w}, nil) },
		"verify ":      func() error { return saved.Verify(ctx) },
		"latest":       func() error { _, _, err := Latest(ctx, g, steps); return err },
		"latest in":    func() error { _, _, err := Latest(ctx, g, folder); return err },
		"new saver":    func() error { _, err := NewSaver(ctx, g, steps, parts, nil); return err },
		"new transfer": func() error { _, err := NewTransfer(ctx, g, parts, parts[:0:0], nil); return err },
	} {
		err := call()
		require.ErrorIs(t, err, errGivenUp, op)
		require.Regexp(t, "^(checkpoint|gds): "+op, err)
		require.NotContains(t, err.Error(), "context canceled")
	}
	require.NoError(t, g.Err())
}

// If the ctx of one rank has ended, all ranks return its cause, and do not wait for the rank at the next checkpoint.
func TestLatestWithAnEndedContext(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	folder := t.TempDir()
	saveSteps(t, devs[0], folder, 1, 2)
	gs := joined(t, devs)
	errs := make([]error, len(gs))
	var wg sync.WaitGroup
	for rank, g := range gs {
		ctx := t.Context()
		if rank == 1 {
			ctx = endedContext(t)
		}
		wg.Go(func() { _, _, errs[rank] = Latest(ctx, g, folder) })
	}
	wg.Wait()
	require.ErrorIs(t, errs[1], errGivenUp)
	for _, err := range errs {
		require.ErrorContains(t, err, "checkpoint: latest in "+folder)
		require.ErrorContains(t, err, errGivenUp.Error())
	}
	for _, rank := range []int{0, 2} {
		require.ErrorContains(t, errs[rank], "rank 1: ")
	}
}

// The error of an argument has the operation once.
func TestArgumentErrorsNameTheOperationOnce(t *testing.T) {
	g := localGroup(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	_, err := NewTransfer(t.Context(), g, [][]Part{{}}, nil, nil)
	require.ErrorContains(t, err, "checkpoint: new transfer: rank 0: parts of 1 ranks: ")
	_, err = NewSaver(t.Context(), g, t.TempDir(), [][]Part{{}}, nil)
	require.ErrorContains(t, err, "checkpoint: new saver: rank 0: parts of 1 ranks: ")
	folder := t.TempDir()
	_, err = NewSaver(t.Context(), g, folder, [][]Part{{}, {}}, &SaverConfig{KeepLast: -1})
	require.ErrorContains(t, err, "checkpoint: new saver: rank 0: "+folder+": a number of the configuration is negative")
}
