package health

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"path"
	"regexp"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/internal/nvml"
)

var nvlink = &Check{
	ID: "nvlink", Scope: ScopeGPU, Source: "nvmlDeviceGetNvLinkState, NVML_FI_DEV_NVLINK_GET_SPEED, nvmlDeviceGetNvLinkErrorCounter",
	Hazard: "An NVLink is down, slow, or has errors.",
	Needs:  []string{"device-nodes", "driver-mismatch", "fabric-manager"},
	Run:    perGPU(checkNVLink),
}

// A linkModel has the links of a product whose links are all connected.
type linkModel struct {
	name  string // part of the product's name
	links int
	speed int // MB/s of a link in one direction
}

var linkModels = []linkModel{
	{"GB300", 18, 53125}, {"GB200", 18, 53125}, {"B300", 18, 53125}, {"B200", 18, 53125},
	{"H200", 18, 26562}, {"H100 80GB HBM3", 18, 26562}, {"A100-SXM4", 12, 25000},
}

// modelOf returns the model of a product, or nil for cards, whose links may have no bridge.
func modelOf(name string) *linkModel {
	for i, m := range linkModels {
		if strings.Contains(name, m.name) && !strings.Contains(name, "NVL") && !strings.Contains(name, "PCIe") {
			return &linkModels[i]
		}
	}
	return nil
}

const cureNVLink = "reset all GPUs, restart the fabric manager, and replace the board if it comes again"

func checkNVLink(ctx context.Context, h *Host, g *gpu) Result {
	up, err := g.NVLinks()
	if err != nil {
		return unread(err)
	}
	name, err := g.Name()
	if err != nil {
		return unread(err)
	}
	active := 0
	for _, u := range up {
		if u {
			active++
		}
	}
	gpus, _ := h.gpus()
	found, m := fmt.Sprintf("%d of %d links up", active, len(up)), modelOf(name)
	switch {
	case m == nil || len(gpus) == 1 && active == 0:
		return pass(found, "all links up if the GPUs have NVLink")
	case active < m.links:
		return fail(found, fmt.Sprintf("%d of %d", m.links, m.links), "peer copies are slower, or go through host memory", cureNVLink)
	}
	for i, u := range up {
		if speed, err := g.NVLinkSpeed(i); u && err == nil && speed < m.speed*95/100 {
			return fail(fmt.Sprintf("link %d runs at %d MB/s", i, speed), fmt.Sprintf("%d MB/s", m.speed), "peer copies are slower", cureNVLink)
		}
	}
	return checkLinkErrors(ctx, h, g, up, found)
}

// mostCRC is the number of CRC errors in one second that fail a link.
const mostCRC = 100

// checkLinkErrors reads the counters of all links twice.
func checkLinkErrors(ctx context.Context, h *Host, g *gpu, up []bool, found string) Result {
	before, err := crcErrors(g, up)
	if err != nil {
		return unknown(found + "; " + err.Error())
	}
	if err := h.wait(ctx); err != nil {
		return unread(err)
	}
	after, err := crcErrors(g, up)
	if err != nil {
		return unknown(found + "; " + err.Error())
	}
	for i := range up {
		if n := after[i] - before[i]; after[i] > before[i] && n >= mostCRC { // a reset sets the counter to 0
			return fail(fmt.Sprintf("%d CRC errors of link %d in %v", n, i, h.interval), fmt.Sprintf("fewer than %d", mostCRC), "the link repeats transfers", cureNVLink)
		}
		for _, c := range []nvml.LinkCounter{nvml.LinkReplays, nvml.LinkRecoveries} {
			if n, err := g.NVLinkErrors(i, c); up[i] && err == nil && n > 0 {
				return warn(fmt.Sprintf("%d replays or recoveries of link %d since the driver was loaded", n, i), "none", "the link had errors", cureNVLink)
			}
		}
	}
	return pass(found+", no errors", "all links up, no errors")
}

