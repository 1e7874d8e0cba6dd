package launch

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/poll"
)

// The reason of an exit names the out-of-memory killer if it may have been the cause.
func TestOutOfMemoryTexts(t *testing.T) {
	w := &oomWatch{path: filepath.Join(t.TempDir(), "vmstat")}
	count := func(n int) {
		require.NoError(t, os.WriteFile(w.path, fmt.Appendf(nil, "pgmajfault 9\noom_kill %d\nswap_ra 0\n", n), 0o600))
	}
	w.begin()
	require.Equal(t, "possibly out of memory", w.explain(), "no file")
	count(3)
	require.Equal(t, "possibly out of memory", w.explain(), "no file before")
	w.begin()
	require.Equal(t, "not by the kernel's out-of-memory killer", w.explain())
	count(4)
	require.Regexp(t, `^perhaps out of memory: the kernel killed a process of this host for it in the last \d+s$`, w.explain())
	w.update()
	require.Contains(t, w.explain(), "perhaps", "the kill may have been just before the update")
	w.update()
	require.Contains(t, w.explain(), "not by")
	count(6)
	require.Contains(t, w.explain(), "the kernel killed 2 processes of this host")
	require.NoError(t, os.WriteFile(w.path, []byte("pgmajfault 9\n"), 0o600))
	require.Equal(t, "possibly out of memory", w.explain(), "an old kernel counts no kills")

	w.cgroup = filepath.Join(t.TempDir(), "memory.events")
	own := func(n int) {
		require.NoError(t, os.WriteFile(w.cgroup, fmt.Appendf(nil, "low 0\noom 3\noom_kill %d\noom_group_kill 0\n", n), 0o600))
	}
	own(2)
	w.begin()
	require.Equal(t, "possibly out of memory", w.explain())
	own(3)
	require.Regexp(t, `^out of memory: the kernel killed 1 of the processes in this job's control group for it in the last \d+s$`, w.explain())
}

// The kernel kills a worker that needs more memory than its cgroup has. The launcher says so.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	procs := smallCgroup(t)
	code, text := launchAll(t, shell(1, `ulimit -v 4000000; echo $$ > "$PROCS" && exec tail /dev/zero`), "PROCS="+procs)
	require.Equal(t, 137, code, text)
	require.Regexp(t, `(?m)^chorus: rank 0 .* killed by SIGKILL \(perhaps out of memory: the kernel killed .* of this host for it in the last \d+s\) after `, text)
}

