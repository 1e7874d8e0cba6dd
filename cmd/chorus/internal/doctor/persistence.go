package doctor

import "context"

var persistence = &Check{
	ID: "persistence", Scope: ScopeGPU, Source: "nvmlDeviceGetPersistenceMode",
	Hazard: "The driver initializes the GPU again for each program.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run: perGPU(func(_ context.Context, _ *Host, g *GPU) Result {
		on, err := g.Persistence()
		switch {
		case err != nil:
			return unread(err)
		case !on:
			return warn("off", "on", "programs start slowly, and the GPU forgets its settings when no program runs", "start nvidia-persistenced, or run nvidia-smi -pm 1")
		}
		return pass("on", "on")
	}),
}
