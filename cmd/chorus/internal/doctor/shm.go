package doctor

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
	s, err := h.SpaceOf("/dev/shm")
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
