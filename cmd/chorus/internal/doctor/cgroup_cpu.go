package doctor

import (
	"fmt"
	"strconv"
	"strings"
)

var cgroupCPU = &Check{
	ID: "cgroup-cpu", Scope: ScopeHost, Source: "cpu.max of the cgroup, /proc/self/status",
	Hazard: "The ranks share too few processors.",
	Run:    one(checkCPU),
}

// cpusOfRank is the number of processors that a rank needs: one for the program and one for
// NCCL's threads.
const cpusOfRank = 2

func checkCPU(h *Host) Result {
	list, err := h.status("Cpus_allowed_list")
	if err != nil {
		return unread(err)
	}
	allowed, err := parseCPUs(list)
	if err != nil {
		return unread(err)
	}
	quota, err := h.cpuQuota()
	if err != nil {
		return unread(err)
	}
	cpus, ranks := min(float64(len(allowed)), quota), h.ranks()
	found := fmt.Sprintf("%.4g processors for %s", cpus, plural(ranks, "rank"))
	want := fmt.Sprintf("%d for each rank", cpusOfRank)
	if cpus < float64(cpusOfRank*ranks) {
		return warn(found, want, "ranks wait for each other while the kernel switches between them",
			"docker run --cpus; Kubernetes: resources.limits.cpu; Slurm: --cpus-per-task; or start fewer ranks")
	}
	return pass(found, want)
}

// cpuQuota returns the processors' time that the control groups allow, in processors.
func (h *Host) cpuQuota() (float64, error) {
	dirs, v2, err := h.cgroups("cpu")
	if err != nil {
		return 0, err
	}
	if v2 {
		return h.smallest(dirs, "cpu.max", parseQuota)
	}
	least := float64(noLimit)
	for _, dir := range dirs {
		quota, err := h.readInt(dir + "/cpu.cfs_quota_us")
		if absent(err) || err == nil && quota <= 0 { // -1: no limit
			continue
		}
		period, err2 := h.readInt(dir + "/cpu.cfs_period_us")
		if err != nil || err2 != nil || period <= 0 {
			return 0, fmt.Errorf("/%s has no readable quota", dir)
		}
		least = min(least, float64(quota)/float64(period))
	}
	return least, nil
}

// parseQuota reads "quota period" in µs.
func parseQuota(text string) (float64, error) {
	f := strings.Fields(text)
	if len(f) != 2 {
		return 0, fmt.Errorf("%q: want a quota and a period", text)
	}
	if f[0] == "max" {
		return noLimit, nil
	}
	quota, err := strconv.ParseFloat(f[0], 64)
	period, err2 := strconv.ParseFloat(f[1], 64)
	if err != nil || err2 != nil || period <= 0 {
		return 0, fmt.Errorf("%q: want a quota and a period", text)
	}
	return quota / period, nil
}
