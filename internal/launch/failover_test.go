package launch

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testhost"
)

// severalHosts starts launchers on loopback addresses, the first of which is the only seed. A process is lost after
// the given silence.
func severalHosts(t *testing.T, n, least int, silence time.Duration, args ...string) (cfgs []*setup, ls []*launched) {
	t.Helper()
	port := testhost.Reserve(t)
	for i := range n {
		c := workers(1, args...)
		c.Timing.LostAfter = silence
		c.Job, c.Host, c.Nodes, c.MinNodes = "several-"+fmt.Sprint(port), fmt.Sprintf("h%d", i), n, least
		c.Seeds, c.Bind = []string{fmt.Sprintf("127.0.0.1:%d", port)}, fmt.Sprintf("127.0.0.%d:%d", i+1, port)
		c.Secret = []byte("sixteen bytes or more")
		cfgs = append(cfgs, c)
	}
	ls = startHosts(t, cfgs)
	for i, l := range ls {
		l.until(fmt.Sprintf("epoch 1 is rank %d of %d pid", i, n), 1)
	}
	return cfgs, ls
}

// startHosts starts launchers. The first one, which is the seed, comes last: a job begins without hosts that come seconds later.
func startHosts(t *testing.T, cfgs []*setup) []*launched {
	t.Helper()
	ls := make([]*launched, len(cfgs))
	for i, c := range slices.Backward(cfgs) {
		ls[i] = start(t, c)
	}
	return ls
}

// The launcher that coordinates is killed. The others choose another coordinator and keep their
// workers. When the first launcher starts again, it joins the job, although it is the seed.
func TestElasticCoordinatorKilled(t *testing.T) {
	t.Parallel()
	cfgs, ls := severalHosts(t, 3, 1, lostAfter, "elastic", "3", "3")
	require.NoError(t, ls[0].cmd.Process.Kill())
	killed := time.Now()
	for i, l := range ls[1:] {
		l.until("of 2 pid", 1) // a launcher that is slow may miss epoch 2
		pid := pidsIn(t, l.text(), fmt.Sprintf("epoch 1 is rank %d of 3 pid", i+1))
		require.Equal(t, pid, pidsIn(t, l.text(), "of 2 pid")[:1], "the process of the worker")
	}
	t.Logf("the next epoch began %v after the kill", time.Since(killed))
	back := start(t, cfgs[0])
	for _, l := range []*launched{ls[1], ls[2], back} {
		code, text := l.wait()
		require.Zero(t, code, text)
		require.Regexp(t, `(?m)^chorus: job \S+: epoch \d+: 3 processes on 3 hosts; .*joined`, text)
	}
	require.Regexp(t, `(?m)^chorus: job \S+: epoch 2: \d process(es)? on \d hosts?; rank 0 \(host h0 pid \d+\) left: its host was lost: .*; the job stood still for `, ls[1].text()+ls[2].text())
}

// SIGTERM to the launcher that coordinates drains its host: the ranks finish their step, another host
// coordinates, and the job goes on. Then the next coordinator is drained, too.
func TestElasticCoordinatorDrains(t *testing.T) {
	t.Parallel()
	_, ls := severalHosts(t, 3, 1, time.Minute, "elastic", "3", "1") // a launcher that does not answer for a part of this misses an epoch
	for i := range 2 {
		require.NoError(t, ls[i].cmd.Process.Signal(syscall.SIGTERM))
		code, text := ls[i].wait()
		require.Equal(t, 143, code, text)
		require.Contains(t, text, "chorus: received SIGTERM: this host leaves the job at the end of the step")
		require.Contains(t, text, fmt.Sprintf("epoch %d ends at the end of a step\n", i+1))
		require.Contains(t, text, "dismissed\n")
		if i == 0 {
			ls[2].until("epoch 2 is rank 1 of 2 pid", 1)
			ls[1].until("epoch 2 is rank 0 of 2 pid", 1)
		}
	}
	code, text := ls[2].wait()
	require.Zero(t, code, text)
	for i := range 2 {
		require.Contains(t, text, fmt.Sprintf("epoch %d ends at the end of a step\n", i+1))
		require.Contains(t, text, fmt.Sprintf("host h%d, which coordinated the job, leaves: its launcher received SIGTERM; the hosts of epoch %d choose another coordinator\n", i, i+1))
		require.Regexp(t, fmt.Sprintf(`epoch %d: .* on . hosts?; rank 0 \(host h%d pid \d+\) left: its launcher received SIGTERM; `, i+2, i), ls[1].text()+text)
	}
	require.Equal(t, pidsIn(t, text, "of 3 pid"), pidsIn(t, text, "of 1 pid"), "the process of the worker")
}

