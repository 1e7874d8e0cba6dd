package doctor

import (
	"context"
	"fmt"
)

var rowRemap = &Check{
	ID: "row-remap", Scope: ScopeGPU, Source: "nvmlDeviceGetRemappedRows",
	Hazard: "A bad row of memory waits for its replacement, or no spare row is left.",
	Needs:  []string{"device-nodes", "driver-mismatch"},
	Run:    perGPU(checkRows),
}

// mostRows is the number of uncorrectable rows that fail a board.
const mostRows = 512

func checkRows(_ context.Context, _ *Host, g *GPU) Result {
	const want = "no pending and no failed remapping"
	r, err := g.RemappedRows()
	if err != nil {
		return unread(err)
	}
	found := fmt.Sprintf("%d rows remapped, %d because of uncorrectable errors", r.Correctable+r.Uncorrectable, r.Uncorrectable)
	switch {
	case r.Failed:
		return fail(found+", and a remapping failed", want, "no spare row replaces a bad row of memory", "replace the board")
	case r.Pending:
		return fail(found+", and a remapping is pending", want, "programs use a bad row of memory until the next reset",
			fmt.Sprintf("end all programs on the GPU, and run nvidia-smi -r -i %d", g.Index))
	case r.Uncorrectable >= mostRows:
		return fail(found, fmt.Sprintf("fewer than %d", mostRows), "the memory wears out", "replace the board")
	}
	return pass(found, want)
}
