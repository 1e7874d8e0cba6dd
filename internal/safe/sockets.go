package safe

import (
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reserve is the number of file descriptors that connections of strangers leave free. Starting a process takes eight.
const reserve = 64

// limit returns the number of file descriptors that this process may have.
var limit = sync.OnceValue(func() uint64 {
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
		return 1 << 20
	}
	return l.Cur
})

// TakesReserve reports whether a connection that was just accepted has one of
// the last file descriptors of this process, which are kept for starting
// processes. That shows that the others are in use, because the kernel gives
// the lowest free number.
func TakesReserve(c net.Conn) bool {
	s, ok := c.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return false
	}
	var number uint64
	if err := raw.Control(func(fd uintptr) { number = uint64(fd) }); err != nil {
		return false
	}
	return number+reserve >= limit()
}

// A Listener has at most a number of connections. When there is no room for another one, it closes the oldest one that is not
// answered just now.
type Listener struct {
	net.Listener
	most int

	mu    sync.Mutex
	conns []*conn // oldest first
}

// A conn is a connection of a Listener.
type conn struct {
	net.Conn
	of     *Listener
	active bool // guarded by of.mu
}

// NewListener returns a listener that limits the connections of ln.
func NewListener(ln net.Listener, most int) *Listener { return &Listener{Listener: ln, most: most} }

// Accept waits for a connection that there is room for.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		if n := (&conn{Conn: c, of: l}); !TakesReserve(c) && l.add(n) {
			return n, nil
		}
		c.Close()
	}
}

// add reports whether there is room for c.
func (l *Listener) add(c *conn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.conns) >= l.most {
		i := slices.IndexFunc(l.conns, func(o *conn) bool { return !o.active })
		if i < 0 {
			return false
		}
		l.conns[i].Conn.Close() // its server notices, and closes it, too
		l.conns = slices.Delete(l.conns, i, i+1)
	}
	l.conns = append(l.conns, c)
	return true
}

// SetActive tells whether a connection of a Listener is answered just now.
func SetActive(c net.Conn, active bool) {
	if n, ok := c.(*conn); ok {
		n.of.mu.Lock()
		defer n.of.mu.Unlock()
		n.active = active
	}
}

func (c *conn) Close() error {
	c.of.mu.Lock()
	c.of.conns = slices.DeleteFunc(c.of.conns, func(o *conn) bool { return o == c })
	c.of.mu.Unlock()
	return c.Conn.Close()
}

// A UserError describes a process of another user. PID is 0 if the process is not known.
type UserError struct{ PID, UID int }

func (e *UserError) Error() string {
	what := fmt.Sprintf("the process %d", e.PID)
	if e.PID == 0 {
		what = "the process at the other end"
	}
	if e.UID == unmapped {
		return what + " belongs to another user, or to a user that this container does not map"
	}
	return fmt.Sprintf("%s belongs to the user with id %d, and this one to %d", what, e.UID, os.Geteuid())
}

// unmapped is the user id that a user namespace shows for all users that it does not map.
const unmapped = 65534

// CheckUser returns a *UserError unless the process at the other end of c belongs to the
// same user or to root. That process is the one that connected or called listen.
func CheckUser(c *net.UnixConn) error {
	_, err := PeerOf(c)
	return err
}

// PeerOf is CheckUser that also returns the number of that process, or 0 if it has none in this namespace of processes.
func PeerOf(c *net.UnixConn) (pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
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
		return 0, fmt.Errorf("ask for the user at the other end of a socket: %w", err)
	}
	if !isThisUser(int(cred.Uid)) {
		return 0, &UserError{PID: int(cred.Pid), UID: int(cred.Uid)}
	}
	return int(cred.Pid), nil
}

// isThisUser reports whether a user id is that of this process or root.
func isThisUser(uid int) bool {
	return uid == 0 || uid == os.Geteuid() && (uid != unmapped || mapsAll())
}

// mapsAll reports whether user ids in this process are the same as on the host.
var mapsAll = sync.OnceValue(func() bool {
	text, err := os.ReadFile("/proc/self/uid_map")
	return err == nil && strings.Join(strings.Fields(string(text)), " ") == "0 0 4294967295"
})
