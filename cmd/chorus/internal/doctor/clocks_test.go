package doctor

import (
	"testing"

	"github.com/gochorus/chorus/internal/nvml"
)

func TestClocks(t *testing.T) {
	try(t, clocks,
		lost, noGPU,
		change{"too hot", func(w *world) { w.gpus[0].events = nvml.HWThermal | nvml.HWSlowdown }, Fail, "too hot"},
		change{"warm", func(w *world) { w.gpus[0].events = nvml.SWThermal }, Warn, "highest temperature"},
		change{"a setting", func(w *world) { w.gpus[0].events = nvml.ApplicationClocks }, Warn, "nvidia-smi -rac"},
		change{"idle", func(w *world) { w.gpus[0].events = 1 | 4 }, Pass, "no slowdown"},
	)
}
