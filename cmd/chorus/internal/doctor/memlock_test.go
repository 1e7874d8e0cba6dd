package doctor

import "testing"

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

// limits makes a host with other limits.
func limits(lines string) func(w *world) {
	return func(w *world) { w.put("proc/self/limits", lines+"\n") }
}
