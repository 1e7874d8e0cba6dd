package nccl_test

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/nccl"
)

// failWithTrace makes a communicator fail that writes its trace to prefix followed by 0.
func failWithTrace(t *testing.T, prefix string) []rank {
	t.Helper()
	t.Setenv(env.NCCLTraceFile.Name, prefix)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ranks := connectWith(t, devs, &nccl.Config{Timeout: soon})
	xs, _ := buffers(t, ranks, 8)
	require.ErrorIs(t, issueAlone(t, ranks[0], xs[0]), nccl.ErrorTimeout)
	return ranks
}

// The trace names operations and programs, so only its user can read it.
func TestTraceFileIsPrivate(t *testing.T) {
	for name, exists := range map[string]bool{"new": false, "existing": true} {
		t.Run(name, func(t *testing.T) {
			defer syscall.Umask(syscall.Umask(0))
			prefix := filepath.Join(t.TempDir(), "trace-")
			if exists {
				require.NoError(t, os.WriteFile(prefix+"0", []byte("an older trace"), 0o666))
			}
			failWithTrace(t, prefix)
			info, err := os.Stat(prefix + "0")
			require.NoError(t, err)
			require.Equal(t, os.FileMode(0o600), info.Mode())
			text, err := os.ReadFile(prefix + "0")
			require.NoError(t, err)
			require.Contains(t, string(text), "nccl:all_reduce")
			require.NotContains(t, string(text), "an older trace")
		})
	}
}

// A link, or a file of another user, in the place of the trace does not let a failure
// overwrite a file.
func TestTraceFileOfOthers(t *testing.T) {
	for name, plant := range map[string]func(t *testing.T, target, trace string) error{
		"symbolic link":  func(_ *testing.T, target, trace string) error { return os.Symlink(target, trace) },
		"hard link":      func(_ *testing.T, target, trace string) error { return os.Link(target, trace) },
		"file of others": plantFileOfOthers,
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			target, prefix := filepath.Join(dir, "precious"), filepath.Join(dir, "trace-")
			require.NoError(t, os.WriteFile(target, []byte("precious"), 0o600))
			require.NoError(t, plant(t, target, prefix+"0"))
			failWithTrace(t, prefix)
			for _, file := range []string{target, prefix + "0"} {
				text, err := os.ReadFile(file)
				require.NoError(t, err)
				require.Equal(t, "precious", string(text), file)
			}
		})
	}
	t.Run("link to a new file", func(t *testing.T) {
		dir := t.TempDir()
		prefix := filepath.Join(dir, "trace-")
		require.NoError(t, os.Symlink(filepath.Join(dir, "new"), prefix+"0"))
		failWithTrace(t, prefix)
		require.NoFileExists(t, filepath.Join(dir, "new"))
	})
}

// plantFileOfOthers makes a file of another user that all users can write.
func plantFileOfOthers(t *testing.T, _, trace string) error {
	if os.Geteuid() != 0 {
		t.Skip("only root can give a file to another user")
	}
	require.NoError(t, os.WriteFile(trace, []byte("precious"), 0o600))
	require.NoError(t, os.Chmod(trace, 0o666))
	return os.Chown(trace, 65534, 65534)
}
