package sockets

import (
	"net"
	"slices"
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

// TakesReserve reports whether a connection that was just accepted has one of the last file descriptors of this process,
// which are kept for starting processes. The kernel gives the lowest free number.
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
