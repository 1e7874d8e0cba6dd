package doctor

import (
	"context"

	"github.com/gochorus/chorus/internal/nvml"
)

var clocks = &Check{
	ID: "clocks", Scope: ScopeGPU, Source: "nvmlDeviceGetCurrentClocksEventReasons",
	Hazard: "The GPU runs at lower clocks because of heat, power or a setting.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkClocks),
}

// clockRules are in the order of their weight.
var clockRules = []struct {
	bit                nvml.ClockEvents
	verdict            Verdict
	found, cause, cure string
}{
	{nvml.HWThermal, Fail, "thermal slowdown by hardware", "the GPU is too hot and runs at half its clock or less", "check the fans, the air inlet and the cooling of the rack"},
	{nvml.PowerBrake, Fail, "power brake", "the power supply asks for half the clock or less", "check the power supplies and cables"},
	{nvml.HWSlowdown, Fail, "slowdown by hardware", "heat or power forces half the clock or less", "check the cooling, the power supplies and cables"},
	{nvml.SWThermal, Warn, "thermal slowdown by the driver", "the GPU or its memory is near its highest temperature", "check the fans, the air inlet and the cooling of the rack"},
	{nvml.ApplicationClocks, Warn, "application clocks", "a setting limits the clocks", "nvidia-smi -rac"},
	{nvml.SyncBoost, Warn, "sync boost", "the slowest GPU of the group limits the clocks", "remove the sync boost group by DCGM"},
}

func checkClocks(_ context.Context, _ *Host, g *GPU) Result {
	const want = "no slowdown"
	events, err := g.ClockEvents()
	if err != nil {
		return unread(err)
	}
	for _, r := range clockRules {
		if events&r.bit != 0 {
			return Result{Verdict: r.verdict, Found: r.found, Want: want, Cause: r.cause, Cure: r.cure}
		}
	}
	return pass(want, want)
}
