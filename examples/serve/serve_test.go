package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
)

// The test binary is the program if this is set.
const asWorker = "SERVE_TEST_WORKER"

func TestMain(m *testing.M) {
	if os.Getenv(asWorker) != "" {
		main()
		return
	}
	testgpu.AllowStalls()
	testgpu.Main(m)
}

// TestRanks checks that the result of several ranks is the result of one rank, with Chorus kernels
// and without.
func TestRanks(t *testing.T) {
	single := func(t *testing.T, dev *device.Device) []float32 {
		g, err := comm.Local(testgpu.Context(t), []*device.Device{dev}, nil)
		require.NoError(t, err)
		want, _, err := serve(testgpu.Context(t), g, 1)
		require.NoError(t, errors.Join(err, g.Close()))
		return want
	}
	for _, ranks := range []int{2, 8} {
		t.Run(fmt.Sprint(ranks), func(t *testing.T) {
			testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
				want := single(t, devs[0])
				for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
					g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{Strategy: s})
					require.NoError(t, err)
					got, _, err := serve(testgpu.Context(t), g, 2)
					require.NoError(t, err)
					require.NoError(t, g.Close())
					require.InDeltaSlice(t, want, got, bound)
				}
			})
		})
	}
}

// TestHeads checks a number of ranks that does not divide the heads.
func TestHeads(t *testing.T) {
	g, err := comm.Local(testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), nil)
	require.NoError(t, err)
	defer g.Close()
	_, _, err = serve(testgpu.Context(t), g, 1)
	require.ErrorContains(t, err, "8 heads on 3 ranks")
}

// TestProcesses runs the program with one process for each rank. The result that it prints is that of one rank.
func TestProcesses(t *testing.T) {
	for _, backend := range []string{"virtual", "cuda"} {
		t.Run(backend, func(t *testing.T) {
			const ranks = 2
			if backend == "cuda" {
				testgpu.Ranks(t, ranks)
			}
			self, err := os.Executable()
			require.NoError(t, err)
			var out bytes.Buffer
			code := launch.Run(testgpu.Context(t), &launch.Config{
				Program: []string{self, "-steps", "2"},
				Procs:   ranks,
				Devices: launch.Devices{Count: ranks, Backend: backend, Env: []string{asWorker + "=1", "CHORUS_BACKEND=" + backend}},
				Stdout:  &out,
				Stderr:  &out,
			})
			require.Zero(t, code, out.String())
			require.Regexp(t, `3 layers on 2 ranks, all-reduces by own: .* for each step of 16 tokens`, out.String())
			printed := regexp.MustCompile(`the last token is \[(.*)\]`).FindStringSubmatch(out.String())
			require.NotNil(t, printed, out.String())
			g, err := comm.Local(testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}), nil)
			require.NoError(t, err)
			want, _, err := serve(testgpu.Context(t), g, 1)
			require.NoError(t, errors.Join(err, g.Close()))
			for i, x := range strings.Fields(printed[1]) {
				got, err := strconv.ParseFloat(x, 32)
				require.NoError(t, err)
				require.InDelta(t, want[len(want)-width+i], got, bound)
			}
		})
	}
}
