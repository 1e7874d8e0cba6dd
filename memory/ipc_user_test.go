package memory

import (
	"net"
	"os"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/safe"
)

// asUser runs fn on a thread of another user, which ends afterwards.
func asUser(t *testing.T, uid uintptr, fn func() error) error {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user")
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked
		if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uid, ^uintptr(0)); e != 0 {
			done <- e
			return
		}
		err := fn()
		_ = unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) // as before the change of the user
		done <- err
	}()
	return <-done
}

// A process of another user that knows the name of the socket gets no answer, and memory is not taken from a socket of another user.
func TestIPCOfOtherUsers(t *testing.T) {
	v, err := newServer()
	require.NoError(t, err)
	defer v.close()
	var c *net.UnixConn
	dial := func() (err error) {
		c, err = net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: v.name, Net: "unixpacket"})
		return err
	}
	ask := func() error {
		defer c.Close()
		if err := sendPacket(c, &ipcRequest{Op: "none"}, nil); err != nil {
			return err
		}
		var a ipcAnswer
		_, err := receivePacket(c, &a)
		return err
	}
	require.NoError(t, dial())
	require.NoError(t, ask(), "of this user")
	require.NoError(t, asUser(t, 1234, dial))
	require.Error(t, ask(), "of another user")

	var l *net.UnixListener
	require.NoError(t, asUser(t, 1234, func() (err error) {
		l, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: v.name + "-other", Net: "unixpacket"})
		return err
	}))
	defer l.Close()
	_, err = (&ipc{links: map[string]*ipcLink{}}).link(v.name + "-other")
	var other *safe.UserError
	require.ErrorAs(t, err, &other)
	require.Equal(t, 1234, other.UID)
}
