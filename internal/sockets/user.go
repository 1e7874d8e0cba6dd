// Package sockets guards the sockets of a process: it limits the connections of a listener, keeps
// file descriptors for other purposes, and identifies the user at the other end of a Unix socket.
// The kernel guarantees that answer, so that processes of one host authenticate without a secret.
package sockets

import (
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
)

// A UserError describes a process of another user.
type UserError struct{ PID, UID int }

func (e *UserError) Error() string {
	if e.UID == unmapped {
		return fmt.Sprintf("the process %d belongs to another user, or to a user that this container does not map", e.PID)
	}
	return fmt.Sprintf("the process %d belongs to the user with id %d, and this one to %d", e.PID, e.UID, os.Geteuid())
}

// unmapped is the user id that a user namespace shows for all users that it does not map.
const unmapped = 65534

// CheckUser returns a *UserError unless the process at the other end of c belongs to the
// same user or to root. That process is the one that connected or called listen.
func CheckUser(c *net.UnixConn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var cred *syscall.Ucred
	var credErr error
	err = raw.Control(func(fd uintptr) {
		cred, credErr = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err == nil {
		err = credErr
	}
	if err != nil {
		return fmt.Errorf("ask for the user at the other end of a socket: %w", err)
	}
	same := cred.Uid == 0 || int(cred.Uid) == os.Geteuid() && (cred.Uid != unmapped || mapsAll())
	if !same {
		return &UserError{PID: int(cred.Pid), UID: int(cred.Uid)}
	}
	return nil
}

// mapsAll reports whether user ids in this process are the same as on the host.
var mapsAll = sync.OnceValue(func() bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && strings.Join(strings.Fields(string(text)), " ") == "0 0 4294967295"
})
