package cluster

import (
	"context"
	"fmt"
	"net"
	"os"
)

// A system is what the members of a job use of their machine: the network, names, and the state of processes. A nil
// system, or a nil function of it, is this machine's. A simulation has others, so that it can cut the network, and stop and
// kill processes that are goroutines.
type system struct {
	dial      func(ctx context.Context, network, addr string) (net.Conn, error)
	listen    func(network, addr string) (net.Listener, error)
	lookup    func(ctx context.Context, name string) ([]net.IP, error)
	addrs     func() ([]net.Addr, error) // of the interfaces
	suspended func(pid int) bool
	pid       int // of this process; 0 means os.Getpid
	// run blocks while this process is stopped. All timers that decide call it first.
	run func()
	// watch observes a coordinator, which holds its lock, when it proposes and begins an epoch.
	watch func(c *coordinator, committed bool)
}

// A simulatedConn is a connection of a simulation, which authenticates the ends itself, without cryptography. Only tests of
// this package can implement it.
type simulatedConn interface {
	handshake(job string, by credential, dialer bool) (*link, error)
}

func (s *system) dialContext(ctx context.Context, addr string) (net.Conn, error) {
	if s != nil && s.dial != nil {
		return s.dial(ctx, networkOf(addr), addr)
	}
	d := net.Dialer{Timeout: dialAttempt}
	return d.DialContext(ctx, networkOf(addr), addr)
}

// listenAt opens the coordinator's port. It adds the purpose of the port to the kernel's error.
func (s *system) listenAt(addr string) (ln net.Listener, err error) {
	if s != nil && s.listen != nil {
		ln, err = s.listen(networkOf(addr), addr)
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
func (s *system) resolve(ctx context.Context, name string) []net.IP {
	if ip := parseIP(name); ip != nil {
		return []net.IP{ip}
	}
	ctx, cancel := context.WithTimeout(ctx, dialAttempt)
	defer cancel()
	lookup := func(ctx context.Context, name string) ([]net.IP, error) {
		return net.DefaultResolver.LookupIP(ctx, "ip", name)
	}
	if s != nil && s.lookup != nil {
		lookup = s.lookup
	}
	ips, err := lookup(ctx, name)
	if err != nil {
		return nil
	}
	return ips
}

func (s *system) interfaceAddrs() ([]net.Addr, error) {
	if s != nil && s.addrs != nil {
		return s.addrs()
	}
	return net.InterfaceAddrs()
}

func (s *system) getpid() int {
	if s != nil && s.pid != 0 {
		return s.pid
	}
	return os.Getpid()
}

// isSuspended reports whether a process of this machine is stopped, for example by Ctrl-Z.
func (s *system) isSuspended(pid int) bool {
	if s != nil && s.suspended != nil {
		return s.suspended(pid)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return err == nil && isStopped(b)
}

// await blocks while a simulation stops this process.
func (s *system) await() {
	if s != nil && s.run != nil {
		s.run()
	}
}

// observe shows a simulation that c has proposed or begun an epoch. The caller holds the lock of c.
func (s *system) observe(c *coordinator, committed bool) {
	if s != nil && s.watch != nil {
		s.watch(c, committed)
	}
}
