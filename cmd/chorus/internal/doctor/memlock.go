package doctor

import "io/fs"

var memlock = &Check{
	ID: "memlock", Scope: ScopeHost, Source: "/proc/self/limits, /proc/self/status, /sys/class/infiniband",
	Hazard: "The limit of locked memory breaks RDMA.",
	Run:    one(checkMemlock),
}

func checkMemlock(h *Host) Result {
	soft, _, err := h.limit("Max locked memory")
	if err != nil {
		return unread(err)
	}
	const want = "unlimited if the host has RDMA"
	if soft == noLimit {
		return pass("unlimited", want)
	}
	found := limitText(soft)
	const ipcLock = 14
	free, err := h.hasCapability(ipcLock)
	switch {
	case !h.hasRDMA():
		return pass(found+", and no RDMA device", want)
	case err != nil:
		return unread(err)
	case free:
		return pass(found+", and CAP_IPC_LOCK", want)
	}
	return fail(found, want, "RDMA cannot register memory, so NCCL's start fails",
		"docker run --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity; Slurm: PropagateResourceLimitsExcept=MEMLOCK")
}

// hasRDMA reports whether the host has a device for RDMA.
func (h *Host) hasRDMA() bool {
	list, _ := fs.ReadDir(h.Root, rdmaDir)
	return len(list) > 0
}

const rdmaDir = "sys/class/infiniband"
