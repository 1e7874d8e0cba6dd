package doctor

import (
	"context"
	"fmt"

	"github.com/gochorus/chorus/internal/nvml"
)

var recoveryAction = &Check{
	ID: "recovery-action", Scope: ScopeGPU, Source: "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION",
	Hazard: "The driver asks for a reset of the GPU or a restart of the host.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkRecovery),
}

func checkRecovery(_ context.Context, _ *Host, g *GPU) Result {
	const want = "no action"
	a, err := g.RecoveryAction()
	if err != nil {
		return unread(err)
	}
	reset := fmt.Sprintf("nvidia-smi -r -i %d", g.Index)
	actions := map[nvml.RecoveryAction][2]string{
		nvml.RecoverReset:    {"reset", "run " + reset},
		nvml.RecoverReboot:   {"restart of the host", "restart the host"},
		nvml.RecoverDrainP2P: {"drain of peer traffic", "end all programs that use peer copies, and run nvidia-smi again"},
		nvml.RecoverDrain:    {"drain and reset", "end all programs on the GPU, and run " + reset},
		nvml.RecoverIMEX:     {"recovery of the IMEX domain", "restart nvidia-imex on all hosts of the domain"},
	}
	if a == nvml.RecoverNone {
		return pass(want, want)
	}
	x, ok := actions[a]
	if !ok {
		x = [2]string{fmt.Sprintf("action %d", a), "read nvidia-smi -q of a newer driver"}
	}
	return fail(x[0], want, "the driver does not trust the GPU after an error", x[1])
}
