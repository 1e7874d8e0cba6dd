package doctor

import "strings"

var gdr = &Check{
	ID: "gdr", Scope: ScopeHost, Source: "/proc/modules, CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED",
	Hazard: "The NIC cannot read GPU memory (GPUDirect RDMA).",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    one(checkGDR),
}

func checkGDR(h *Host) Result {
	const want = "nvidia_peermem or DMA buffers"
	if reason := h.noGPU(); reason != "" {
		return unknown(reason)
	}
	if !h.hasRDMA() {
		return pass("no RDMA device", want)
	}
	modules, err := h.read("proc/modules")
	if err != nil {
		return unread(err)
	}
	for line := range strings.Lines(modules) {
		if strings.HasPrefix(line, "nvidia_peermem ") {
			return pass("nvidia_peermem is loaded", want)
		}
	}
	c := h.CUDA()
	switch {
	case c.Err != nil:
		return unread(c.Err)
	case c.Code != 0:
		return unknown("cuInit fails: " + c.Meaning)
	case c.DMABuf:
		return pass("the GPUs export DMA buffers", want)
	}
	return warn("neither", want, "data for other hosts passes through host memory", "load the module nvidia-peermem at the start of the host")
}
