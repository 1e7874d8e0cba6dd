package sameuser

import (
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// The test binary runs itself again to dial the socket that its argument names.
func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == "dial" {
		c, err := net.Dial("unix", os.Args[2])
		if err != nil {
			os.Exit(3)
		}
		_, _ = c.Read(make([]byte, 1)) // until the test has looked
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func TestCheck(t *testing.T) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@chorus-test-" + t.TempDir(), Net: "unix"})
	require.NoError(t, err)
	defer l.Close()
	from := func(uid int) error {
		// The file's folder is not readable by others, and this link needs no path.
		cmd := exec.Command("/proc/self/exe", "dial", l.Addr().String())
		if uid != os.Geteuid() {
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid), NoSetGroups: true}}
		}
		require.NoError(t, cmd.Start())
		defer func() { require.NoError(t, cmd.Wait()) }()
		c, err := l.AcceptUnix()
		require.NoError(t, err)
		defer c.Close()
		return Check(c)
	}
	require.NoError(t, from(os.Geteuid()))
	if os.Geteuid() != 0 {
		t.Skip("only root can start a process of another user")
	}
	err = from(65534)
	require.IsType(t, &Error{}, err)
	require.Equal(t, 65534, err.(*Error).UID)
	err = from(1234)
	require.ErrorContains(t, err, "belongs to the user with id 1234, and this one to 0")
}
