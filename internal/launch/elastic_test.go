package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/cluster"
)

// elasticWorker meets the others in each step. It ends in a world of the given size from the
// given epoch on.
func elasticWorker(epoch, size string) int {
	first, err1 := strconv.Atoi(epoch)
	last, err2 := strconv.Atoi(size)
	if err := errors.Join(err1, err2); err != nil {
		panic(err)
	}
	err := cluster.Run(context.Background(), nil, func(ctx context.Context, w *cluster.World) (err error) {
		defer func() {
			if _, planned := errors.AsType[*cluster.ChangeError](err); planned && w.Step() != nil && ctx.Err() == nil {
				fmt.Printf("epoch %d ends at the end of a step\n", w.Epoch())
			}
		}()
		fmt.Printf("epoch %d is rank %d of %d pid %d restart %s\n", w.Epoch(), w.Rank(), w.Size(), os.Getpid(), os.Getenv("CHORUS_RESTART_COUNT"))
		for {
			if err := w.Step(); err != nil {
				return err
			}
			if err := w.Barrier(ctx, "step"); err != nil {
				return err
			}
			if w.Epoch() >= first && w.Size() == last {
				return nil
			}
		}
	})
	switch {
	case errors.Is(err, cluster.ErrDismissed):
		fmt.Println("dismissed")
		return 7
	case err != nil:
		fmt.Fprintln(os.Stderr, "run:", err)
		return 42
	}
	return 0
}

// functionWorker runs a function that ends in a certain way on all ranks.
func functionWorker(how string) int {
	err := cluster.Run(context.Background(), nil, func(ctx context.Context, w *cluster.World) error {
		if how == "panic" {
			panic("in the function")
		}
		return errors.New("of the function")
	})
	fmt.Fprintln(os.Stderr, "run:", err)
	return 7
}

// The exit code of a job is that of a process whose function has failed, also if the coordinator knew of the failure before the process
// exited. A panic is no farewell.
func TestElasticFunctionFails(t *testing.T) {
	t.Parallel()
	for how, want := range map[string]struct {
		code int
		text string
	}{"panic": {2, `\) exited with code 2`}, "error": {7, `\) failed after \S+: its function failed: of the function`}} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			cfg := workers(2, "function", how).noticingSilence()
			cfg.MinNodes, cfg.Restarts = 1, 1
			code, text := start(t, cfg).wait()
			require.Equal(t, want.code, code, text)
			require.Regexp(t, `(?m)^chorus: rank . .*`+want.text, text)
			require.NotContains(t, text, "left the job")
		})
	}
}

// A worker that is killed is started again. The others keep their processes.
func TestElasticRestart(t *testing.T) {
	t.Parallel()
	cfg := workers(3, "elastic", "2", "3")
	cfg.Restarts = 1
	l := start(t, cfg)
	l.until("epoch 1 is rank", 3)
	first := pidsIn(t, l.text(), "of 3 pid")
	require.Len(t, first, 3)
	victim := pidsIn(t, l.text(), "epoch 1 is rank 1 of 3 pid")[0]
	require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
	code, text := l.wait()
	require.Zero(t, code, text)
	require.Regexp(t, fmt.Sprintf(`(?m)^chorus: job test: epoch 2: .* on 1 host; rank 1 \(host h0 pid %d\) left: killed by SIGKILL.*; the job stood still for `, victim), text)
	require.Regexp(t, `(?m)^chorus: job test: epoch \d+: 3 processes on 1 host; .*rank 2 \(host h0 pid \d+\) joined; the job stood still for `, text)
	last := fmt.Sprintf("epoch %d is rank", 1+strings.Count(text, "chorus: job test: epoch "))
	for rank, local := range []int{0, 2} {
		pid := pidsIn(t, text, fmt.Sprintf("epoch 1 is rank %d of 3 pid", local))
		require.Equal(t, pid, pidsIn(t, text, fmt.Sprintf("%s %d of 3 pid", last, rank)))
	}
	require.Regexp(t, last+` 2 of 3 pid \d+ restart 1\n`, text)
}

// A worker that cannot be started again, because the launcher has no file descriptors, counts as one that has failed: the
// coordinator orders another start, which succeeds when descriptors are free.
func TestElasticStartFails(t *testing.T) {
	t.Parallel()
	cfg := workers(2, "elastic", "2", "2")
	cfg.Restarts = 100
	l := start(t, cfg)
	l.until("epoch 1 is rank", 2)
	var all unix.Rlimit
	pid := l.cmd.Process.Pid
	require.NoError(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, nil, &all))
	require.NoError(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: all.Max}, nil))
	require.NoError(t, syscall.Kill(pidsIn(t, l.text(), "epoch 1 is rank 1 of 2 pid")[0], syscall.SIGKILL))
	l.until("cannot be started again", 1)
	require.NoError(t, unix.Prlimit(pid, unix.RLIMIT_NOFILE, &all, nil))
	code, text := l.wait()
	require.Zero(t, code, text)
	require.Regexp(t, `worker 1 of this host cannot be started again: .*too many open files`, text)
	require.Regexp(t, `epoch \d+ is rank 1 of 2 pid \d+ restart [1-9]`, text)
}

// Workers that fail each time they start use up the budget, and the rest finishes.
func TestElasticBudget(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	cfg := base(2, "sh", "-c", fmt.Sprintf("[ $LOCAL_RANK$CHORUS_RESTART_COUNT = 10 -o $LOCAL_RANK = 0 ] && exec %s worker elastic 2 1; exit 5", self))
	cfg.Restarts = 3
	l := start(t, cfg)
	l.until("epoch 1 is rank", 2)
	require.NoError(t, syscall.Kill(pidsIn(t, l.text(), "epoch 1 is rank 1 of 2 pid")[0], syscall.SIGKILL))
	code, text := l.wait()
	require.Zero(t, code, text)
	require.Contains(t, text, "epoch 2 is rank 0 of 1 pid")
	require.Equal(t, 1, strings.Count(text, "chorus: worker 1 of this host is not started again: the job's restarts are used up (--max-restarts 3)\n"), text)
}

