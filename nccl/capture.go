package nccl

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
)

// noteCapture determines whether the operation is captured. A capture holds the communicator.
func (o *operation) noteCapture() (err error) {
	if o.Captured, err = o.Stream.Capturing(); err != nil {
		return err
	}
	return gpu.StreamOf(o.Stream).Captured(held{o.comm})
}

// checkCapture refuses an operation whose capture began or ended after it was added.
func (o *operation) checkCapture() error {
	switch now, err := gpu.StreamOf(o.Stream).CaptureID(); {
	case err != nil:
		return err
	case now != o.capture:
		return fmt.Errorf("nccl: %s on rank %d of %d: a capture of %s began or ended in the group, after the operation was issued: want the whole group within it, or none: %w",
			o.Kind, o.comm.rank, o.comm.size, o.Stream, ErrorInvalidUsage)
	}
	return nil
}

// checkCaptures refuses a group that is only partly captured, and a group whose operations
// of one rank are in two captures. NCCL would break the communicators.
func (g *group) checkCaptures() error {
	first := &g.ops[0]
	for i := range g.ops {
		if o := &g.ops[i]; o.Captured != first.Captured {
			return fmt.Errorf("nccl: %s on rank %d of %d: a graph captures a part of the group, and not all of it: begin the capture on the streams of all its operations, or of none: %w",
				o.Kind, o.comm.rank, o.comm.size, ErrorInvalidUsage)
		}
	}
	if !first.Captured || g.single() {
		return nil
	}
	for i := range g.ops {
		o := &g.ops[i]
		j := slices.IndexFunc(g.ops, func(p operation) bool { return p.comm == o.comm })
		if g.ops[j].capture != o.capture {
			return fmt.Errorf("nccl: %s on rank %d of %d: two graphs capture operations of the rank in one group: want one of both: %w",
				o.Kind, o.comm.rank, o.comm.size, ErrorInvalidUsage)
		}
	}
	return nil
}

// relaxed makes calls of NCCL with the device's context bound and in the relaxed mode of
// captures. In a call NCCL may allocate memory, open memory of its peers, and query
// events, which the other modes forbid.
func relaxed(dev *device.Device, call func() error) error {
	return gpu.DeviceOf(dev).Bound(func() error { return gpu.DeviceOf(dev).Relaxed(call) })
}
