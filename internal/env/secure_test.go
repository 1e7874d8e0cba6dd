package env

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// secureVar turns the test binary into a program that prints what it reads from its environment.
const secureVar = "ENV_TEST_SECURE"

func TestMain(m *testing.M) {
	if _, ok := os.LookupEnv(secureVar); ok {
		_, set := Lookup(secureVar)
		_, cache := UserCacheDir()
		fmt.Println(IsUntrusted(), Timeline.Value() == "", Timeline.IsSet(), set, cache == nil)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestSetuid runs a program that another user starts with the rights of root: its starter does not choose the files that it
// writes.
func TestSetuid(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can make such a program")
	}
	self, err := os.Open("/proc/self/exe")
	require.NoError(t, err)
	defer self.Close()
	dir, err := os.MkdirTemp("", "setuid")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	require.NoError(t, os.Chmod(dir, 0o755))
	name := filepath.Join(dir, "program")
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY, 0o700)
	require.NoError(t, err)
	_, err = io.Copy(f, self)
	require.NoError(t, err)
	require.NoError(t, f.Close())
	run := func(mode os.FileMode, uid uint32) string {
		require.NoError(t, os.Chmod(name, mode))
		cmd := exec.Command(name)
		cmd.Dir = "/"
		cmd.Env = []string{secureVar + "=yes", "CHORUS_TIMELINE=/root/planted", "HOME=/root"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid, NoSetGroups: true}}
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		return strings.TrimSpace(string(out))
	}
	require.Equal(t, "false false true true true", run(0o755, 65534))
	require.Equal(t, "true true false false false", run(0o755|os.ModeSetuid, 65534))
	require.Equal(t, "false false true true true", run(0o755|os.ModeSetuid, 0), "its starter has all rights")
}

func TestIsSecure(t *testing.T) {
	require.True(t, isSecure([][2]uintptr{{6, 4096}, {atSecure, 1}}))
	require.False(t, isSecure([][2]uintptr{{6, 4096}, {atSecure, 0}}))
	require.False(t, isSecure(nil))
}
