package doctor

import (
	"context"
	"fmt"

	"github.com/gochorus/chorus/internal/nvml"
)

var ecc = &Check{
	ID: "ecc", Scope: ScopeGPU, Source: "nvmlDeviceGetEccMode, nvmlDeviceGetTotalEccErrors, nvmlDeviceGetMemoryErrorCounter",
	Hazard: "The GPU's memory has errors, or does not detect them.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkECC),
}

// Limits of corrected errors since the driver was loaded.
const (
	mostSRAM = 10_000
	mostDRAM = 20_000_000
)

func checkECC(_ context.Context, _ *Host, g *GPU) Result {
	const want = "on, no uncorrected errors"
	on, later, err := g.ECCMode()
	switch {
	case err != nil:
		return unread(err)
	case !on || !later:
		return warn("off now or after the next reset", want, "the GPU computes with wrong bits and does not report them",
			fmt.Sprintf("nvidia-smi -i %d -e 1, and nvidia-smi -r -i %d", g.Index, g.Index))
	}
	bad, err := g.ECCErrors(true, false)
	if err != nil {
		return unread(err)
	}
	if bad > 0 {
		return fail(fmt.Sprintf("%d uncorrected errors since the driver was loaded", bad), want, "programs were ended or computed with wrong data",
			fmt.Sprintf("nvidia-smi -r -i %d; replace the board if it comes again", g.Index))
	}
	for _, m := range []struct {
		memory nvml.Memory
		name   string
		most   uint64
	}{{nvml.SRAM, "SRAM", mostSRAM}, {nvml.DRAM, "DRAM", mostDRAM}} {
		n, err := g.CorrectedErrors(m.memory)
		if err == nil && n > m.most {
			return fail(fmt.Sprintf("%d corrected errors of %s", n, m.name), fmt.Sprintf("at most %d", m.most), "the memory wears out", "replace the board")
		}
	}
	before, err := g.ECCErrors(true, true)
	if err != nil {
		return pass("on, no uncorrected errors since the driver was loaded", want)
	}
	return pass(fmt.Sprintf("on, no uncorrected errors since the driver was loaded, %d before", before), want)
}
