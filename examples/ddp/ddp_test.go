package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/examples/internal/training"
	"github.com/gochorus/chorus/internal/job"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
)

// The test binary is the program when this is set.
const asWorker = "DDP_TEST_WORKER"

func TestMain(m *testing.M) {
	if os.Getenv(asWorker) != "" {
		main()
		return
	}
	testgpu.AllowStalls()
	testgpu.Main(m)
}

// The losses are those of PyTorch for a drawn number of ranks, also where the
// ranks' parts of a batch differ in size.
func TestLossesAreThoseOfPyTorch(t *testing.T) {
	drawn := testgpu.Draw(t, 4)
	for _, backend := range []string{"virtual", "cuda"} {
		for ranks := 1; ranks <= 4; ranks++ {
			if !drawn(ranks - 1) {
				continue
			}
			t.Run(fmt.Sprintf("%s/ranks=%d", backend, ranks), func(t *testing.T) {
				if backend == "cuda" {
					testgpu.CUDA(t, ranks)
				}
				check(t, runJob(t, backend, ranks), backend, ranks)
			})
		}
	}
}

// runJob runs the program on one host and returns its results.
func runJob(t *testing.T, backend string, ranks int) *training.Result {
	t.Helper()
	return runOn(t, backend, ranks, job.Config{})
}

// runOn runs ranks processes on each of the hosts, which this machine plays all,
// and returns the results of the host that has rank 0.
func runOn(t *testing.T, backend string, ranks int, hosts ...job.Config) *training.Result {
	t.Helper()
	file := filepath.Join(t.TempDir(), "result.json")
	self, err := os.Executable()
	require.NoError(t, err)
	out := make([]bytes.Buffer, len(hosts))
	codes := make([]int, len(hosts))
	var wg sync.WaitGroup
	for i, h := range hosts {
		wg.Go(func() {
			codes[i] = launch.Run(testgpu.Context(t), &launch.Config{
				Program: []string{self, "-json", file},
				Procs:   ranks,
				Devices: launch.Devices{Count: ranks, Backend: backend, Env: []string{asWorker + "=1", "CHORUS_BACKEND=" + backend}},
				Cluster: h,
				Stdout:  &out[i],
				Stderr:  &out[i],
			})
		})
	}
	wg.Wait()
	for i := range hosts {
		require.Zero(t, codes[i], "host %d: %s", i, out[i].String())
	}
	require.Contains(t, out[0].String(), "[rank 0] epoch 10 of 10: loss 0.06")
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	res := new(training.Result)
	require.NoError(t, json.Unmarshal(b, res))
	return res
}

// Two hosts, each with its own launcher and its own virtual devices, of which the other
// one's processes cannot map the memory: own kernels leave it to NCCL.
func TestTwoHosts(t *testing.T) {
	for _, strategy := range []string{"nccl", "own"} {
		t.Run(strategy, func(t *testing.T) {
			t.Setenv("CHORUS_COMM_STRATEGY", strategy)
			seed := net.JoinHostPort("127.0.0.1", strconv.Itoa(testhost.Reserve(t)))
			host := func(n string) job.Config {
				return job.Config{Job: "two", Nodes: 2, Host: "host" + n, Bind: "127.0.0." + n, Seeds: []string{seed},
					Secret: []byte("sixteen bytes or more")}
			}
			first := host("1")
			first.Bind = seed
			check(t, runOn(t, "virtual", 2, first, host("2")), "virtual", 4)
		})
	}
}

func check(t *testing.T, got *training.Result, backend string, ranks int) {
	t.Helper()
	want, err := training.Reference()
	require.NoError(t, err)
	require.Len(t, got.Losses, 60)
	worst := 0.0
	for i, w := range want {
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
