package doctor

import (
	"testing"

	"github.com/gochorus/chorus/internal/nvml"
)

func TestRecoveryAction(t *testing.T) {
	try(t, recoveryAction,
		lost, noGPU,
		change{"reset", func(w *world) { w.gpus[0].action = nvml.RecoverReset }, Fail, "nvidia-smi -r -i 0"},
		change{"restart", func(w *world) { w.gpus[0].action = nvml.RecoverReboot }, Fail, "restart the host"},
		change{"a new action", func(w *world) { w.gpus[0].action = 17 }, Fail, "action 17"},
	)
}
