package doctor

import "fmt"

var processes = &Check{
	ID: "processes", Scope: ScopeHost, Source: "pids.max of the cgroup, /proc/self/limits",
	Hazard: "The limit of processes and threads is too low for the ranks.",
	Run:    one(checkThreads),
}

// threadsOfRank is the number of threads that CUDA, NCCL and Go need in a rank.
const threadsOfRank = 256

func checkThreads(h *Host) Result {
	dirs, _, err := h.cgroups("pids")
	if err != nil {
		return unread(err)
	}
	most, err := h.smallest(dirs, "pids.max", number)
	if err != nil {
		return unread(err)
	}
	soft, _, err := h.limit("Max processes")
	if err != nil {
		return unread(err)
	}
	most = min(most, float64(soft))
	want := fmt.Sprintf("%d for each of %s", threadsOfRank, plural(h.ranks(), "rank"))
	switch {
	case most == noLimit:
		return pass("unlimited", want)
	case most < float64(threadsOfRank*h.ranks()):
		return warn(fmt.Sprintf("%.0f threads", most), want, "CUDA, NCCL or the program cannot start a thread", "docker run --pids-limit=-1; systemd: TasksMax=infinity; ulimit -u")
	}
	return pass(fmt.Sprintf("%.0f threads", most), want)
}
