package doctor

import (
	"context"
	"fmt"
)

var mig = &Check{
	ID: "mig", Scope: ScopeGPU, Source: "nvmlDeviceGetMigMode",
	Hazard: "The GPU is divided into instances, which have no peer access.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkMIG),
}

func checkMIG(_ context.Context, _ *Host, g *GPU) Result {
	const want = "off"
	now, later, err := g.MIGMode()
	switch {
	case err != nil:
		return unread(err)
	case now:
		return warn("on", want, "instances of MIG have no access to the memory of peers, and NCCL uses one instance of a GPU",
			fmt.Sprintf("nvidia-smi -i %d -mig 0, and nvidia-smi -r -i %d", g.Index, g.Index))
	case later:
		return warn("off, and on after the next reset", want, "the next reset divides the GPU", fmt.Sprintf("nvidia-smi -i %d -mig 0", g.Index))
	}
	return pass("off", want)
}