// The last line of a job that fails says that no restart is left.
func TestElasticBudgetIsNamed(t *testing.T) {
	t.Parallel()
	cfg := shell(1, "exit 5")
	self, err := os.Executable()
	require.NoError(t, err)
	cfg.Program = []string{"sh", "-c", fmt.Sprintf("[ $CHORUS_RESTART_COUNT = 0 ] && exec %s worker elastic 9 1; exit 5", self)}
	cfg.Restarts = 2
	l := start(t, cfg)
	l.until("epoch 1 is rank", 1)
	require.NoError(t, syscall.Kill(pidsIn(t, l.text(), "of 1 pid")[0], syscall.SIGKILL))
	code, text := l.wait()
	require.NotZero(t, code, text)
	require.True(t, strings.HasSuffix(text, "\nchorus: the job is not started again: its restarts are used up (--max-restarts 2)\n"), text)
}

// A worker that was started again and fails after the others have finished is not a failure of the job.
func TestElasticFailureAfterTheOthersFinished(t *testing.T) {
	t.Parallel()
	self, err := os.Executable()
	require.NoError(t, err)
	file := filepath.Join(t.TempDir(), "fail")
	cfg := base(2, "sh", "-c", fmt.Sprintf("[ $CHORUS_RESTART_COUNT = 0 ] && exec %s worker elastic 2 1; while [ ! -e %s ]; do sleep 0.02; done; exit 5", self, file))
	cfg.Restarts = 1
	l := start(t, cfg)
	l.until("epoch 1 is rank", 2)
	pids := pidsIn(t, l.text(), "of 2 pid")
	victim := pidsIn(t, l.text(), "epoch 1 is rank 1 of 2 pid")[0]
	require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
	requireGone(t, pids) // the other one has finished alone
	require.NoError(t, os.WriteFile(file, nil, 0o644))
	code, text := l.wait()
	require.Zero(t, code, text)
}

// SIGTERM to one launcher drains its host. The other host goes on.
func TestElasticDrain(t *testing.T) {
	t.Parallel()
	a, b := workers(1, "elastic", "2", "1"), workers(2, "elastic", "2", "1")
	twoHosts(t, a, b)
	a.MinNodes, b.MinNodes = 1, 1
	ls := startHosts(t, []*setup{a, b})
	la, lb := ls[0], ls[1]
	la.until("epoch 1 is rank", 1)
	lb.until("epoch 1 is rank", 2)
	require.NoError(t, lb.cmd.Process.Signal(syscall.SIGTERM))
	code, text := lb.wait()
	require.Equal(t, 143, code, text)
	require.Contains(t, text, "chorus: received SIGTERM: this host leaves the job at the end of the step")
	require.Contains(t, text, "dismissed\n")
	code, text = la.wait()
	require.Zero(t, code, text)
	require.Contains(t, text, "epoch 2: 1 process on 1 host; ranks 1, 2 of host h1 left: its launcher received SIGTERM; ")
}

// A second SIGTERM during a drain kills the ranks of that host only.
func TestElasticDrainIsCutShort(t *testing.T) {
	t.Parallel()
	la, lb, _ := startTwo(t, func(c *setup) { c.MinNodes = 1 }, "epoch 1 is rank", "elastic", "2", "1")
	require.NoError(t, syscall.Kill(pidsIn(t, lb.text(), "of 2 pid")[0], syscall.SIGSTOP)) // it does not come to the end of its step
	require.NoError(t, lb.cmd.Process.Signal(syscall.SIGTERM))
	lb.until("chorus: received SIGTERM: this host leaves the job", 1)
	require.NoError(t, lb.cmd.Process.Signal(syscall.SIGTERM))
	code, text := lb.wait()
	require.Equal(t, 143, code, text)
	code, text = la.wait()
	require.Zero(t, code, text)
	require.Contains(t, text, "epoch 2 is rank 0 of 1 pid")
	require.Contains(t, text, "left: killed by SIGKILL (by the launcher, after a second signal, SIGTERM);", "the grace period has not passed")
}

// A launcher that is killed takes its host along. One that starts later joins.
func TestElasticHosts(t *testing.T) {
	t.Parallel()
	la, lb, again := startTwo(t, func(c *setup) { c.MinNodes = 1 }, "epoch 1 is rank", "elastic", "3", "2")
	require.NoError(t, lb.cmd.Process.Kill())
	la.until("epoch 2 is rank 0 of 1", 1)
	back := again()
	for _, l := range []*launched{la, back} {
		code, text := l.wait()
		require.Zero(t, code, text)
	}
	require.Contains(t, back.text(), "epoch 3 is rank 1 of 2")
}

// A worker that is stopped is silent: it is killed and started again.
func TestElasticSilence(t *testing.T) {
	t.Parallel()
	cfg := workers(2, "elastic", "2", "2").noticingSilence()
	cfg.Restarts = 1
	l := start(t, cfg)
	l.until("epoch 1 is rank", 2)
	victim := pidsIn(t, l.text(), "epoch 1 is rank 1 of 2 pid")[0]
	require.NoError(t, syscall.Kill(victim, syscall.SIGSTOP))
	code, text := l.wait()
	require.Zero(t, code, text)
	require.Contains(t, text, fmt.Sprintf("left: silent for %v: stopped, starved or unreachable", silentAfter))
	requireGone(t, []int{victim})
}
