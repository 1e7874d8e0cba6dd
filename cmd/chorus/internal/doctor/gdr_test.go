package doctor

import (
	"errors"
	"testing"
)

func TestGdr(t *testing.T) {
	try(t, gdr,
		noGPU,
		change{"neither", func(w *world) { w.put("proc/modules", "nvidia 1 2 - Live 0x0\n"); w.cuda.DMABuf = false }, Warn, "nvidia-peermem"},
		change{"DMA buffers", func(w *world) { w.put("proc/modules", "") }, Pass, "DMA buffers"},
		change{"no RDMA", func(w *world) { w.put("proc/modules", ""); w.cuda.DMABuf = false; w.remove("sys/class/infiniband") }, Pass, "no RDMA device"},
		change{"no CUDA", func(w *world) { w.put("proc/modules", ""); w.cuda = CUDA{Err: errors.New("no usable library")} }, Unknown, "no usable library"},
		change{"no modules", func(w *world) { w.remove("proc/modules") }, Unknown, "/proc/modules"},
	)
}
