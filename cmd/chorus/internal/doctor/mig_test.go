package doctor

import "testing"

func TestMig(t *testing.T) {
	try(t, mig,
		lost, noGPU,
		change{"on", func(w *world) { w.gpus[0].mig = true }, Warn, "nvidia-smi -i 0 -mig 0"},
		change{"pending", func(w *world) { w.gpus[0].migLater = true }, Warn, "after the next reset"},
	)
}
