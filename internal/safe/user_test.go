package safe

import (
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// dial connects to a socket, as a process of another user.
func dial(address string) int {
	c, err := net.Dial("unix", address)
	if err != nil {
		return 3
	}
	_, _ = c.Read(make([]byte, 1)) // until the test has looked
	return 0
}

func TestCheckUser(t *testing.T) {
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
		return CheckUser(c)
	}
	require.NoError(t, from(os.Geteuid()))
	if os.Geteuid() != 0 {
		t.Skip("only root can start a process of another user")
	}
	err = from(65534)
	require.IsType(t, &UserError{}, err)
	require.Equal(t, 65534, err.(*UserError).UID)
	err = from(1234)
	require.ErrorContains(t, err, "belongs to the user with id 1234, and this one to 0")
}
