package health

import (
	"testing"
)

func TestMemlock(t *testing.T) {
	try(t, memlock,
		change{"limited", limits("Max locked memory         8388608 8388608 bytes"), Fail, "8 MiB"},
		change{"a capability", func(w *world) {
			limits("Max locked memory 8388608 8388608 bytes")(w)
			w.put("proc/self/status", "CapEff:\t0000000000004000\n")
		}, Pass, "CAP_IPC_LOCK"},
		change{"another capability", func(w *world) {
			limits("Max locked memory 8388608 8388608 bytes")(w)
			w.put("proc/self/status", "CapEff:\t0000000000800000\n")
		}, Fail, "8 MiB"},
		change{"no RDMA", func(w *world) { limits("Max locked memory 8388608 8388608 bytes")(w); w.remove("sys/class/infiniband") }, Pass, "no RDMA device"},
		change{"no line", limits(""), Unknown, "no line"},
		change{"no capabilities", func(w *world) { limits("Max locked memory 8388608 8388608 bytes")(w); w.put("proc/self/status", "") }, Unknown, "CapEff"},
	)
}

// limits returns a host with other limits.
func limits(lines string) func(w *world) {
	return func(w *world) { w.put("proc/self/limits", lines+"\n") }
}

func TestOpenFiles(t *testing.T) {
	try(t, openFiles,
		change{"few", limits("Max open files 1024 4096 files"), Warn, "hard limit 4096"},
		change{"unlimited", limits("Max open files 1024 unlimited files"), Pass, "unlimited"},
		change{"no file", func(w *world) { w.remove("proc/self/limits") }, Unknown, "/proc/self/limits"},
	)
}

func TestProcesses(t *testing.T) {
	try(t, processes,
		change{"few", func(w *world) { w.put("sys/fs/cgroup/job/pids.max", "511") }, Warn, "511 threads"},
		change{"few of the user", limits("Max processes 100 100 processes"), Warn, "100 threads"},
		change{"enough", func(w *world) { w.put("sys/fs/cgroup/job/pids.max", "512") }, Pass, "512 threads"},
		change{"another text", func(w *world) { w.put("sys/fs/cgroup/job/pids.max", "x") }, Unknown, "want a number"},
		change{"no cgroup", func(w *world) { w.remove("proc/self/cgroup") }, Unknown, "/proc/self/cgroup"},
	)
}

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

func TestStack(t *testing.T) {
	try(t, stack,
		change{"unlimited", limits("Max stack size unlimited unlimited bytes"), Warn, "ulimit -s 8192"},
		change{"no line", limits(""), Unknown, "no line"},
	)
}

func TestNuma(t *testing.T) {
	try(t, numa,
		lost, noGPU,
		change{"far", func(w *world) { w.put("proc/self/status", "Cpus_allowed_list:\t8-15\n") }, Warn, "processors 8-15"},
		change{"one node", func(w *world) {
			w.put("sys/devices/system/node/online", "0\n")
			w.put("proc/self/status", "Cpus_allowed_list:\t8-15\n")
		}, Pass, "one NUMA node"},
		change{"not reported", func(w *world) { w.put(bridges+"/"+gpu0+"/numa_node", "-1\n") }, Unknown, "firmware"},
		change{"another text", func(w *world) { w.put(bridges+"/"+gpu0+"/local_cpulist", "x\n") }, Unknown, "want ranges"},
	)
}

func TestHugePages(t *testing.T) {
	try(t, hugePages,
		change{"reserved", func(w *world) {
			w.put("proc/meminfo", "MemTotal: 8388608 kB\nHugePages_Total: 3072\nHugepagesize: 2048 kB\n")
		}, Warn, "6 GiB of 8 GiB"},
		change{"no line", func(w *world) { w.put("proc/meminfo", "MemTotal: 1 kB\n") }, Unknown, "HugePages_Total"},
	)
}