func crcErrors(g *gpu, up []bool) ([]uint64, error) {
	list := make([]uint64, len(up))
	for i, u := range up {
		if !u {
			continue
		}
		n, err := g.NVLinkErrors(i, nvml.LinkCRC)
		if err != nil {
			return nil, err
		}
		list[i] = n
	}
	return list, nil
}

var fabricManager = &Check{
	ID: "fabric-manager", Scope: ScopeGPU, Source: "PCI bus, cuInit, nvmlDeviceGetGpuFabricInfoV",
	Hazard: "The host has NVSwitches and the fabric manager has not configured them.",
	Needs:  []string{"device-nodes"},
	Run:    perGPU(checkFabric),
}

const (
	wantFabric = "registration completed"
	cureFabric = "run systemctl start nvidia-fabricmanager on the host, with the same version as the driver"
)

func checkFabric(_ context.Context, h *Host, g *gpu) Result {
	if c := h.cuda(); c.Code == cudaNotReady {
		return fail("cuInit returns 802, system not ready", wantFabric, "CUDA does not start: the fabric manager does not run", cureFabric)
	}
	f, err := g.Fabric()
	switches := h.hasNVSwitch()
	switch {
	case err != nil && (switches || !errors.Is(err, errors.ErrUnsupported)):
		return unread(err)
	case err != nil || f.State == nvml.FabricNotSupported:
		return pass("no fabric", "a registration if there are NVSwitches")
	case f.State == nvml.FabricNotStarted || f.State == nvml.FabricInProgress:
		found := fmt.Sprintf("registration state %d of 3", f.State)
		if !switches { // a GPU alone in a virtual machine stays in this state and works
			return pass(found+", and no NVSwitch", "a registration if there are NVSwitches")
		}
		return fail(found, wantFabric, "the GPUs do not reach each other by NVLink", cureFabric)
	case f.Status != 0:
		return fail(fmt.Sprintf("the registration ended with NVML's error %d", f.Status), wantFabric, "the GPUs do not reach each other by NVLink", cureFabric)
	case f.DegradedBandwidth():
		return warn("degraded bandwidth", "full bandwidth", "collectives are slower than on other hosts", "read /var/log/fabricmanager.log, and reset all GPUs")
	case f.Misconfigured():
		return warn(fmt.Sprintf("wrong configuration (health mask %#x)", f.Health), "a correct configuration", "the fabric may lack links", "read /var/log/fabricmanager.log")
	}
	return pass(wantFabric, wantFabric)
}

// hasNVSwitch reports whether the host has NVSwitches.
func (h *Host) hasNVSwitch() bool {
	const nvidia, bridge = "0x10de", "0x0680"
	nodes, _ := fs.Glob(h.Root, "dev/nvidia-nvswitch*") // the pattern is valid
	return len(nodes) > 0 || len(h.pciDevices(nvidia, bridge)) > 0
}

var pcie = &Check{
	ID: "pcie", Scope: ScopeGPU, Source: "/sys/bus/pci/devices, nvmlDeviceGetPcieReplayCounter",
	Hazard: "A PCIe link of the GPU or of a bridge above it lost lanes, or repeats packets.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkPCIe),
}

const curePCIe = "reseat the card or the riser, and check the slot's settings in the BIOS"

func checkPCIe(ctx context.Context, h *Host, g *gpu) Result {
	id, err := g.PCIBusID()
	if err != nil {
		return unread(err)
	}
	chain, err := h.pciPath(id)
	if err != nil {
		return unread(err)
	}
	// The two ports of a switch are not connected by a link. So the 1st and the 2nd device share a
	// link, the 3rd and the 4th, and so on.
	for i := 0; i+1 < len(chain); i += 2 {
		current, most, err := h.linkWidth(chain[i], chain[i+1])
		switch {
		case err != nil:
			return unread(err)
		case current < most:
			return fail(fmt.Sprintf("%s has %d of %d lanes", path.Base(chain[i]), current, most), fmt.Sprintf("%d lanes", most), "copies between host and GPU are slower", curePCIe)
		}
	}
	lanes, _, err := h.linkWidth(chain[0], "")
	if err != nil {
		return unread(err)
	}
	speed, err := h.read(chain[0] + "/max_link_speed")
	if err != nil {
		return unread(err)
	}
	return checkReplays(ctx, h, g, lanes, speed)
}

