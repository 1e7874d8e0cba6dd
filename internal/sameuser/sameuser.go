// Package sameuser tells whether the process at the other end of a Unix socket
// belongs to the user of this one. The kernel vouches for the answer, so that
// processes of one host need no secret to know each other.
package sameuser

import (
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
)

// An Error says whose process is at the other end.
type Error struct{ PID, UID int }

func (e *Error) Error() string {
	if e.UID == unmapped {
		return fmt.Sprintf("the process %d belongs to another user, or to one that this container does not map", e.PID)
	}
	return fmt.Sprintf("the process %d belongs to the user with id %d, and this one to %d", e.PID, e.UID, os.Geteuid())
}

// unmapped is the id that a user namespace shows for every user it does not map.
const unmapped = 65534

// Check returns an *Error unless the process at the other end of c is of the same
// user as this one, or of root. The other end is whoever connected, or has called
// listen.
func Check(c *net.UnixConn) error {
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
		return &Error{PID: int(cred.Pid), UID: int(cred.Uid)}
	}
	return nil
}

// mapsAll reports whether ids of users mean the same in this process as on the host.
var mapsAll = sync.OnceValue(func() bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && strings.Join(strings.Fields(string(text)), " ") == "0 0 4294967295"
})
