package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

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
