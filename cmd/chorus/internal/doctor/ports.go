package doctor

import (
	"strings"
)

var ports = &Check{
	ID: "ports", Scope: ScopeJob, Source: "TCP connections between all pairs of hosts",
	Hazard: "A firewall blocks the ports between hosts that NCCL uses.",
	compare: func(hosts []*Facts) []Result {
		const want = "each host reaches each other host on any port"
		var list []Result
		for _, f := range hosts {
			if f.Broken != "" {
				list = append(list, unknown("host "+f.Host+": "+f.Broken))
			}
			if len(f.Ports) > 0 {
				r := fail(strings.Join(f.Ports, "; "), want, "NCCL's connections fail: it uses any port of net.ipv4.ip_local_port_range",
					"open net.ipv4.ip_local_port_range between the hosts, or narrow it: sysctl net.ipv4.ip_local_port_range=\"50000 51000\"")
				r.Host = f.Host
				list = append(list, r)
			}
		}
		if len(list) == 0 {
			return []Result{pass("all pairs", want)}
		}
		return list
	},
}
