package doctor

import (
	"testing"

	"github.com/gochorus/chorus/internal/nvml"
)

func TestEcc(t *testing.T) {
	try(t, ecc,
		lost, noGPU,
		change{"off", func(w *world) { w.gpus[0].ecc = false }, Warn, "nvidia-smi -i 0 -e 1"},
		change{"off after the reset", func(w *world) { w.gpus[0].eccLater = false }, Warn, "after the next reset"},
		change{"uncorrected", func(w *world) { w.gpus[0].uncorrected = 3 }, Fail, "3 uncorrected errors"},
		change{"SRAM", func(w *world) { w.gpus[0].corrected = map[nvml.Memory]uint64{nvml.SRAM: 10_001} }, Fail, "10001 corrected errors of SRAM"},
		change{"DRAM", func(w *world) { w.gpus[0].corrected = map[nvml.Memory]uint64{nvml.DRAM: 20_000_001} }, Fail, "of DRAM"},
		change{"some corrected", func(w *world) { w.gpus[0].corrected = map[nvml.Memory]uint64{nvml.DRAM: 10_001} }, Pass, "on"},
	)
}