// checkReplays compares the replays of one interval with the limit of a minute.
func checkReplays(ctx context.Context, h *Host, g *gpu, lanes int, speed string) Result {
	found := fmt.Sprintf("%d lanes, at most %s", lanes, speed)
	before, err := g.PCIeReplays()
	if err != nil {
		return unknown(found + "; " + err.Error())
	}
	if err := h.wait(ctx); err != nil {
		return unread(err)
	}
	after, err := g.PCIeReplays()
	if err != nil {
		return unknown(found + "; " + err.Error())
	}
	if limit := mostReplays(lanes, speed); after-before > limit {
		return warn(fmt.Sprintf("%d replays in %v", after-before, h.interval), fmt.Sprintf("at most %d a minute", limit), "the link repeats packets, so copies are slower", curePCIe)
	}
	return pass(found+", no replays", "all lanes, few replays")
}

var gigatransfers = regexp.MustCompile(`^([0-9.]+) GT/s`)

// mostReplays returns the replays of a minute that a healthy link has at most, which grow with
// the lanes and the speed.
func mostReplays(lanes int, speed string) int {
	gt := 2.5
	if m := gigatransfers.FindStringSubmatch(speed); m != nil {
		if v, err := strconv.ParseFloat(m[1], 64); err == nil {
			gt = v
		}
	}
	const each = 0.06 // for each lane and GT/s
	return int(math.Ceil(float64(lanes) * gt * each))
}

// pciPath returns the sysfs folders of a device and of the bridges above it.
func (h *Host) pciPath(id string) ([]string, error) {
	link := "sys/bus/pci/devices/" + id
	to, err := fs.ReadLink(h.Root, link)
	if err != nil {
		return nil, rooted(err)
	}
	dir := path.Join(path.Dir(link), to)
	var chain []string
	for ; strings.Count(path.Base(dir), ":") == 2; dir = path.Dir(dir) { // 0000:06:00.0, not pci0000:00
		chain = append(chain, dir)
	}
	if len(chain) == 0 {
		return nil, fmt.Errorf("/%s leads to /%s, which is not a PCI device", link, dir)
	}
	return chain, nil
}

// linkWidth returns the lanes of the link between a device and the port above it, and the lanes
// that both could have. Without a port it uses the device's numbers.
func (h *Host) linkWidth(dev, port string) (current, most int, err error) {
	if current, err = h.readInt(dev + "/current_link_width"); err != nil {
		return 0, 0, err
	}
	if most, err = h.readInt(dev + "/max_link_width"); err != nil {
		return 0, 0, err
	}
	const notKnown = 255
	if port != "" {
		if n, err := h.readInt(port + "/max_link_width"); err == nil && n > 0 { // virtual bridges have none
			most = min(most, n)
		}
	}
	if current == 0 || current == notKnown || most == notKnown {
		return 0, 0, fmt.Errorf("/%s: the device does not report its lanes", dev)
	}
	return current, most, nil
}

var peerData = &Check{
	ID: "peer-data", Scope: ScopeLink, Source: "copies between all pairs of GPUs, as CHORUS_P2P=auto tests them",
	Hazard:   "Direct copies between two GPUs bring wrong data.",
	Measures: true,
	Run: one(func(h *Host) Result {
		return judge(h, func(m *Measured) Speed { return m.Peers }, "right data", "programs that use peer access compute with wrong data",
			"see the check iommu-acs; until then CHORUS_P2P=off and NCCL_P2P_DISABLE=1")
	}),
}

var iommu = &Check{
	ID: "iommu-acs", Scope: ScopeGPU, Source: "/proc/cpuinfo, iommu_group/type and PCI configuration in /sys/bus/pci/devices",
	Hazard: "The IOMMU or ACS sends copies between GPUs through the processor.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkIOMMU),
}

