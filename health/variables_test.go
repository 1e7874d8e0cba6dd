package health

import "testing"

func TestVariables(t *testing.T) {
	try(t, variables,
		change{"no peers", func(w *world) { w.Env["NCCL_P2P_DISABLE"] = "1" }, Warn, "NCCL_P2P_DISABLE=1 (the environment)"},
		change{"peers", func(w *world) { w.Env["NCCL_P2P_DISABLE"] = "0" }, Pass, ""},
		change{"the host's file", func(w *world) { w.put("etc/nccl.conf", "# comment\nNCCL_ALGO = Ring\n") }, Warn, "NCCL_ALGO=Ring (/etc/nccl.conf)"},
		change{"a comment", func(w *world) { w.put("etc/nccl.conf", "#NCCL_ALGO=Ring\n") }, Pass, ""},
		change{"the user's file", func(w *world) {
			w.put("home/user/.nccl.conf", "NCCL_DEBUG=TRACE\n")
			w.put("etc/nccl.conf", "NCCL_DEBUG=INFO")
		}, Warn, "(/home/user/.nccl.conf)"},
		change{"the environment wins", func(w *world) { w.put("home/user/.nccl.conf", "NCCL_DEBUG=TRACE\n"); w.Env["NCCL_DEBUG"] = "WARN" }, Pass, ""},
		change{"no InfiniBand", func(w *world) { w.Env["NCCL_IB_DISABLE"] = "1" }, Warn, "TCP"},
		change{"no InfiniBand there", func(w *world) { w.Env["NCCL_IB_DISABLE"] = "1"; w.remove("sys/class/infiniband") }, Pass, ""},
		change{"no topology", func(w *world) { w.Env["NCCL_TOPO_FILE"] = "/nowhere.xml" }, Warn, "/nowhere.xml"},
		change{"a topology", func(w *world) { w.topology("<system version=\"1\">\n <cpu/>\n</system>\n") }, Pass, ""},
		change{"a topology cut short", func(w *world) { w.topology("<system version=\"1\">\n <cpu>") }, Warn, "NCCL cannot use the file"},
		change{"no XML", func(w *world) { w.topology("GPU0 NV18\n") }, Warn, "no element <system>"},
		change{"another XML", func(w *world) { w.topology("<graphs version=\"1\"/>") }, Warn, "outermost element is <graphs>"},
		change{"a newer topology", func(w *world) { w.topology("<system version=\"2\"/>") }, Warn, `is "2": want 1`},
		change{"an empty topology", func(w *world) { w.topology("") }, Warn, "no element <system>"},
		change{"CUDA", func(w *world) { w.Env["CUDA_LAUNCH_BLOCKING"] = "1" }, Warn, "each launch waits"},
		change{"a pipe", func(w *world) { w.deny("etc/nccl.conf") }, Unknown, "not a regular file"},
	)
}

// topology sets NCCL_TOPO_FILE to a file with a text.
func (w *world) topology(text string) {
	w.put("etc/topology.xml", text)
	w.Env["NCCL_TOPO_FILE"] = "/etc/topology.xml"
}
