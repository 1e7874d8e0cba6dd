package job

import (
	"context"
	"errors"
	"net"
	"syscall"
)

// errReplaced is the error of a connection to another process of the job in the place of the expected one.
type errReplaced struct{ ip string }

func (errReplaced) Error() string { return "another process has the coordinator's port" }

// provesEnd reports whether the error of an attempt to connect to addr proves that a process has ended that was at the address
// ip: its kernel refuses connections, or another process of the job answers there. A name that leads to another
// address by now, for example because a pod was replaced, proves nothing about the process. ip is "" if processes
// communicate without a network.
func provesEnd(err error, addr, ip string) bool {
	var replaced errReplaced
	switch {
	case errors.As(err, &replaced):
		return sameIP(replaced.ip, ip)
	case !errors.Is(err, syscall.ECONNREFUSED):
		return false
	}
	host, _, _ := net.SplitHostPort(addr)
	if op, ok := errors.AsType[*net.OpError](err); ok {
		if t, ok := op.Addr.(*net.TCPAddr); ok {
			host = t.IP.String()
		}
	}
	return ip == "" || sameIP(host, ip)
}

func sameIP(a, b string) bool {
	x := ParseIP(a)
	return a == b || x != nil && x.Equal(ParseIP(b))
}

// probe tries to reach the launcher of a host, which was last heard at the address ip. If ip is "", a name in the host's address
// proves nothing.
func (a *Agent) probe(ctx context.Context, h host, ip string) finding {
	if at, _, _ := net.SplitHostPort(h.Control); ParseIP(at) != nil {
		ip = at // it listens there
	}
	l, hello, err := a.to(h.Control).Dial(ctx)
	if l != nil {
		if hello.Agent != h.UUID {
			err = errReplaced{addrIP(l.Conn.RemoteAddr())}
		}
		l.Close()
	} else if r, ok := errors.AsType[*Referral](err); ok {
		switch err = nil; {
		case hello.Agent != h.UUID:
			err = errReplaced{r.ip}
		case r.Over != "":
			return foundNothing
		}
	}
	switch {
	case err == nil:
		return foundAlive
	case ip != "" && provesEnd(err, h.Control, ip):
		return foundEnded
	}
	return foundNothing
}
