package doctor

import (
	"context"
	"fmt"
	"io/fs"
	"path"
	"strings"
)

var rdmaPort = &Check{
	ID: "rdma-port", Scope: ScopeLink, Source: "/sys/class/infiniband/*/ports/*",
	Hazard: "A port for RDMA is down, slow, or has errors.",
	Run:    checkRDMA,
}

const curePort = "check the cable, the switch port and the subnet manager"

func checkRDMA(ctx context.Context, h *Host) []Result {
	ports, _ := fs.Glob(h.Root, rdmaDir+"/*/ports/*") // the pattern is valid
	if len(ports) == 0 {
		if _, err := fs.ReadDir(h.Root, "sys/class/net"); err != nil {
			return []Result{unread(rooted(err))}
		}
		return []Result{pass("no RDMA device", "all ports active")}
	}
	before := make([]int, len(ports))
	for i, p := range ports {
		before[i] = h.portErrors(p)
	}
	if err := h.wait(ctx); err != nil {
		return []Result{unread(err)}
	}
	fastest := ""
	for _, p := range ports {
		if r, err := h.read(p + "/rate"); err == nil && rate(r) > rate(fastest) {
			fastest = r
		}
	}
	list := make([]Result, len(ports))
	for i, p := range ports {
		list[i] = h.checkPort(p, fastest)
		if grown := h.portErrors(p) - before[i]; grown > 0 && list[i].Verdict == Pass {
			list[i] = warn(fmt.Sprintf("%s has %d new errors in %v", portName(p), grown, h.Interval), "no new errors", "NCCL repeats transfers, or ends with an error", curePort)
		}
	}
	return list
}

// portName returns the name of a port, such as mlx5_0:1.
func portName(port string) string {
	return path.Base(path.Dir(path.Dir(port))) + ":" + path.Base(port)
}

// checkPort checks the state of a port. The files begin with a number, such as "4: ACTIVE".
func (h *Host) checkPort(port, fastest string) Result {
	var v [3]string
	for i, name := range []string{"state", "phys_state", "rate"} {
		var err error
		if v[i], err = h.read(port + "/" + name); err != nil {
			return unread(err)
		}
	}
	found := fmt.Sprintf("%s is %s, %s, %s", portName(port), v[0], v[1], v[2])
	const want = "active, with the rate of the other ports"
	switch {
	case strings.HasPrefix(v[1], "3:"):
		return pass(found, want) // disabled by the administrator
	case !strings.HasPrefix(v[0], "4:") || !strings.HasPrefix(v[1], "5:"):
		return fail(found, want, "NCCL leaves this port out, or its start fails", curePort)
	case rate(v[2]) < rate(fastest):
		return fail(found, "the rate of "+fastest, "all transfers wait for the slowest port", curePort)
	}
	return pass(found, want)
}

// rate returns the number of a text such as "400 Gb/sec (4X NDR)", or 0.
func rate(text string) (gbits float64) {
	_, _ = fmt.Sscanf(text, "%g", &gbits) // 0 for another text
	return gbits
}

// portErrors returns the sum of the error counters of a port. Devices have different counters.
func (h *Host) portErrors(port string) (sum int) {
	for _, name := range []string{"counters/link_downed", "counters/symbol_error", "hw_counters/rnr_nak_retry_err", "hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err"} {
		if n, err := h.readInt(port + "/" + name); err == nil {
			sum += n
		}
	}
	return sum
}
