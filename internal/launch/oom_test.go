package launch

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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
}

// The kernel kills a worker that needs more memory than its cgroup has. The launcher says so.
func TestOutOfMemory(t *testing.T) {
	t.Parallel()
	procs := smallCgroup(t)
	code, text := launchAll(t, shell(1, `ulimit -v 4000000; echo $$ > "$PROCS" && exec tail /dev/zero`), "PROCS="+procs)
	require.Equal(t, 137, code, text)
	require.Regexp(t, `(?m)^chorus: rank 0 .* killed by SIGKILL \(perhaps out of memory: the kernel killed .* of this host for it in the last \d+s\) after `, text)
}

// limits are what the files of a small cgroup get. The kernel has no file for swap if it does not count swap.
var limits = map[string]string{
	"memory.limit_in_bytes": "64M", "memory.memsw.limit_in_bytes": "64M", "memory.max": "64M", "memory.swap.max": "0",
}

// smallCgroup makes a cgroup with 64 MiB of memory, and returns the file that moves a process into it.
func smallCgroup(t *testing.T) string {
	t.Helper()
	own, err := os.ReadFile("/proc/self/cgroup")
	require.NoError(t, err)
	var dir, limit, swap string
	for line := range bytes.Lines(own) {
		part := strings.SplitN(strings.TrimSpace(string(line)), ":", 3)
		switch {
		case part[1] == "memory":
			dir, limit, swap = filepath.Join("/sys/fs/cgroup/memory", part[2]), "memory.limit_in_bytes", "memory.memsw.limit_in_bytes"
		case part[1] == "" && dir == "":
			dir, limit, swap = filepath.Join("/sys/fs/cgroup", part[2]), "memory.max", "memory.swap.max"
		}
	}
	dir = filepath.Join(dir, "chorus-test-"+strconv.Itoa(os.Getpid()))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Skip("needs the right to make a cgroup: ", err)
	}
	t.Cleanup(func() { // the kernel may still be freeing the memory of the process
		require.True(t, poll.UntilNoLaterThan(time.Minute, func() bool { return os.Remove(dir) == nil }))
	})
	for _, f := range []string{limit, swap} { // in this order
		if err := os.WriteFile(filepath.Join(dir, f), []byte(limits[f]), 0); err != nil && !os.IsNotExist(err) {
			t.Skip("needs a cgroup that limits memory: ", err)
		}
	}
	return filepath.Join(dir, "cgroup.procs")
}
