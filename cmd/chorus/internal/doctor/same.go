package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

var gpuCount = same(Check{ID: "gpu-count", Source: "NVML", Hazard: "A host has fewer GPUs than the others."}, Fail,
	"ranks without a GPU cannot start, or the job has fewer ranks", "search the kernel's log of the host with fewer GPUs for Xid, and restart it",
	func(_ context.Context, h *Host) (string, error) {
		gpus, err := h.gpus()
		return plural(len(gpus), "GPU"), err
	})

var gpuProducts = same(Check{ID: "gpu-products", Source: "nvmlDeviceGetName", Hazard: "The hosts have different GPUs."}, Warn,
	"all ranks wait for the slowest GPU", "use hosts with equal GPUs",
	func(_ context.Context, h *Host) (string, error) {
		return h.ofGPUs(func(g *GPU) (string, error) { return g.Name() })
	})

var driverVersions = same(Check{ID: "driver-versions", Source: "/proc/driver/nvidia/version", Hazard: "The hosts have different drivers."}, Warn,
	"NCCL and kernels may behave differently on the hosts", "install one version of the driver on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		if reason := h.noGPU(); reason != "" {
			return "", errors.New(reason)
		}
		return h.driverVersion()
	})

var ncclVersions = same(Check{ID: "nccl-versions", Source: "loaded NCCL", Hazard: "The hosts load different versions of NCCL."}, Fail,
	"NCCL's start fails or hangs: all ranks need the same version", "set CHORUS_LIBNCCL to the same file on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		if reason := h.noGPU(); reason != "" {
			return "", errors.New(reason)
		}
		lib, err := h.NCCL()
		if err != nil {
			return "", err
		}
		return lib.Version, nil
	})

var powerCaps = same(Check{ID: "power-caps", Source: "nvmlDeviceGetPowerManagementLimit", Hazard: "The hosts limit the power of their GPUs differently."}, Warn,
	"all ranks wait for the GPUs with the lowest limit", "nvidia-smi -pl with one value on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		return h.ofGPUs(func(g *GPU) (string, error) {
			mw, err := g.PowerLimit()
			return fmt.Sprintf("%d W", mw/1000), err
		})
	})

var mtus = same(Check{ID: "mtu", Source: "network interfaces", Hazard: "The hosts have different sizes of packets on NCCL's interface."}, Fail,
	"large packets are lost, and NCCL hangs or ends with an error", "set one MTU on all hosts and switches",
	func(_ context.Context, h *Host) (string, error) {
		i, err := h.firstChosen()
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("MTU %d", i.MTU), nil
	})

var seedNames = same(Check{ID: "seeds", Source: "resolver: CHORUS_SEEDS", Hazard: "A seed has different addresses on the hosts."}, Fail,
	"some hosts do not find the coordinator", "use addresses in --seeds, or correct /etc/hosts",
	func(ctx context.Context, h *Host) (string, error) {
		var parts []string
		for _, s := range h.seeds() {
			addrs, err := h.Lookup(ctx, s)
			if err != nil {
				return "", err
			}
			parts = append(parts, fmt.Sprintf("%s is %v", s, addrs))
		}
		if len(parts) == 0 {
			return "no names of seeds", nil
		}
		return strings.Join(parts, ", "), nil
	})

// protocolVariables change the messages between ranks.
var protocolVariables = []string{"NCCL_ALGO", "NCCL_PROTO", "NCCL_NET", "NCCL_CUMEM_ENABLE"}

var protocols = same(Check{ID: "variables-protocol", Source: "environment and files of NCCL", Hazard: "Variables that change NCCL's protocol differ between hosts."}, Fail,
	"NCCL hangs or ends: all ranks need the same algorithm, protocol and network", "set the variables equally on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		return h.settingsText(func(name string) bool { return slices.Contains(protocolVariables, name) })
	})

// hostVariables differ between hosts by design.
var hostVariables = []string{"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_CONF_FILE", "NCCL_RAS_ADDR"}

var otherVariables = same(Check{ID: "variables-differ", Source: "environment and files of NCCL", Hazard: "Other variables of NCCL differ between hosts."}, Warn,
	"the hosts run at different speeds, or use different resources", "set the variables equally on all hosts",
	func(_ context.Context, h *Host) (string, error) {
		return h.settingsText(func(name string) bool {
			return strings.HasPrefix(name, "NCCL_") && !slices.Contains(protocolVariables, name) && !slices.Contains(hostVariables, name)
		})
	})

// settingsText lists the wanted variables.
func (h *Host) settingsText(wanted func(name string) bool) (string, error) {
	all, err := h.ncclSettings()
	if err != nil {
		return "", err
	}
	var parts []string
	for name, s := range all {
		if wanted(name) {
			parts = append(parts, name+"="+s.value)
		}
	}
	if len(parts) == 0 {
		return "none is set", nil
	}
	slices.Sort(parts)
	return strings.Join(parts, " "), nil
}

// ofGPUs lists the different values of the GPUs.
func (h *Host) ofGPUs(value func(g *GPU) (string, error)) (string, error) {
	gpus, err := h.gpus()
	if err != nil {
		return "", err
	}
	var list []string
	for _, g := range gpus {
		v, err := value(g)
		if err != nil {
			return "", err
		}
		if !slices.Contains(list, v) {
			list = append(list, v)
		}
	}
	slices.Sort(list)
	return strings.Join(list, ", "), nil
}
