package health

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"path"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/env"
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
			list[i] = warn(fmt.Sprintf("%s has %d new errors in %v", portName(p), grown, h.interval), "no new errors", "NCCL repeats transfers, or ends with an error", curePort)
		}
	}
	return list
}

// portName returns the name of a port, such as mlx5_0:1.
func portName(port string) string {
	return path.Base(path.Dir(path.Dir(port))) + ":" + path.Base(port)
}

// checkPort checks the state of a port, whose files begin with a number, such
// as "4: ACTIVE".
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

// portErrors returns the sum of the error counters that a port has, which
// differ by device.
func (h *Host) portErrors(port string) (sum int) {
	for _, name := range []string{"counters/link_downed", "counters/symbol_error", "hw_counters/rnr_nak_retry_err", "hw_counters/packet_seq_err", "hw_counters/local_ack_timeout_err"} {
		if n, err := h.readInt(port + "/" + name); err == nil {
			sum += n
		}
	}
	return sum
}

var gdr = &Check{
	ID: "gdr", Scope: ScopeHost, Source: "/proc/modules, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED",
	Hazard: "The NIC cannot read GPU memory (GPUDirect RDMA).",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    one(checkGDR),
}

func checkGDR(h *Host) Result {
	const want = "nvidia_peermem or DMA buffers"
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	if !h.hasRDMA() {
		return pass("no RDMA device", want)
	}
	modules, err := h.read("proc/modules")
	if err != nil {
		return unread(err)
	}
	for line := range strings.Lines(modules) {
		if strings.HasPrefix(line, "nvidia_peermem ") {
			return pass("nvidia_peermem is loaded", want)
		}
	}
	c := h.cuda()
	switch {
	case c.Err != nil:
		return unread(c.Err)
	case c.Code != 0:
		return unknown("cuInit fails: " + c.Meaning)
	case c.DMABuf:
		return pass("the GPUs export DMA buffers", want)
	}
	return warn("neither", want, "data for other hosts passes through host memory", "load the module nvidia-peermem at the start of the host")
}

var ifname = &Check{
	ID: "ifname", Scope: ScopeHost, Source: "network interfaces, NCCL_SOCKET_IFNAME",
	Hazard: "NCCL connects hosts by a wrong network interface, or finds none.",
	Run:    one(checkIfname),
}

// inner are prefixes of interfaces that other hosts do not reach.
var inner = []string{"lo", "docker", "veth", "virbr", "cni"}

func checkIfname(h *Host) Result {
	all, err := h.usable()
	if err != nil {
		return unread(err)
	}
	chosen, err := h.chosen()
	if err != nil {
		return unread(err)
	}
	const want = "an interface that other hosts reach"
	if len(chosen) == 0 {
		return fail(fmt.Sprintf("NCCL_SOCKET_IFNAME=%s matches none of %s", h.getenv("NCCL_SOCKET_IFNAME"), joined(all)), want, "NCCL's start fails", cureIfname(all))
	}
	found := "NCCL uses " + joined(chosen)
	x := chosen[0]
	switch {
	case hasPrefix(x.Name, inner):
		return warn(found, want, "other hosts do not reach this interface, so NCCL waits until its timeout", cureIfname(all))
	case x.Addrs[0].Addr().IsLinkLocalUnicast() && x.Addrs[0].Addr().Is4():
		return warn(found+" with the address "+x.Addrs[0].String(), want, "the interface has no address of the network", cureIfname(all))
	}
	return pass(found, want)
}

// chosen returns the interfaces that NCCL uses.
func (h *Host) chosen() ([]nic, error) {
	all, err := h.usable()
	if err != nil {
		return nil, err
	}
	settings, err := h.ncclSettings()
	if err != nil {
		return nil, err
	}
	if s := settings["NCCL_SOCKET_IFNAME"]; s.value != "" {
		return matching(all, s.value), nil
	}
	return byDefault(all), nil
}

// firstChosen returns the first interface that NCCL uses.
func (h *Host) firstChosen() (nic, error) {
	chosen, err := h.chosen()
	switch {
	case err != nil:
		return nic{}, err
	case len(chosen) == 0:
		return nic{}, errors.New("NCCL has no interface (see ifname)")
	}
	return chosen[0], nil
}

// usable returns the interfaces that are up and have an address.
func (h *Host) usable() ([]nic, error) {
	all, err := h.interfaces()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(slices.Clone(all), func(i nic) bool { return !i.Up || len(i.Addrs) == 0 }), nil
}

// matching returns the interfaces that a value of NCCL_SOCKET_IFNAME selects: a list of prefixes,
// of names after "=", or of prefixes to exclude after "^".
func matching(all []nic, value string) (out []nic) {
	list, exclude := strings.CutPrefix(value, "^")
	list, exact := strings.CutPrefix(list, "=")
	names := strings.Split(list, ",")
	for _, i := range all {
		hit := exact && slices.Contains(names, i.Name) || !exact && hasPrefix(i.Name, names)
		if hit != exclude {
			out = append(out, i)
		}
	}
	return out
}

// byDefault returns NCCL's choice without the variable: ib*, then all but docker* and lo*, then
// docker*, then lo*.
func byDefault(all []nic) []nic {
	for _, value := range []string{"ib", "^docker,lo", "docker", "lo"} {
		if list := matching(all, value); len(list) > 0 {
			return list
		}
	}
	return all
}