// When all functions have returned, a host that leaves or is lost does not disturb what the others do until their processes exit.
func TestHostsLeaveAfterTheEndOfTheProgram(t *testing.T) {
	t.Parallel()
	for host, how := range map[string]int{"coordinator": 0, "other": 1} {
		for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGKILL} {
			t.Run(fmt.Sprint(host, "/", sig), func(t *testing.T) {
				t.Parallel()
				done := filepath.Join(t.TempDir(), "done")
				_, ls := severalHosts(t, 3, 1, lostAfter, "elastic", "1", "3", done)
				for _, l := range ls {
					l.until("Run has returned", 1)
				}
				require.NoError(t, ls[how].cmd.Process.Signal(sig))
				code, text := ls[how].wait()
				if sig != syscall.SIGKILL {
					require.Equal(t, 128+int(sig), code, text)
				}
				require.NoError(t, os.WriteFile(done, nil, 0o600))
				for i, l := range ls {
					if i != how {
						code, text := l.wait()
						require.Zero(t, code, text)
					}
				}
			})
		}
	}
}

// A launcher whose job has succeeded waits for a host that was lost a moment ago. A signal ends that, and the job has still succeeded.
func TestSignalAfterTheSuccess(t *testing.T) {
	t.Parallel()
	done := filepath.Join(t.TempDir(), "done")
	require.NoError(t, os.WriteFile(done, nil, 0o600))
	_, ls := severalHosts(t, 3, 1, lostAfter/4, "elastic", "2", "2", done)
	require.NoError(t, ls[2].cmd.Process.Signal(syscall.SIGSTOP))
	requireStopped(t, ls[2].cmd.Process.Pid)
	ls[0].until("to come back and learn that the program has ended", 1)
	require.NoError(t, ls[0].cmd.Process.Signal(syscall.SIGTERM))
	for _, l := range ls[:2] {
		code, text := l.wait()
		require.Zero(t, code, text)
	}
}

// The last worker of a host that leaves is killed. The launcher stays until another host coordinates: the job goes on there.
func TestWorkerDiesWhileTheCoordinatorDrains(t *testing.T) {
	t.Parallel()
	_, ls := severalHosts(t, 2, 1, lostAfter, "elastic", "2", "1")
	pid := pidsIn(t, ls[0].text(), "epoch 1 is rank 0 of 2 pid")[0]
	other := pidsIn(t, ls[1].text(), "epoch 1 is rank 1 of 2 pid")[0]
	for _, p := range []int{pid, other} { // so that they do not end the step
		require.NoError(t, syscall.Kill(p, syscall.SIGSTOP))
		requireStopped(t, p)
	}
	require.NoError(t, ls[0].cmd.Process.Signal(syscall.SIGTERM))
	ls[0].until("this host leaves the job at the end of the step", 1)
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
	time.Sleep(2 * verdictWait) // the launcher could leave now
	require.NoError(t, syscall.Kill(other, syscall.SIGCONT))
	code, text := ls[1].wait()
	require.Zero(t, code, text)
	require.Contains(t, text, "epoch 2 is rank 0 of 1")
	code, text = ls[0].wait()
	require.Equal(t, 143, code, text)
}

// SIGINT to a launcher stops the job on all hosts, also if it comes while the hosts choose another coordinator and
// the workers of the host exit before that ends.
func TestElasticStopDuringTheChoice(t *testing.T) {
	t.Parallel()
	_, ls := severalHosts(t, 3, 1, lostAfter, "elastic", "9", "3")
	require.NoError(t, ls[2].cmd.Process.Signal(syscall.SIGSTOP))
	requireStopped(t, ls[2].cmd.Process.Pid)
	require.NoError(t, ls[0].cmd.Process.Kill())
	ls[1].until("choose another coordinator", 1)
	require.NoError(t, ls[1].cmd.Process.Signal(syscall.SIGINT))
	requireGone(t, pidsIn(t, ls[1].text(), "epoch 1 is rank 1 of 3 pid"))
	require.NoError(t, ls[2].cmd.Process.Signal(syscall.SIGCONT))
	for _, l := range ls[1:] {
		code, text := l.wait()
		require.Equal(t, 130, code, text)
	}
}

// SIGTERM to all launchers, in any order, ends the job on all hosts.
func TestElasticAllDrain(t *testing.T) {
	t.Parallel()
	_, ls := severalHosts(t, 3, 1, lostAfter, "elastic", "9", "3")
	for _, i := range rand.Perm(3) {
		require.NoError(t, ls[i].cmd.Process.Signal(syscall.SIGTERM))
	}
	for _, l := range ls {
		code, text := l.wait()
		require.Equal(t, 143, code, text)
	}
}

