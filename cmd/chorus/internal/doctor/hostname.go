package doctor

import (
	"context"
	"fmt"
	"net"
	"strings"

	"github.com/gochorus/chorus/internal/env"
)

var hostname = &Check{
	ID: "hostname", Scope: ScopeHost, Source: "resolver: this host's name and CHORUS_SEEDS",
	Hazard: "A name of this host or of a seed resolves to the loopback address.",
	Run: func(ctx context.Context, h *Host) []Result {
		return []Result{checkHostname(ctx, h)}
	},
}

func checkHostname(ctx context.Context, h *Host) Result {
	const want, cure = "addresses that other hosts reach", "use addresses in --seeds, or correct /etc/hosts"
	seeds := h.seeds()
	for _, s := range seeds {
		addrs, err := h.Lookup(ctx, s)
		if err != nil {
			return fail(fmt.Sprintf("the seed %s: %v", s, err), want, "this host does not find the coordinator", cure)
		}
		if isLoopback(addrs) {
			return fail(fmt.Sprintf("the seed %s is %v on this host", s, addrs[0].Unmap()), want, "other hosts do not reach this host by that address", cure)
		}
	}
	addrs, err := h.Lookup(ctx, h.Local)
	if err != nil {
		return unread(err)
	}
	if len(addrs) == 0 {
		return unknown("the resolver returns no address of " + h.Local)
	}
	found := fmt.Sprintf("%s is %v", h.Local, addrs[0].Unmap())
	switch {
	case !isLoopback(addrs):
		return pass(found, want)
	case len(seeds) == 0:
		return pass(found+", which jobs on several hosts must not use as a seed", want)
	}
	return warn(found, want, "programs that publish this name are not reachable from other hosts", cure)
}

// seeds returns the names in CHORUS_SEEDS.
func (h *Host) seeds() (list []string) {
	for s := range strings.SplitSeq(h.getenv(env.Seeds.Name), ",") {
		if s = strings.TrimSpace(s); s == "" {
			continue
		}
		if host, _, err := net.SplitHostPort(s); err == nil {
			s = host
		}
		s = strings.Trim(s, "[]") // an IPv6 address without a port
		list = append(list, s)
	}
	return list
}