func hasPrefix(name string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

func joined(list []nic) string {
	if len(list) == 0 {
		return "no interface"
	}
	names := make([]string, len(list))
	for i, x := range list {
		names[i] = x.Name
	}
	return strings.Join(names, ", ")
}

// cureIfname names the first interface that other hosts may reach.
func cureIfname(all []nic) string {
	for _, i := range all {
		if !hasPrefix(i.Name, inner) {
			return "set NCCL_SOCKET_IFNAME==" + i.Name
		}
	}
	return "give the host a network interface with an address"
}

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
		addrs, err := h.lookup(ctx, s)
		if err != nil {
			return fail(fmt.Sprintf("the seed %s: %v", s, err), want, "this host does not find the coordinator", cure)
		}
		if isLoopback(addrs) {
			return fail(fmt.Sprintf("the seed %s is %v on this host", s, addrs[0].Unmap()), want, "other hosts do not reach this host by that address", cure)
		}
	}
	addrs, err := h.lookup(ctx, h.Local)
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

var subnets = same(Check{ID: "subnets", Source: "network interfaces", Hazard: "NCCL's interfaces of the hosts are in different networks."}, Warn,
	"traffic between the hosts goes through a router, or another network than intended", "set NCCL_SOCKET_IFNAME on each host to the interface of the common network",
	func(_ context.Context, h *Host) (string, error) {
		i, err := h.firstChosen()
		if err != nil {
			return "", err
		}
		return "network " + i.Addrs[0].Masked().String(), nil
	})

var shm = &Check{
	ID: "shm", Scope: ScopeHost, Source: "statfs of /dev/shm",
	Hazard: "NCCL's buffers between processes do not fit in /dev/shm.",
	Run:    one(checkShm),
}

// Sizes of /dev/shm: Docker's default, and NVIDIA's recommendation.
const (
	dockerShm = 64 << 20
	wantedShm = 1 << 30
)

func checkShm(h *Host) Result {
	const want, cure = "1 GiB or more", "docker run --shm-size=1g or --ipc=host; in Kubernetes mount an emptyDir with medium Memory at /dev/shm"
	s, err := h.spaceOf("/dev/shm")
	if err != nil {
		return unread(err)
	}
	found := bytesText(s.Total) + ", " + bytesText(s.Free) + " free"
	switch {
	case s.Total <= dockerShm && h.ranks() > 1:
		return fail(found, want, "NCCL's buffers do not fit, and its start fails", cure)
	case s.Total < wantedShm:
		return warn(found, want, "NCCL's buffers may not fit", cure)
	case s.Free < dockerShm:
		return warn(found, "64 MiB free", "NCCL's buffers may not fit", "remove files of ended programs from /dev/shm")
	}
	return pass(found, want)
}

var hostCopies = &Check{
	ID: "host-copies", Scope: ScopeGPU, Source: "copies of 256 MiB of pinned memory, one GPU at a time",
	Hazard:   "Copies between the host and a GPU are slow.",
	Measures: true,
	Run:      checkHostCopies,
}

// A Copy has the bandwidth between the host and one GPU.
type Copy struct {
	Rank       int     `json:"rank"`
	Product    string  `json:"product"`
	ToGPU      float64 `json:"to_gpu"` // 10^9 bytes a second
	FromGPU    float64 `json:"from_gpu"`
	Missing    string  `json:"missing,omitempty"` // the reason for no bandwidth
	OnlyMemory bool    `json:"virtual,omitempty"` // a virtual device, whose memory is host memory
}

// leastCopies has the bandwidth that a copy of a product reaches at least.
var leastCopies = []struct {
	product string
	least   float64
}{{"H200", 48}, {"H100", 48}, {"A100", 21}}

// leastOfMedian is the part of the median of all GPUs that a copy reaches at least.
const leastOfMedian = 0.8

func checkHostCopies(_ context.Context, h *Host) []Result {
	if h.Measured == nil || len(h.Measured.Copies) == 0 {
		return []Result{judge(h, func(m *Measured) Speed { return m.Pairs }, "", "", "")}
	}
	median := medianCopy(h.Measured.Copies)
	list := make([]Result, len(h.Measured.Copies))
	for i, c := range h.Measured.Copies {
		list[i] = c.judge(median)
	}
	return list
}

func (c Copy) judge(median float64) Result {
	switch {
	case c.Missing != "":
		return unknown(c.Missing)
	case c.OnlyMemory:
		return unknown("virtual devices: timings are not meaningful")
	}
	least, slower := leastOfMedian*median, min(c.ToGPU, c.FromGPU)
	known := false
	for _, p := range leastCopies {
		if strings.Contains(c.Product, p.product) {
			least, known = max(least, p.least), true
			break
		}
	}
	found := fmt.Sprintf("rank %d: %.1f GB/s to the GPU, %.1f GB/s from it", c.Rank, c.ToGPU, c.FromGPU)
	want := fmt.Sprintf("%.0f GB/s", least)
	switch {
	case slower < least:
		return fail(found, want, "loading data and checkpoints is slower", "check the PCIe link and the NUMA node: chorus doctor --only pcie,numa")
	case !known && median == slower: // the only GPU
		return unknown(found + "; no known bandwidth of " + c.Product)
	}
	return pass(found, want)
}

// medianCopy returns the median of the slower directions of all GPUs.
func medianCopy(list []Copy) float64 {
	var all []float64
	for _, c := range list {
		if c.Missing == "" {
			all = append(all, min(c.ToGPU, c.FromGPU))
		}
	}
	if len(all) == 0 {
		return 0
	}
	slices.Sort(all)
	return all[len(all)/2]
}
