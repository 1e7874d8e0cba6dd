package job

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"
)

// A System is what the members of a job use of their machine: the network, names, and the state of processes. A nil
// System, or a nil function of it, is this machine's. A simulation has others, so that it can cut the network, and stop and
// kill processes that are goroutines.
type System struct {
	Dial      func(ctx context.Context, network, addr string) (net.Conn, error)
	Listen    func(network, addr string) (net.Listener, error)
	Lookup    func(ctx context.Context, name string) ([]net.IP, error)
	Addrs     func() ([]net.Addr, error) // of the interfaces
	Suspended func(pid int) bool
	PID       int // of this process; 0 means os.Getpid
	// Run blocks while this process is stopped. All timers that decide call it first.
	Run func()
	// Watch is called when a coordinator, which holds its lock, proposes or begins an epoch.
	Watch func(Change)
}

// A simulatedConn is a connection of a simulation, which authenticates the ends itself, without cryptography. Only tests of
// this package can implement it.
type simulatedConn interface {
	Handshake(job string, by Credential, dialer bool) (*Link, error)
}

func (s *System) dialContext(ctx context.Context, addr string) (net.Conn, error) {
	if s != nil && s.Dial != nil {
		return s.Dial(ctx, networkOf(addr), addr)
	}
	d := net.Dialer{Timeout: DialAttempt}
	return d.DialContext(ctx, networkOf(addr), addr)
}

// ListenAt opens the coordinator's port, and names the purpose of the port in
// its error.
func (s *System) ListenAt(addr string) (ln net.Listener, err error) {
	if s != nil && s.Listen != nil {
		ln, err = s.Listen(networkOf(addr), addr)
	} else {
		ln, err = listening.Listen(context.Background(), networkOf(addr), addr)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: listen on %s for the coordinator: %w", addr, err)
	}
	return ln, nil
}

// resolve returns the addresses of a name, or nil if the name does not resolve
// yet, as happens for half a minute after the start of a pod.
func (s *System) resolve(ctx context.Context, name string) []net.IP {
	if ip := ParseIP(name); ip != nil {
		return []net.IP{ip}
	}
	ctx, cancel := context.WithTimeout(ctx, DialAttempt)
	defer cancel()
	lookup := func(ctx context.Context, name string) ([]net.IP, error) {
		return net.DefaultResolver.LookupIP(ctx, "ip", name)
	}
	if s != nil && s.Lookup != nil {
		lookup = s.Lookup
	}
	ips, err := lookup(ctx, name)
	if err != nil {
		return nil
	}
	return ips
}

func (s *System) interfaceAddrs() ([]net.Addr, error) {
	if s != nil && s.Addrs != nil {
		return s.Addrs()
	}
	return net.InterfaceAddrs()
}

func (s *System) Getpid() int {
	if s != nil && s.PID != 0 {
		return s.PID
	}
	return os.Getpid()
}

// isSuspended reports whether a process of this machine is stopped, for example by Ctrl-Z.
func (s *System) isSuspended(pid int) bool {
	if s != nil && s.Suspended != nil {
		return s.Suspended(pid)
	}
	return ProcessOf(pid).IsStopped()
}

// await blocks while a simulation stops this process.
func (s *System) await() {
	if s != nil && s.Run != nil {
		s.Run()
	}
}

// A Change is an epoch that a coordinator proposes or has begun, as a simulation sees it.
type Change struct {
	Agent   string // UUID of the coordinator's host
	Term    uint64
	Epoch   uint64
	Begun   bool
	Members []Member
	Voters  []string // UUIDs of hosts
}

// observe shows a simulation that c has proposed or begun an epoch. The caller holds the lock of c.
func (s *System) observe(c *coordinator, begun bool) {
	if s == nil || s.Watch == nil {
		return
	}
	v := Change{Agent: c.cfg.Self.Agent, Term: c.term, Epoch: c.epoch, Begun: begun}
	if begun {
		v.Members, v.Voters = c.world.Members, c.voterSets[0]
	} else {
		v.Epoch, v.Voters = c.epoch+1, c.elastic.voters
		for _, p := range c.elastic.peers {
			v.Members = append(v.Members, p.reg.Member)
		}
	}
	s.Watch(v)
}

// Sleep waits for d and returns false if ctx ended first.
func Sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}
