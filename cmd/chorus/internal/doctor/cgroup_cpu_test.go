package doctor

import "testing"

func TestCgroupCpu(t *testing.T) {
	try(t, cgroupCPU,
		change{"a quota", func(w *world) { w.put("sys/fs/cgroup/job/cpu.max", "300000 100000") }, Warn, "3 processors for 2 ranks"},
		change{"a quota of version 1", func(w *world) {
			w.put("proc/self/cgroup", "1:cpu,cpuacct:/\n")
			w.put("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "150000")
			w.put("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000")
		}, Warn, "1.5 processors"},
		change{"bound", func(w *world) { w.put("proc/self/status", "Cpus_allowed_list:\t0-1,8\n") }, Warn, "3 processors"},
		change{"many ranks", func(w *world) { w.Ranks = 9 }, Warn, "16 processors for 9 ranks"},
		change{"another text", func(w *world) { w.put("sys/fs/cgroup/job/cpu.max", "3") }, Unknown, "want a quota"},
		change{"no list", func(w *world) { w.put("proc/self/status", "") }, Unknown, "Cpus_allowed_list"},
	)
}
