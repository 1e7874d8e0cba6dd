package doctor

import "testing"

func TestProcesses(t *testing.T) {
	try(t, processes,
		change{"few", func(w *world) { w.put("sys/fs/cgroup/job/pids.max", "511") }, Warn, "511 threads"},
		change{"few of the user", limits("Max processes 100 100 processes"), Warn, "100 threads"},
		change{"enough", func(w *world) { w.put("sys/fs/cgroup/job/pids.max", "512") }, Pass, "512 threads"},
		change{"another text", func(w *world) { w.put("sys/fs/cgroup/job/pids.max", "x") }, Unknown, "want a number"},
		change{"no cgroup", func(w *world) { w.remove("proc/self/cgroup") }, Unknown, "/proc/self/cgroup"},
	)
}
