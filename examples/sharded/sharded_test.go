package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// The test binary is the program when this is set.
const asWorker = "SHARDED_TEST_WORKER"

func TestMain(m *testing.M) {
	if os.Getenv(asWorker) != "" {
		main()
		return
	}
	testgpu.AllowStalls()
	testgpu.Main(m)
}

// The losses are those of a run in which every rank has the whole state, and those
// of PyTorch.
func TestLosses(t *testing.T) {
	drawn := testgpu.Draw(t, 2, 2)
	for ranks := 1; ranks <= 4; ranks++ {
		if !drawn(ranks - 1) {
			continue
		}
		t.Run(fmt.Sprintf("ranks=%d", ranks), func(t *testing.T) {
			testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
				got, err := train(testgpu.Context(t), group(t, devs), &config{})
				require.NoError(t, err)
				want := unsharded(t, group(t, devs))
				require.Len(t, got.Losses, training.Epochs*training.Steps)
				for i, w := range want.Losses {
					require.InEpsilon(t, w, got.Losses[i], 1e-6, "loss of step %d", i)
				}
				require.InDelta(t, want.TestAccuracy, got.TestAccuracy, 1./261) // a row
				check(t, got, ranks)
			})
		})
	}
}

// The same in a process for each rank.
func TestProcesses(t *testing.T) {
	for _, backend := range []string{"virtual", "cuda"} {
		t.Run(backend, func(t *testing.T) {
			const ranks = 3
			if backend == "cuda" {
				testgpu.CUDA(t, ranks)
			}
			file := filepath.Join(t.TempDir(), "result.json")
			self, err := os.Executable()
			require.NoError(t, err)
			var out bytes.Buffer
			code := launch.Run(testgpu.Context(t), &launch.Config{
				Program: []string{self, "-json", file},
				Procs:   ranks,
				Devices: launch.Devices{Count: ranks, Backend: backend, Env: []string{asWorker + "=1", "CHORUS_BACKEND=" + backend}},
				Stdout:  &out,
				Stderr:  &out,
			})
			require.Zero(t, code, out.String())
			b, err := os.ReadFile(file)
			require.NoError(t, err)
			got := new(training.Result)
			require.NoError(t, json.Unmarshal(b, got))
			check(t, got, ranks)
			require.Equal(t, backend, got.Backend)
		})
	}
}

// check compares with PyTorch, and the state with the model.
func check(t *testing.T, got *training.Result, ranks int) {
	t.Helper()
	want, err := training.Reference()
	require.NoError(t, err)
	require.Len(t, got.Losses, len(want))
	worst := 0.0
	for i, w := range want {
		e := math.Abs(float64(got.Losses[i])-w) / w
		require.Less(t, e, 1e-3, "loss of step %d: %v: want %v", i, got.Losses[i], w)
		worst = max(worst, e)
	}
	t.Logf("largest relative difference to PyTorch %.1e, %d bytes of state", worst, got.StateBytes)
	require.Equal(t, ranks, got.Ranks)
	params := 0
	for _, n := range training.ParamLens {
		params += 4 * n
	}
	require.GreaterOrEqual(t, got.StateBytes*ranks, params)
	require.Less(t, got.StateBytes*ranks, params+2*16*ranks+16*len(training.ParamLens), "padding only")
}

func group(t *testing.T, devs []*device.Device) *comm.Group {
	t.Helper()
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

// unsharded trains with all momenta on each rank, and reduces whole gradients.
func unsharded(t *testing.T, g *comm.Group) *training.Result {
	t.Helper()
	tr := training.Trainer{Group: g}
	var flats [][3]memory.Slice[float32] // parameters, gradients, momenta
	var grads [][]memory.Slice[float32]
	for i := range g.Locals() {
		m, err := training.NewModel(g.Device(i))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, m.Close()) })
		var flat [3]memory.Slice[float32]
		var parts [3][]memory.Slice[float32]
		for k := range flat {
			flat[k], parts[k], err = memory.MakeFlat[float32](m.Stream, training.ParamLens...)
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, flat[k].Close()) })
			require.NoError(t, flat[k].Zero(m.Stream))
		}
		m.Params, m.Grads = parts[0], parts[1]
		require.NoError(t, m.Init())
		tr.Models, flats, grads = append(tr.Models, m), append(flats, flat), append(grads, m.Grads)
	}
	red, err := ddp.NewReducer(g, grads, &ddp.ReducerConfig{Op: new(comm.Sum)})
	require.NoError(t, err)
	defer red.Close()
	tr.Ready = red.Ready
	tr.Update = func() error {
		if err := red.Finish(tr.Streams()...); err != nil {
			return err
		}
		for i, m := range tr.Models {
			if err := m.SGD(flats[i][0], flats[i][2], flats[i][1]); err != nil {
				return err
			}
		}
		return nil
	}
	res, err := tr.Run(testgpu.Context(t))
	require.NoError(t, err)
	return res
}
