package doctor

import (
	"context"
	"fmt"

	"github.com/gochorus/chorus/internal/nvml"
)

var computeMode = &Check{
	ID: "compute-mode", Scope: ScopeGPU, Source: "nvmlDeviceGetComputeMode",
	Hazard: "The GPU admits no process, or one process.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkComputeMode),
}

func checkComputeMode(_ context.Context, _ *Host, g *GPU) Result {
	const want = "default: any number of processes"
	cure := fmt.Sprintf("nvidia-smi -i %d -c 0", g.Index)
	mode, err := g.ComputeMode()
	if err != nil {
		return unread(err)
	}
	switch mode {
	case nvml.ModeDefault:
		return pass("default", want)
	case nvml.ModeProhibited:
		return fail("prohibited", want, "the GPU admits no process", cure)
	}
	list, err := g.Processes()
	switch {
	case err == nil && len(list) > 0:
		return fail(fmt.Sprintf("exclusive, and process %d is there", list[0].PID), want, "the GPU admits one process and has one", cure)
	default:
		return warn("exclusive", want, "two ranks, or a rank and a profiler, cannot share the GPU", cure)
	}
}
