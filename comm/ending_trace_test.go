package comm_test

import (
	"errors"
	"fmt"
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
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/internal/testhost"
)

// A rank that closes its group, and each rank that then fails, writes a file that says how the group ended there. Err
// of a survivor returns at once, and its Wait does not wait for a job that knows nothing.
func TestEveryRankWritesItsRecorder(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(env.NCCLTraceFile.Name, filepath.Join(dir, "trace-"))
	t.Setenv(env.CommStrategy.Name, "nccl") // a rank with Chorus kernels holds a lock while its stream sleeps, which stops virtual time
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 3}, func(t *testing.T, devs []*device.Device) {
		gs := joinLimited(t, devs, time.Minute)
		reduce := func(gs ...*comm.Group) {
			xs := make([]comm.Shards[float32], len(gs))
			for i, g := range gs {
				xs[i], _ = shards(t, g, 8)
			}
			groups.Each(t, gs, func(i int, g *comm.Group) error { return comm.AllReduce(g, comm.Sum, xs[i]...) })
		}
		reduce(gs...) // connects the ranks
		reduce(gs[0], gs[2])
		require.NoError(t, gs[1].Close())
		closed := time.Now()
		for _, g := range []*comm.Group{gs[0], gs[2]} {
			for {
				begun := time.Now()
				err := g.Err()
				require.Less(t, time.Since(begun), 2*time.Second, "Err asks nobody")
				if err != nil {
					break
				}
				time.Sleep(time.Millisecond)
			}
			require.ErrorIs(t, g.Wait(testgpu.Context(t)), comm.ErrBroken)
			require.Contains(t, g.Err().Error(), "rank 1")
		}
		require.Less(t, time.Since(closed), 2500*time.Millisecond, "the end of the peer is known")
	})
	for rank := range 3 {
		text, err := os.ReadFile(filepath.Join(dir, "trace-"+string(rune('0'+rank))))
		require.NoError(t, err)
		if rank == 1 {
			require.Contains(t, string(text), `"end":"this process closed the group"`)
		} else {
			require.Contains(t, string(text), `"end":"nccl: `)
		}
	}
	job, err := analyze.Load([]string{dir}, nil)
	require.NoError(t, err)
	r := job.Analyze()
	require.Contains(t, []string{analyze.KindFailed, analyze.KindBehind}, r.Kind, r.Verdict)
	require.Equal(t, 1, *r.Culprits[0].World)
}

// TestEveryEndLeavesFiles lets rank 1 of 4 processes end in ten ways. Each rank that can still write leaves its flight
// recorder, which says how the group ended there, and the files together name rank 1.
func TestEveryEndLeavesFiles(t *testing.T) {
	testhost.Timed(t)
	t.Parallel()
	ended := []string{analyze.KindBehind, analyze.KindFailed} // the other ranks may not have issued their operation
	for _, c := range []struct {
		way    string
		writes bool // rank 1
		kinds  []string
	}{
		{"error", true, ended},
		{"panic", true, ended},
		{"close", true, ended},
		{"absent", true, []string{analyze.KindBehind}},
		{"other", true, []string{analyze.KindMismatch, analyze.KindBehind}},
		{"fewer", true, []string{analyze.KindMismatch, analyze.KindBehind}},
		{"refused", true, []string{analyze.KindFailed, analyze.KindBehind}},
		{"exit", false, []string{analyze.KindMissing}},
		{"kill", false, []string{analyze.KindMissing}},
		{"stop", false, []string{analyze.KindMissing}},
	} {
		t.Run(c.way, func(t *testing.T) {
			const ranks = 4
			dir := t.TempDir()
			code, out, _ := job(t, "virtual", c.way, ranks, timeoutVar+"=4s", env.VirtualDevices.Name+"=4", env.NCCLTraceFile.Name+"="+filepath.Join(dir, "trace-"))
			require.NotZero(t, code, out)
			for rank := range ranks {
				text, err := os.ReadFile(filepath.Join(dir, fmt.Sprint("trace-", rank)))
				if rank == 1 && !c.writes {
					require.ErrorIs(t, err, os.ErrNotExist)
					continue
				}
				require.NoError(t, err, "rank %d\n%s", rank, out)
				require.Contains(t, string(text), `"end":"`, "rank %d\n%s", rank, out)
			}
			files, err := analyze.Load([]string{dir}, nil)
			require.NoError(t, err)
			r := files.Analyze()
			require.Contains(t, c.kinds, r.Kind, "%s\n%s", r.Verdict, out)
			require.Len(t, r.Culprits, 1, r.Verdict)
			require.NotNil(t, r.Culprits[0].World, r.Verdict)
			require.Equal(t, 1, *r.Culprits[0].World, r.Verdict)
		})
	}
}

// The memory of a broken group is free for another stream that waits for the group's stream before Close.
func TestMemoryAfterABrokenGroup(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		gs := joinLimited(t, devs, time.Minute)
		var bufs [2]comm.Shards[float32]
		for i, g := range gs {
			bufs[i], _ = shards(t, g, 1<<16)
		}
		groups.Each(t, gs, func(i int, g *comm.Group) error {
			return errors.Join(comm.AllReduce(g, comm.Sum, bufs[i]...), g.Wait(ctx))
		}) // connects the ranks
		require.NoError(t, comm.AllReduce(gs[0], comm.Sum, bufs[0]...))
		require.NoError(t, gs[1].Close())
		require.ErrorIs(t, gs[0].Wait(ctx), comm.ErrBroken)
		s := streamtest.NewStream(t, devs[0])
		require.NoError(t, s.WaitStream(gs[0].Stream(0)))
		require.NoError(t, gs[0].Close())
		require.NoError(t, bufs[0][0].Zero(s))
		require.NoError(t, s.Sync(ctx))
	})
}