// smallCgroup creates a cgroup with 64 MiB of memory, and returns the file that moves a process into it.
func smallCgroup(t *testing.T) string {
	t.Helper()
	if !(&oomWatch{path: vmstat}).sample().known {
		t.Skip("needs a kernel that counts out-of-memory kills")
	}
	dir, limit, swap, swapBytes := memoryCgroup(t)
	dir = filepath.Join(dir, "chorus-test-"+strconv.Itoa(os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip("needs the right to make a cgroup: ", err)
	}
	t.Cleanup(func() { // the kernel may still be freeing the memory of the process
		require.True(t, poll.UntilNoLaterThan(time.Minute, func() bool { return os.Remove(dir) == nil }))
	})
	if err := os.WriteFile(filepath.Join(dir, limit), []byte("64M"), 0); err != nil {
		t.Skip("needs a cgroup that limits memory: ", err)
	}
	swap = filepath.Join(dir, swap)
	if _, err := os.Stat(swap); err == nil { // the kernel counts swap
		require.NoError(t, os.WriteFile(swap, []byte(swapBytes), 0))
	}
	procs := filepath.Join(dir, "cgroup.procs")
	if out, err := exec.Command("sh", "-c", `echo $$ > "$0"`, procs).CombinedOutput(); err != nil {
		t.Skipf("needs the right to move a process into a cgroup: %v: %s", err, out)
	}
	return procs
}

// memoryCgroup returns the folder of this process's cgroup, and its files for the limits of memory and
// of swap, with the limit for no swap: version 1 counts memory and swap together.
func memoryCgroup(t *testing.T) (dir, limit, swap, swapBytes string) {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	require.NoError(t, err)
	for line := range strings.Lines(string(own)) {
		part := strings.SplitN(strings.TrimSpace(line), ":", 3)
		switch {
		case part[1] == "memory":
			return filepath.Join("/sys/fs/cgroup/memory", part[2]), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "64M"
		case part[1] == "":
			dir = filepath.Join("/sys/fs/cgroup", part[2])
		}
	}
	return dir, "memory.max", "memory.swap.max", "0"
}

// TestPidLimit has the files of both versions of control groups, with a limit in an outer group.
func TestPidLimit(t *testing.T) {
	for name, tc := range map[string]struct{ cgroup, base string }{
		"version 2": {"0::/pod/box\n", "sys/fs/cgroup"},
		"version 1": {"9:name=systemd:/\n8:cpu,pids:/pod/box\n0::/\n", "sys/fs/cgroup/pids"},
	} {
		t.Run(name, func(t *testing.T) {
			l := &pidLimit{root: t.TempDir()}
			require.NoError(t, l.check(1000), "no control groups")
			write := func(file, text string) {
				file = filepath.Join(l.root, file)
				require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
				require.NoError(t, os.WriteFile(file, []byte(text), 0o600))
			}
			pod := filepath.Join(tc.base, "pod")
			write("proc/self/cgroup", tc.cgroup)
			write(pod+"/box/pids.max", "max\n")
			write(pod+"/box/pids.current", "9\n")
			write(pod+"/pids.max", "40\n")
			write(pod+"/pids.current", "20\n")
			write(pod+"/pids.events", "max 3\n")
			require.NoError(t, l.check(4))
			require.EqualError(t, l.check(5), "5 workers need at least 22 further processes and threads, but the control group /"+pod+
				" has a limit of 40 (pids.max), and only 20 are left; "+pidCure)
			require.Empty(t, l.remark())
			err := l.explain(fmt.Errorf("fork: %w", syscall.EAGAIN))
			require.ErrorContains(t, err, "the control group /"+pod+" has 40 (pids.max), the user has ")
			require.ErrorIs(t, l.explain(os.ErrNotExist), os.ErrNotExist)
			write(pod+"/pids.events", "max 4\n")
			require.Contains(t, l.remark(), " (the limit of 40 processes and threads of the control group /"+pod)
		})
	}
}

// TestPidLimitOfUser has two processes of the user, one of another user, and one in another user namespace.
func TestPidLimitOfUser(t *testing.T) {
	l := &pidLimit{root: t.TempDir()}
	process := func(pid, user, caps, space string, threads int) {
		dir := filepath.Join(l.root, "proc", pid)
		require.NoError(t, os.MkdirAll(filepath.Join(dir, "ns"), 0o755))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "status"), fmt.Appendf(nil, "Name:\tx\nUid:\t%s\t0\t0\t0\nThreads:\t%d\nCapEff:\t%s\n", user, threads, caps), 0o600))
		_ = os.Remove(filepath.Join(dir, "ns/user"))
		require.NoError(t, os.Symlink("user:["+space+"]", filepath.Join(dir, "ns/user")))
	}
	limit := func(most string) {
		text := fmt.Sprintf("Max stack size            8388608              unlimited            bytes\nMax processes             %-20s %-20s processes\n", most, most)
		require.NoError(t, os.WriteFile(filepath.Join(l.root, "proc/self/limits"), []byte(text), 0o600))
	}
	process("self", "1000", "0000000000000000", "1", 7)
	process("10", "1000", "0000000000000000", "1", 7)
	process("11", "1000", "0000000000000000", "1", 3)
	process("12", "1001", "0000000000000000", "1", 100)
	process("13", "1000", "0000000000000000", "2", 100)
	limit("30")
	require.NoError(t, l.check(4))
	require.EqualError(t, l.check(5), "5 workers need at least 22 further processes and threads, but the user with the number 1000 has a limit of 30 (ulimit -u), and at most 20 are left; "+userCure)
	limit("unlimited")
	require.NoError(t, l.check(5))
	limit("30")
	process("self", "1000", "0000000001000000", "1", 7)
	require.NoError(t, l.check(5), "CAP_SYS_RESOURCE")
	process("self", "0", "0000000000000000", "1", 7)
	require.NoError(t, l.check(5), "root")
}
