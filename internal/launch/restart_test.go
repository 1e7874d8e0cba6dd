package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// failsTwice is a program whose rank 1 fails in the first two attempts.
const failsTwice = `echo "attempt $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS, $CHORUS_RESTART_COUNT in epoch $CHORUS_EPOCH"
[ $TORCHELASTIC_RESTART_COUNT = 2 ] && exit 0
[ $RANK = 1 ] && echo the cause >&2 && exit 5
echo noise; sleep 60`

func TestRestart(t *testing.T) {
	t.Parallel()
	cfg := shell(2, failsTwice)
	cfg.Restarts, cfg.LogDir = 3, t.TempDir()
	code, text := launchAll(t, cfg)
	require.Zero(t, code, text)
	for k := range 3 {
		require.Contains(t, text, fmt.Sprintf("attempt %d of 3, %[1]d in epoch %d\n", k, k+1))
	}
	for k := 1; k <= 2; k++ {
		require.Regexp(t, fmt.Sprintf(`(?m)^chorus: job test: restart %d of 3: epoch %d has 2 processes on 1 host; rank 1 \(host h0, pid \d+\): exited with code 5; the job stood still for `, k, k+1), text)
	}
	require.NotContains(t, text, "restart 3")
	b, err := os.ReadFile(filepath.Join(cfg.LogDir, "test", "rank-1.restart-1.err"))
	require.NoError(t, err)
	require.Equal(t, "the cause\n", string(b))
}

// The last failure ends the job as it does without restarts.
func TestRestartsAreLimited(t *testing.T) {
	t.Parallel()
	cfg := shell(2, failsTwice)
	cfg.Restarts, cfg.Grace = 1, 100*time.Millisecond
	code, text := launchAll(t, cfg)
	require.Equal(t, 5, code, text)
	require.Contains(t, text, "restart 1 of 1: ")
	require.Regexp(t, `(?m)^chorus: rank 1 \(host h0, pid \d+\) exited with code 5 after .*; the other rank ended with it$`, text)
	require.True(t, strings.HasSuffix(text, "\nchorus: the job is not started again: its restarts are used up (--max-restarts 1)\n"), text)
	cfg.Restarts = 0
	_, text = launchAll(t, cfg)
	require.NotContains(t, text, "used up")
}

// Workers that have attached are started again in an epoch of their own.
func TestRestartOfSessions(t *testing.T) {
	t.Parallel()
	a, b := workers(1, "restarted", ""), workers(2, "restarted", "")
	twoHosts(t, a, b)
	a.Restarts, b.Restarts = 1, 1
	la, lb := start(t, a), start(t, b)
	la.until("attached", 1)
	lb.until("attached", 2)
	victim := 0
	for pid, cmd := range childrenOf(t, lb.cmd.Process.Pid) {
		if strings.Contains(cmd, "worker") {
			victim = pid
		}
	}
	require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
	for _, l := range []*launched{la, lb} {
		code, text := l.wait()
		require.Zero(t, code, text)
		require.Contains(t, text, "restart 1 of 1: epoch 2 has 3 processes on 2 hosts; rank ")
		require.Contains(t, text, fmt.Sprintf("(host h1, pid %d): killed by SIGKILL", victim))
	}
}

// startTwo starts launchers on two hosts with one worker each, and waits until the workers have
// printed text. again starts the second launcher again.
func startTwo(t *testing.T, change func(*setup), text string, args ...string) (la, lb *launched, again func() *launched) {
	t.Helper()
	a, b := workers(1, args...), workers(1, args...)
	twoHosts(t, a, b)
	change(a)
	change(b)
	ls := startHosts(t, []*setup{a, b})
	la, lb = ls[0], ls[1]
	la.until(text, 1)
	lb.until(text, 1)
	return la, lb, func() *launched { return start(t, b) }
}

// A host whose launcher was killed may come back.
func TestRestartAfterTheLossOfAHost(t *testing.T) {
	t.Parallel()
	la, lb, again := startTwo(t, func(c *setup) { c.Restarts = 1 }, "attached", "restarted", "")
	require.NoError(t, lb.cmd.Process.Kill())
	back := again()
	for _, l := range []*launched{la, back} {
		code, text := l.wait()
		require.Zero(t, code, text)
	}
	require.Contains(t, la.text(), fmt.Sprintf("epoch 2 has 2 processes on 2 hosts; host h1 (pid %d): its launcher ended", lb.cmd.Process.Pid))
	require.Contains(t, back.text(), "[rank 1] attached 1 of 2")
}

// A signal during the wait for a lost host ends the job.
func TestSignalDuringRestart(t *testing.T) {
	t.Parallel()
	la, lb, _ := startTwo(t, func(c *setup) { c.Restarts = 1 }, "attached", "restarted", "")
	require.NoError(t, lb.cmd.Process.Kill())
	la.until("; waiting for another host\n", 1)
	require.NoError(t, la.cmd.Process.Signal(syscall.SIGTERM))
	code, text := la.wait()
	require.Equal(t, 143, code, text)
	require.Contains(t, text, "chorus: received SIGTERM")
}
