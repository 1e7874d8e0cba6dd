package doctor

import "testing"

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
