package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
)

// loseRank saves while the last rank is killed before it has written its file. Rank 0 waits for
// the file, and the others wait for rank 0.
func loseRank(t *testing.T, ctx context.Context, g *comm.Group) {
	folder := filepath.Join(os.Getenv(folderVar), "run")
	parts, _ := layOutParts(t, rand.New(rand.NewPCG(1, 2)), g, []stateTensor{{"a", []int{30}, make([]int32, 30)}}, true)
	fs := &failingFiles{systemFiles: systemFiles{folder}, kill: true}
	v, err := newSaver(ctx, g, folder, parts, nil, fs)
	require.NoError(t, err)
	require.NoError(t, v.Save(ctx, 0, groupStreams(g)))
	require.NoError(t, v.Wait(ctx))
	if last := g.Size() - 1; g.Rank() == last {
		require.NoError(t, poll.Until(ctx, func() (bool, error) { // the others wait for this rank
			done, err := filepath.Glob(filepath.Join(folder, fencePrefix+"*", tempPrefix+stepName(1)+"*", "rank-*.done"))
			return len(done) == last, err
		}))
		fs.mu.Lock()
		fs.calls, fs.at = 0, 2
		fs.mu.Unlock()
	}
	require.NoError(t, v.Save(ctx, 1, groupStreams(g)))
	fmt.Println("save says:", strings.ReplaceAll(v.Close().Error(), "\n", " "))
	_, _, err = Latest(ctx, g, folder)
	fmt.Println("load says:", strings.ReplaceAll(err.Error(), "\n", " "))
}

// TestLostRankEndsASave: the ranks that wait for a lost one do not wait for Timeout, and their
// errors name the lost rank.
func TestLostRankEndsASave(t *testing.T) {
	backends(t, 3, func(t *testing.T, backend string, ranks int) {
		code, out := runJob(t, backend, "lost", ranks)
		require.NotZero(t, code, out)
		require.NotContains(t, out, context.DeadlineExceeded.Error())
		for rank := range ranks - 1 {
			for _, what := range []string{"save", "load"} {
				require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] %s says: checkpoint: .*rank %d`, rank, what, ranks-1), out)
			}
		}
	})
}

// killedVar lets TestKilledSaves be the process that is killed at this call of a save, and
// folderVar says where it saves.
const killedVar = "CHECKPOINT_TEST_KILLED"

// savesUntilKilled completes the checkpoints of steps 0 and 1. Then step 2 replaces step 0 by the
// policy, and is killed at a call. It returns if the save has fewer calls.
func savesUntilKilled(t *testing.T, at int) {
	g := localGroup(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	fs := &failingFiles{systemFiles: systemFiles{os.Getenv(folderVar)}, kill: true}
	v, err := newSaver(t.Context(), g, os.Getenv(folderVar), killedParts(t, g, true), &SaverConfig{KeepLast: 2}, fs)
	require.NoError(t, err)
	for step := range int64(3) {
		if step == 2 {
			fs.mu.Lock()
			fs.calls, fs.at = 0, at
			fs.mu.Unlock()
		}
		require.NoError(t, v.Save(t.Context(), step, groupStreams(g), step, step))
		require.NoError(t, v.Wait(t.Context()))
	}
	require.NoError(t, v.Close())
}

func killedParts(t *testing.T, g *comm.Group, fill bool) [][]Part {
	model := []stateTensor{{"a", []int{3, 5}, make([]int32, 15)}, {"b", nil, []int32{9}}}
	parts, _ := layOutParts(t, rand.New(rand.NewPCG(1, 2)), g, model, fill)
	return parts
}

// TestKilledSaves kills a process before each call of a save: the newest complete checkpoint loads,
// and the next Saver removes the rest. With -race it takes every seventh call.
func TestKilledSaves(t *testing.T) {
	if text := os.Getenv(killedVar); text != "" {
		var at int
		_, err := fmt.Sscan(text, &at)
		require.NoError(t, err)
		savesUntilKilled(t, at)
		return
	}
	self, err := os.Executable()
	require.NoError(t, err)
	stride := 1
	if testhost.On {
		stride = 7
	}
	killed, seen := 0, map[int64]bool{}
	for at := 1; ; at += stride {
		folder := t.TempDir()
		cmd := exec.CommandContext(t.Context(), self, "-test.run=^TestKilledSaves$")
		cmd.Env = append(os.Environ(), fmt.Sprint(killedVar, "=", at), folderVar+"="+folder)
		out, err := cmd.CombinedOutput()
		exit, failed := errors.AsType[*exec.ExitError](err)
		if failed {
			require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal(), "call %d: %s", at, out)
			killed++
		} else {
			require.NoError(t, err, "%s", out)
		}
		step := afterKill(t, folder, at)
		seen[step] = true
		if !failed {
			require.EqualValues(t, 2, step)
			break
		}
	}
	require.Greater(t, killed, 30/stride)
	require.Len(t, seen, 2, "%v", seen)
}

// afterKill loads the newest checkpoint and returns its step. Then a new Saver continues.
func afterKill(t *testing.T, folder string, at int) int64 {
	var step int64
	onVirtual(t, 2, func(t *testing.T, devs []*device.Device) {
		g := localGroup(t, devs)
		saved, skipped, err := Latest(t.Context(), g, folder)
		require.NoError(t, err)
		require.Empty(t, skipped, "call %d", at)
		require.NotNil(t, saved, "call %d", at)
		defer saved.Close()
		step = saved.Step()
		require.Contains(t, []int64{1, 2}, step, "call %d", at)
		parts := killedParts(t, g, false)
		_, err = saved.Restore(t.Context(), g, parts, nil)
		require.NoError(t, err)
		v, err := NewSaver(t.Context(), g, folder, parts, &SaverConfig{KeepLast: 2})
		require.NoError(t, err)
		hidden, err := filepath.Glob(filepath.Join(folder, tempPrefix+"*"))
		require.NoError(t, err)
		require.Empty(t, hidden, "call %d", at)
		require.NoError(t, v.Save(t.Context(), 3, groupStreams(g)))
		require.NoError(t, v.Close())
		left, err := os.ReadDir(folder)
		require.NoError(t, err)
		require.Len(t, left, 2, "call %d", at)
	})
	return step
}
