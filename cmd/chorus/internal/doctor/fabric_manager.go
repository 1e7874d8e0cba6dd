package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/gochorus/chorus/internal/nvml"
)

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

func checkFabric(_ context.Context, h *Host, g *GPU) Result {
	if c := h.CUDA(); c.Code == cudaNotReady {
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
