package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/internal/launch"
	"github.com/gochorus/chorus/internal/testgpu"
)

// The test binary is the program when this is set.
const asRank = "RECOVERY_TEST_RANK"

func TestMain(m *testing.M) {
	if os.Getenv(asRank) != "" {
		main()
		return
	}
	testgpu.Main(m)
}

// All survivors report the error, and the ranks work together again.
func TestRecovery(t *testing.T) {
	self, err := os.Executable()
	require.NoError(t, err)
	var out bytes.Buffer
	code := launch.Run(testgpu.Context(t), &launch.Config{
		Program: []string{self, "-queued", "20", "-elements", "1000", "-mark", t.TempDir() + "/mark"},
		Procs:   3,
		Devices: launch.Devices{Count: 3, Backend: "virtual", Env: []string{asRank + "=1", "CHORUS_BACKEND=virtual"}},
		Cluster: cluster.Config{Job: "recovers", MaxRestarts: 1},
		Stdout:  &out,
		Stderr:  &out,
	})
	text := out.String()
	require.Zero(t, code, text)
	for _, want := range []string{"rank 0, error: ", "rank 1, error: ", "rank 0, group closed: ", "of 3 ranks, first all-reduce: "} {
		require.Contains(t, text, want)
	}
	require.NotContains(t, text, "rank 2, error")
}