func checkIOMMU(_ context.Context, h *Host, g *gpu) Result {
	const want = "no translation, and no redirection by ACS"
	cpu, err := h.read("proc/cpuinfo")
	if err != nil {
		return unread(err)
	}
	if strings.Contains(cpu, " hypervisor") {
		return pass("a virtual machine, whose host needs ACS", want)
	}
	id, err := g.PCIBusID()
	if err != nil {
		return unread(err)
	}
	kind, err := h.read("sys/bus/pci/devices/" + id + "/iommu_group/type")
	switch {
	case absent(err):
		kind = "no IOMMU"
	case err != nil:
		return unread(err)
	case kind != "identity":
		return warn("the IOMMU translates addresses ("+kind+")", want, "copies between GPUs and to NICs are slower, or arrive wrong",
			"add iommu=pt to the kernel's command line")
	}
	return h.checkACS(id, kind, want)
}

// checkACS reads the ACS control of the bridges above a GPU.
func (h *Host) checkACS(id, found, want string) Result {
	chain, err := h.pciPath(id)
	if err != nil {
		return unread(err)
	}
	for _, bridge := range chain[1:] {
		control, err := h.acsControl(bridge)
		if err != nil {
			return unread(err)
		}
		const redirects = 0xc // requests and completions
		if control&redirects != 0 {
			name := path.Base(bridge)
			return warn("the bridge "+name+" redirects", want, "copies between GPUs pass through the processor",
				fmt.Sprintf("setpci -s %s ECAP_ACS+0x6.w=0000, or NCCL_P2P_DISABLE=1 and CHORUS_P2P=off", name))
		}
	}
	return pass(found+", no redirection", want)
}

// acsControl returns the control register of a bridge's ACS capability, or 0 without one.
func (h *Host) acsControl(bridge string) (uint16, error) {
	const first, acs = 0x100, 0x000d
	config, err := h.readBytes(bridge + "/config")
	if err != nil {
		return 0, err
	}
	if len(config) <= first {
		return 0, fmt.Errorf("/%s/config has %d bytes: only root reads all 4096", bridge, len(config))
	}
	for at, steps := first, 0; at >= first && at+8 <= len(config) && steps < 100; steps++ {
		head := binary.LittleEndian.Uint32(config[at:])
		if head&0xffff == acs {
			return binary.LittleEndian.Uint16(config[at+6:]), nil
		}
		at = int(head >> 20)
	}
	return 0, nil
}

var pairs = &Check{
	ID: "pairs", Scope: ScopeLink, Source: "chorus perf pairs",
	Hazard:   "Copies between two GPUs are slower than between the others.",
	Measures: true,
	Run: one(func(h *Host) Result {
		return judge(h, func(m *Measured) Speed { return m.Pairs }, "all pairs alike", "collectives run at the speed of the slowest pair",
			"check the links of the named GPUs: chorus doctor --only nvlink,pcie,iommu-acs")
	}),
}

// judge converts the verdict of a benchmark.
func judge(h *Host, which func(*Measured) Speed, want, cause, cure string) Result {
	if h.Measured == nil {
		return unknown("not measured")
	}
	switch s := which(h.Measured); {
	case s.Missing != "":
		return unknown(s.Missing)
	case s.OK:
		return pass(s.Reason, want)
	default:
		return fail(s.Reason, want, cause, cure)
	}
}

var allReduce = &Check{
	ID: "all-reduce", Scope: ScopeLink, Source: "chorus perf all_reduce",
	Hazard:   "An all-reduce over all GPUs is slow, or has wrong results.",
	Measures: true,
	Run: one(func(h *Host) Result {
		return judge(h, func(m *Measured) Speed { return m.AllReduce }, "correct, with the usual part of the link's bandwidth", "training is slower, or its results are wrong",
			"find the slow link: chorus doctor --measure --only pairs")
	}),
}
