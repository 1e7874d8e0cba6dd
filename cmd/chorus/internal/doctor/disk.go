package doctor

import (
	"context"
	"fmt"
)

var disk = &Check{
	ID: "disk", Scope: ScopeHost, Source: "256 MiB written to a file in the current directory, past the page cache",
	Hazard:   "The disk of the current directory is slow or almost full, so checkpoints are slow or fail.",
	Measures: true,
	Run:      func(ctx context.Context, h *Host) []Result { return []Result{checkDisk(ctx, h)} },
}

// Limits of a disk for checkpoints.
const (
	leastWrite = 1e9      // bytes a second
	leastFree  = 16 << 30 // bytes
)

func checkDisk(ctx context.Context, h *Host) Result {
	const want, cure = "1 GB/s and 16 GiB free", "write checkpoints to a local NVMe disk or a parallel file system"
	s, err := h.SpaceOf(".")
	if err != nil {
		return unread(err)
	}
	if s.Free < leastFree {
		return warn(bytesText(s.Free)+" free", want, "a checkpoint may not fit", "remove files, or choose another directory")
	}
	speed, err := h.WriteSpeed(ctx, ".")
	if err != nil {
		return unread(err)
	}
	found := fmt.Sprintf("%.1f GB/s, %s free", speed/1e9, bytesText(s.Free))
	if speed < leastWrite {
		return warn(found, want, "saving a checkpoint takes long", cure)
	}
	return pass(found, want)
}
