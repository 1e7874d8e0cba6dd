package job

import (
	"context"
	"net"
	"slices"
	"strings"
)

// Debian resolves a host's own name to 127.0.1.1, while other hosts resolve it to an address of the
// host. So a seed listens on all its addresses if the seed's name is such a name.

// isOwnName reports whether a name is this host's, with or without its domain.
func isOwnName(name string) bool {
	own, _, _ := strings.Cut(HostName(), ".")
	short, _, _ := strings.Cut(name, ".")
	return short == own && short != "localhost" && ParseIP(name) == nil
}

// onlyLoopback reports whether all addresses are the loopback's, and there are some.
func onlyLoopback(ips []net.IP) bool {
	return len(ips) > 0 && !slices.ContainsFunc(ips, func(ip net.IP) bool { return !ip.IsLoopback() })
}

// ListenAddr returns the address to listen on if other hosts know this host as addr.
func (s *System) ListenAddr(ctx context.Context, addr string) string {
	h, port, err := net.SplitHostPort(addr)
	if err == nil && isOwnName(h) && onlyLoopback(s.resolve(ctx, h)) {
		return net.JoinHostPort("", port)
	}
	return addr
}

// ownAddress returns an address of this host that other hosts may reach,
// preferably of IPv4, or nil if it has none.
func (s *System) ownAddress() net.IP {
	addrs, err := s.interfaceAddrs()
	if err != nil {
		return nil
	}
	var found net.IP
	for _, a := range addrs {
		n, ok := a.(*net.IPNet)
		if !ok || !n.IP.IsGlobalUnicast() {
			continue
		}
		if four := n.IP.To4(); four != nil {
			return four
		}
		if found == nil {
			found = n.IP
		}
	}
	return found
}

// checkSeeds refuses names such as localhost, which mean this host on every host.
func (s *System) checkSeeds(ctx context.Context, seeds []string) error {
	for _, seed := range seeds {
		h, _, _ := net.SplitHostPort(seed)
		if ParseIP(h) == nil && !isOwnName(h) && onlyLoopback(s.resolve(ctx, h)) {
			return BadConfig("seed %s: on this host the name means the loopback, which other hosts cannot reach: use a name or an address of the host, "+
				"or 127.0.0.1 if all launchers of the job run on this machine", h)
		}
	}
	return nil
}
