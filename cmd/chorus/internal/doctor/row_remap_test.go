package doctor

import "testing"

func TestRowRemap(t *testing.T) {
	try(t, rowRemap,
		lost, noGPU,
		change{"pending", func(w *world) { w.gpus[0].rows.Pending = true }, Fail, "nvidia-smi -r -i 0"},
		change{"failed", func(w *world) { w.gpus[0].rows.Failed = true }, Fail, "replace the board"},
		change{"worn", func(w *world) { w.gpus[0].rows.Uncorrectable = 512 }, Fail, "fewer than 512"},
		change{"some", func(w *world) { w.gpus[0].rows.Uncorrectable = 2 }, Pass, "2 rows"},
	)
}
