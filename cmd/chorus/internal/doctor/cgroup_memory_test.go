package doctor

import "testing"

func TestCgroupMemory(t *testing.T) {
	try(t, cgroupMemory,
		change{"too low", func(w *world) { w.put("sys/fs/cgroup/job/memory.max", "1073741824") }, Fail, "1 GiB"},
		change{"too low above", func(w *world) { w.put("sys/fs/cgroup/memory.max", "1073741824") }, Fail, "1 GiB"},
		change{"too low below", func(w *world) {
			w.put("sys/fs/cgroup/job/memory.max", "1073741824")
			w.put("sys/fs/cgroup/memory.max", "1099511627776")
		}, Fail, "1 GiB"},
		change{"version 1", func(w *world) {
			w.put("proc/self/cgroup", "4:memory:/x\n0::/\n")
			w.put("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "2147483648")
		}, Fail, "2 GiB"},
		change{"more pinned memory", func(w *world) {
			w.put("sys/fs/cgroup/job/memory.max", "8589934592")
			w.Env["CHORUS_GDS_PINNED"] = "8589934592"
		}, Fail, "12 GiB for 2 ranks"},
		change{"killed", func(w *world) { w.put("sys/fs/cgroup/job/memory.events", "oom_kill 3\n") }, Warn, "ended 3 processes"},
		change{"enough", func(w *world) { w.put("sys/fs/cgroup/job/memory.max", "8589934592") }, Pass, "8 GiB"},
		change{"unreadable", func(w *world) { w.deny("sys/fs/cgroup/job/memory.max") }, Unknown, "not a regular file"},
	)
}
