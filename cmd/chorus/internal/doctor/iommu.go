package doctor

import (
	"context"
	"encoding/binary"
	"fmt"
	"path"
	"strings"
)

var iommu = &Check{
	ID: "iommu-acs", Scope: ScopeGPU, Source: "/proc/cpuinfo, iommu_group/type and PCI configuration in /sys/bus/pci/devices",
	Hazard: "The IOMMU or ACS sends copies between GPUs through the processor.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkIOMMU),
}

func checkIOMMU(_ context.Context, h *Host, g *GPU) Result {
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
