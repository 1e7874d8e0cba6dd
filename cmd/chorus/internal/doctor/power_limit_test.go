package doctor

import "testing"

func TestPowerLimit(t *testing.T) {
	try(t, powerLimit,
		lost, noGPU,
		change{"capped", func(w *world) { w.gpus[0].limit = 500000 }, Warn, "500 W"},
	)
}
