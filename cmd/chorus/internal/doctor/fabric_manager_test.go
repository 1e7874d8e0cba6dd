package doctor

import (
	"testing"

	"github.com/gochorus/chorus/internal/nvml"
)

func TestFabricManager(t *testing.T) {
	try(t, fabricManager,
		lost, noGPU,
		change{"cuInit 802", func(w *world) { w.cuda.Code = 802 }, Fail, "systemctl start nvidia-fabricmanager"},
		change{"not started", func(w *world) { w.put("dev/nvidia-nvswitch0", ""); w.gpus[0].fabric.State = nvml.FabricNotStarted }, Fail, "state 1 of 3"},
		change{"in progress in a virtual machine", func(w *world) { w.gpus[0].fabric.State = nvml.FabricInProgress }, Pass, "no NVSwitch"},
		change{"failed", func(w *world) { w.gpus[0].fabric.Status = 999 }, Fail, "error 999"},
		change{"degraded", func(w *world) { w.gpus[0].fabric.Health = 1 | 1<<8 }, Warn, "degraded bandwidth"},
		change{"wrong configuration", func(w *world) { w.gpus[0].fabric.Health = 2 | 5<<8 }, Warn, "0x502"},
		change{"an old driver with NVSwitches", func(w *world) {
			w.put("dev/nvidia-nvswitch0", "")
			w.gpus[0].noFabric = &nvml.UnsupportedError{Need: "a newer driver", Have: "an older driver"}
		}, Unknown, "an older driver"},
		change{"an old driver without", func(w *world) {
			w.gpus[0].noFabric = &nvml.UnsupportedError{Need: "a newer driver", Have: "an older driver"}
		}, Pass, "no fabric"},
	)
}
