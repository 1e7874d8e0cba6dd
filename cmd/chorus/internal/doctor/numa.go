package doctor

import (
	"context"
	"errors"
	"fmt"
)

var numa = &Check{
	ID: "numa", Scope: ScopeGPU, Source: "numa_node and local_cpulist of the GPU, /proc/self/status",
	Hazard: "The process runs on processors that are far from the GPU.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkNUMA),
}

func checkNUMA(_ context.Context, h *Host, g *GPU) Result {
	const want = "a processor on the GPU's node"
	if online, err := h.read("sys/devices/system/node/online"); err == nil && online == "0" {
		return pass("one NUMA node", want)
	}
	id, err := g.PCIBusID()
	if err != nil {
		return unread(err)
	}
	node, err := h.readInt("sys/bus/pci/devices/" + id + "/numa_node")
	if err != nil {
		return unread(err)
	}
	if node < 0 {
		return unknown("the firmware does not report the GPU's NUMA node")
	}
	near, err := h.cpusOf("sys/bus/pci/devices/" + id + "/local_cpulist")
	list, err2 := h.status("Cpus_allowed_list")
	allowed, err3 := parseCPUs(list)
	if err := errors.Join(err, err2, err3); err != nil {
		return unread(err)
	}
	for cpu := range allowed {
		if near[cpu] {
			return pass(fmt.Sprintf("node %d", node), want)
		}
	}
	return warn(fmt.Sprintf("processors %s, and the GPU is on node %d", list, node), want, "copies between host and GPU cross the sockets",
		fmt.Sprintf("numactl --cpunodebind=%d, or srun --cpu-bind", node))
}

func (h *Host) cpusOf(file string) (map[int]bool, error) {
	list, err := h.read(file)
	if err != nil {
		return nil, err
	}
	return parseCPUs(list)
}
