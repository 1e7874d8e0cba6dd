package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
)

//go:embed data/reference.json
var reference []byte

// The test binary is the program when this is set.
const asWorker = "DDP_TEST_WORKER"

func TestMain(m *testing.M) {
	if os.Getenv(asWorker) != "" {
		main()
		return
	}
	testgpu.Main(m)
}

// The losses are those of PyTorch for every number of ranks, also where the
// ranks' parts of a batch differ in size.
func TestLossesAreThoseOfPyTorch(t *testing.T) {
	for _, backend := range []string{"virtual", "cuda"} {
		for ranks := 1; ranks <= 4; ranks++ {
			t.Run(fmt.Sprintf("%s/ranks=%d", backend, ranks), func(t *testing.T) {
				if backend == "cuda" {
					testgpu.CUDA(t, ranks)
				}
				check(t, runJob(t, backend, ranks), backend, ranks)
			})
		}
	}
}

func runJob(t *testing.T, backend string, ranks int) *result {
	t.Helper()
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
	require.NoError(t, err, out.String())
	res := new(result)
	require.NoError(t, json.Unmarshal(b, res))
	require.Contains(t, out.String(), "[rank 0] epoch 10 of 10: loss 0.06")
	return res
}

func check(t *testing.T, got *result, backend string, ranks int) {
	t.Helper()
	var want struct{ Losses []float64 }
	require.NoError(t, json.Unmarshal(reference, &want))
	require.Len(t, got.Losses, 60)
	worst := 0.0
	for i, w := range want.Losses {
		e := max(w-float64(got.Losses[i]), float64(got.Losses[i])-w) / w
		require.Less(t, e, 1e-3, "loss of step %d: %v: want %v", i, got.Losses[i], w)
		worst = max(worst, e)
	}
	t.Logf("largest relative difference %.1e, test accuracy %.4f", worst, got.TestAccuracy)
	require.GreaterOrEqual(t, got.TestAccuracy, 0.88)
	require.Equal(t, ranks, got.Ranks)
	require.Equal(t, backend, got.Backend)
	require.Positive(t, got.Seconds)
}

func TestShare(t *testing.T) {
	for size := 1; size <= 7; size++ {
		next := 0
		for r := range size {
			from, to := share(batchRows, r, size)
			require.Equal(t, next, from)
			require.InDelta(t, float64(batchRows)/float64(size), to-from, 1)
			next = to
		}
		require.Equal(t, batchRows, next)
	}
}
