package doctor

import "testing"

func TestPersistence(t *testing.T) {
	try(t, persistence,
		lost, noGPU,
		change{"off", func(w *world) { w.gpus[0].persistent = false }, Warn, "nvidia-persistenced"},
	)
}
