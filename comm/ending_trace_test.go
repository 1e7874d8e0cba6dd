package comm_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/analyze"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
)

// A rank that closes its group, and each rank that then fails, writes a file that says how the group ended there. Err
// of a survivor returns at once, and its Wait does not wait for a job that knows nothing.
func TestEveryRankWritesItsRecorder(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(env.NCCLTraceFile.Name, filepath.Join(dir, "trace-"))
	gs := joinImpatient(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), time.Minute)
	for _, g := range []*comm.Group{gs[0], gs[2]} {
		xs, _ := shards(t, g, 8)
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
	}
	require.NoError(t, gs[1].Close())
	closed := time.Now()
	for _, g := range []*comm.Group{gs[0], gs[2]} {
		require.Eventually(t, func() bool {
			begun := time.Now()
			err := g.Err()
			require.Less(t, time.Since(begun), 2*time.Second, "Err asks nobody")
			return err != nil
		}, time.Minute, time.Millisecond)
		require.ErrorIs(t, g.Wait(testgpu.Context(t)), comm.ErrBroken)
		require.Contains(t, g.Err().Error(), "rank 1")
	}
	require.Less(t, time.Since(closed), 2500*time.Millisecond, "the end of the peer is known")
	for rank := range gs {
		text, err := os.ReadFile(filepath.Join(dir, "trace-"+string(rune('0'+rank))))
		require.NoError(t, err)
		if rank == 1 {
			require.Contains(t, string(text), `"end":"this process closed the group"`)
		} else {
			require.Contains(t, string(text), `"end":"nccl: `)
		}
	}
	job, err := analyze.Load([]string{dir})
	require.NoError(t, err)
	r := job.Analyze()
	require.Equal(t, analyze.KindBehind, r.Kind, r.Verdict)
	require.Equal(t, 1, *r.Culprits[0].World)
}
