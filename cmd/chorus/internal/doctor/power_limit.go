package doctor

import (
	"context"
	"fmt"
)

var powerLimit = &Check{
	ID: "power-limit", Scope: ScopeGPU, Source: "nvmlDeviceGetPowerManagementLimit, nvmlDeviceGetPowerManagementDefaultLimit",
	Hazard: "The power of the GPU is limited below its default.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run: perGPU(func(_ context.Context, _ *Host, g *GPU) Result {
		limit, err := g.PowerLimit()
		if err != nil {
			return unread(err)
		}
		usual, err := g.DefaultPowerLimit()
		if err != nil {
			return unread(err)
		}
		found, want := fmt.Sprintf("%d W", limit/1000), fmt.Sprintf("%d W", usual/1000)
		if limit < usual {
			return warn(found, want, "the GPU is slower than others, and all ranks wait for it", fmt.Sprintf("nvidia-smi -i %d -pl %d", g.Index, usual/1000))
		}
		return pass(found, want)
	}),
}