// A job on two hosts goes on with the one that is left, whichever is killed.
func TestElasticOneOfTwoIsLeft(t *testing.T) {
	t.Parallel()
	_, ls := severalHosts(t, 2, 1, lostAfter, "elastic", "2", "1")
	require.NoError(t, ls[0].cmd.Process.Kill())
	code, text := ls[1].wait()
	require.Zero(t, code, text)
	require.Contains(t, text, "epoch 2 is rank 0 of 1")
}

// The coordinator is stopped, so that its host is silent. Two of three hosts go on. It does not,
// when it continues.
func TestElasticCoordinatorSilent(t *testing.T) {
	t.Parallel()
	_, ls := severalHosts(t, 3, 1, silentAfter, "elastic", "2", "2")
	pid := ls[0].cmd.Process.Pid
	worker := pidsIn(t, ls[0].text(), "epoch 1 is rank 0 of 3 pid")[0]
	require.NoError(t, syscall.Kill(worker, syscall.SIGSTOP))
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	stopped := time.Now()
	for _, l := range ls[1:] {
		l.until("of 2 pid", 1)
	}
	t.Logf("the next epoch began %v after the silence", time.Since(stopped))
	require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
	require.NoError(t, syscall.Kill(worker, syscall.SIGCONT))
	for _, l := range ls[1:] {
		code, text := l.wait()
		require.Zero(t, code, text)
	}
	code, text := ls[0].wait()
	require.Equal(t, ExitFailed, code, text)
	require.NotContains(t, text, "epoch 2")
	require.Contains(t, text, "this part of the network has 1 of the 3 hosts of epoch 1")
}

// A launcher that does not coordinate is stopped. The others go on, and it ends when it continues. It does not
// take part again, and leaves no worker.
func TestElasticLauncherSilent(t *testing.T) {
	t.Parallel()
	_, ls := severalHosts(t, 3, 1, silentAfter, "elastic", "2", "2")
	pid := ls[2].cmd.Process.Pid
	worker := pidsIn(t, ls[2].text(), "epoch 1 is rank 2 of 3 pid")
	require.NoError(t, syscall.Kill(pid, syscall.SIGSTOP))
	for _, l := range ls[:2] {
		code, text := l.wait()
		require.Zero(t, code, text)
		require.Contains(t, text, "epoch 2 is rank")
	}
	require.NoError(t, syscall.Kill(pid, syscall.SIGCONT))
	code, text := ls[2].wait()
	require.NotZero(t, code, text)
	require.NotContains(t, text, "epoch 2 is rank")
	requireGone(t, worker)
}

// A launcher is killed and started again at once, with the same name and address: it joins as another host, and never
// takes part twice.
func TestElasticLauncherReplaced(t *testing.T) {
	t.Parallel()
	cfgs, ls := severalHosts(t, 3, 1, lostAfter, "elastic", "2", "3")
	require.NoError(t, ls[2].cmd.Process.Kill())
	back := start(t, cfgs[2])
	for _, l := range []*launched{ls[0], ls[1], back} {
		code, text := l.wait()
		require.Zero(t, code, text)
	}
	require.NotContains(t, back.text(), "epoch 1 is rank")
	require.Regexp(t, `epoch \d+: .* rank 2 \(host h2 pid \d+\) left: its host was lost: `, ls[0].text()+ls[1].text())
	require.Regexp(t, `epoch \d+: 3 processes on 3 hosts; .*rank 2 \(host h2 pid \d+\) joined`, back.text())
}

