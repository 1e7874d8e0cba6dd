package doctor

import (
	"testing"

	"github.com/gochorus/chorus/internal/nvml"
)

func TestComputeMode(t *testing.T) {
	try(t, computeMode,
		lost, noGPU,
		change{"prohibited", func(w *world) { w.gpus[0].mode = nvml.ModeProhibited }, Fail, "nvidia-smi -i 0 -c 0"},
		change{"exclusive", func(w *world) { w.gpus[0].mode = nvml.ModeExclusive }, Warn, "cannot share"},
		change{"taken", func(w *world) { w.gpus[0].mode = nvml.ModeExclusive; w.gpus[0].list = []nvml.Process{{PID: 4711}} }, Fail, "process 4711"},
	)
}
