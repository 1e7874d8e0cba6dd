package doctor

import (
	"io/fs"
	"testing"
)

func TestDeviceNodes(t *testing.T) {
	try(t, deviceNodes,
		noGPU,
		change{"no driver", func(w *world) { w.remove("proc/driver") }, Fail, "2 GPUs on the PCI bus"},
		change{"no uvm", func(w *world) { w.remove("dev/nvidia-uvm") }, Fail, "nvidia-modprobe -u"},
		change{"no node", func(w *world) { w.remove("dev/nvidia0"); w.remove("dev/nvidia1") }, Fail, "0 of 2 GPUs"},
		change{"one node", func(w *world) { w.remove("dev/nvidia1") }, Warn, "1 of 2 GPUs"},
		change{"an assigned node", func(w *world) { w.remove("dev/nvidia1"); w.Env["NVIDIA_VISIBLE_DEVICES"] = "0" }, Pass, "1 of 2 GPUs"},
		change{"no permission", func(w *world) { w.OpenDevice = func(string) error { return fs.ErrPermission } }, Fail, "permission denied"},
	)
}