// A worker fails while the coordinator does not answer. The next coordinator has it started again,
// and also a worker that fails later.
func TestElasticRestartAfterFailover(t *testing.T) {
	t.Parallel()
	port := testhost.Reserve(t)
	var cfgs []*setup
	for i := range 3 {
		c := workers(1, "elastic", "99", "2")
		c.Job, c.Host, c.Nodes, c.MinNodes, c.Restarts = "restarts-"+fmt.Sprint(port), fmt.Sprintf("h%d", i), 3, 1, 2
		c.Seeds, c.Bind = []string{fmt.Sprintf("127.0.0.1:%d", port)}, fmt.Sprintf("127.0.0.%d:%d", i+1, port)
		c.Secret = []byte("sixteen bytes or more")
		cfgs = append(cfgs, c)
	}
	ls := startHosts(t, cfgs)
	for i, l := range ls {
		l.until(fmt.Sprintf("epoch 1 is rank %d of 3 pid", i), 1)
	}
	require.NoError(t, syscall.Kill(ls[0].cmd.Process.Pid, syscall.SIGSTOP))
	victim := pidsIn(t, ls[2].text(), "epoch 1 is rank 2 of 3 pid")[0]
	require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
	requireGone(t, []int{victim})
	require.NoError(t, ls[0].cmd.Process.Kill())
	ls[2].until(" of 2 pid", 1)
	require.Contains(t, ls[2].text(), "restart 1\n")
	victim = pidsIn(t, ls[1].text(), "of 3 pid")[0]
	require.NoError(t, syscall.Kill(victim, syscall.SIGKILL))
	ls[1].until(" restart 1\n", 1)
	require.Regexp(t, `of 2 pid \d+ restart 1\n`, ls[1].text())
	for _, l := range ls[1:] {
		require.NoError(t, l.cmd.Process.Signal(syscall.SIGTERM))
	}
	for _, l := range ls[1:] {
		code, text := l.wait()
		require.Equal(t, 143, code, text)
	}
}

// Two of four launchers are killed at once: the one that coordinates and the next one. The others give the next one
// half of LostAfter to answer.
func TestElasticTwoCoordinatorsKilled(t *testing.T) {
	t.Parallel()
	_, ls := severalHosts(t, 4, 1, silentAfter, "elastic", "2", "2")
	require.NoError(t, ls[0].cmd.Process.Kill())
	require.NoError(t, ls[1].cmd.Process.Kill())
	for _, l := range ls[2:] {
		code, text := l.wait()
		require.Zero(t, code, text)
	}
}

// The second coordinator is killed after it has taken over, and then the third one.
func TestElasticCoordinatorsInTurn(t *testing.T) {
	t.Parallel()
	_, ls := severalHosts(t, 4, 1, lostAfter, "elastic", "4", "1")
	for i := range 3 {
		next := fmt.Sprintf("of %d pid", 3-i)
		before := strings.Count(ls[3].text(), next) // a launcher that is slow may miss an epoch
		require.NoError(t, ls[i].cmd.Process.Kill())
		if i < 2 {
			ls[3].until(next, before+1)
		}
	}
	code, text := ls[3].wait()
	require.Zero(t, code, text)
	require.Len(t, pidsIn(t, text, "of 4 pid"), 1)
	require.Equal(t, pidsIn(t, text, "of 4 pid"), pidsIn(t, text, "of 1 pid")[:1])
}

// epochAfter waits until all of ls are in an epoch after the given one that has no other members. A launcher that is slow may miss an
// epoch, and there is another one then.
func epochAfter(ls []*launched, epoch int) int {
	last := 0
	for _, l := range ls {
		last = max(last, l.untilEpoch(epoch, len(ls)))
	}
	return last
}

var hostChanges = flag.Int("hosts", 4, "kills of TestElasticRandomHosts")

// Random launchers are killed and started again, so that the coordinator moves from host to host.
// Each epoch has one list of members, and no epoch comes twice.
func TestElasticRandomHosts(t *testing.T) {
	t.Parallel()
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 1))
	const n = 4
	last := 2 * *hostChanges // more than the epochs that end
	cfgs, ls := severalHosts(t, n, 1, lostAfter, "elastic", fmt.Sprint(last+1), fmt.Sprint(n))
	var all []*launched
	all = append(all, ls...)
	for epoch := 1; epoch <= last; {
		i := rnd.IntN(n)
		require.NoError(t, ls[i].cmd.Process.Kill())
		epoch = epochAfter(slices.Concat(ls[:i], ls[i+1:]), epoch)
		ls[i] = start(t, cfgs[i])
		all = append(all, ls[i])
		epoch = epochAfter(ls, epoch)
	}
	for _, l := range ls {
		code, text := l.wait()
		require.Zero(t, code, text)
	}
	members := map[string]map[string]bool{} // of an epoch: "rank of size"
	for _, l := range all {
		for _, m := range regexp.MustCompile(`epoch (\d+) is rank (\d+) of (\d+) pid`).FindAllStringSubmatch(l.text(), -1) {
			at := members[m[1]]
			if at == nil {
				at = map[string]bool{}
				members[m[1]] = at
			}
			require.False(t, at[m[2]], "two ranks %s in epoch %s", m[2], m[1])
			at[m[2]], at["of "+m[3]] = true, true
		}
	}
	for epoch, at := range members {
		require.True(t, at[fmt.Sprint("of ", len(at)-1)], "epoch %s: %v", epoch, at)
	}
}
