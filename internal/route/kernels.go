package route

import (
	"context"
	"log/slog"

	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/ranks"
)

// openKernels opens the Chorus kernels of the ranks, each with so much room, if the devices
// support the strategy.
func (rs Routers) openKernels(ctx context.Context, s Strategy, bytes int) error {
	open := func(ctx context.Context, r *Router) (err error) {
		c := r.comm
		r.kernels, err = fabric.Open(ctx, r.stream, c.Rank(), c.Size(), r.exchange, &fabric.Config{Bytes: bytes})
		if err != nil {
			return err
		}
		if err = r.kernels.Supports(algorithms[s]); err != nil {
			slog.Warn("chorus: this machine does not support the strategy, so NCCL executes all collectives", "strategy", s.String(), "rank", c.Rank(), "error", err)
		}
		return err
	}
	return rs.openEach(ctx, "Chorus kernels", open, func(r *Router) error {
		own := r.kernels
		r.kernels = nil
		return own.Close()
	})
}

// Up to how many bytes Chorus kernels are used: of an all-reduce, and of one rank's part of
// the others. NCCL is not slower from about there on. With measured times the limit is
// MostBytes.
var (
	kernelBytes     = 4 << 20
	kernelPartBytes = 64 << 10
)

// MostBytes is the maximum size for measuring Chorus kernels, and for using them by measured
// times. It is also the size of the pieces in which they execute an all-reduce in rank order.
const MostBytes = 16 << 20

// SetKernelBytes lets NCCL take over from Chorus kernels at other sizes, in tests.
func SetKernelBytes(all, part int) (restore func()) {
	old := [2]int{kernelBytes, kernelPartBytes}
	kernelBytes, kernelPartBytes = all, part
	return func() { kernelBytes, kernelPartBytes = old[0], old[1] }
}

func kernelLimit(x *ranks.Collective) int {
	if x.Kind == flight.AllReduce {
		return kernelBytes
	}
	return kernelPartBytes
}

var algorithms = [NumStrategies]fabric.Algorithm{OneShot: fabric.OneShot, TwoShotPackets: fabric.TwoShotPackets, TwoShot: fabric.TwoShot, TwoShotLines: fabric.TwoShotLines}

// rawOf returns x as Chorus kernels take it.
func rawOf(s Strategy, x *ranks.Collective) fabric.Raw {
	return fabric.Raw{Kind: x.Kind, Algorithm: algorithms[s], DType: x.DType, Op: x.Op, Root: x.Root, Count: x.Count, Dst: x.Dst, Src: x.Src}
}
