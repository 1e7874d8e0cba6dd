package comm

import (
	"cmp"
	"fmt"

	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// A NormConfig has the options of AllReduceNorm; nil means the defaults.
type NormConfig struct {
	// Eps is added to the mean of the squares of a row. The default is 0.
	Eps float32
	// Scale has one number for each local rank. It is set if and only if the output has 8-bit
	// floats: the results divided by the scale.
	Scale Shards[float32]
}

// AllReduceNorm enqueues the end of a tensor-parallel layer of a transformer. x has rows as long
// as weight, one tensor for each local rank. For each row it computes:
//   - residual: the old residual plus the sum of x over all ranks
//   - out: residual · weight / sqrt(the mean of residual² + Eps)
//
// The elements T are 16-bit or 32-bit floats, and out has the same type, or 8-bit floats
// (memory.Float8E4M3Bits, which saturate) if cfg has a scale. The computation is in float32; the
// new residual and out are rounded. residual and weight must be the same on all ranks, and so are
// the results. Out may be x. Otherwise x, residual and out must not overlap any operand, including the scale: the call is
// refused then, with any strategy. A row has a multiple of 8 bytes, and slices begin at multiples of 8 bytes. Collective.
//
// With the strategies OwnKernels and Tuned one Chorus kernel does everything, if x has less than
// 1 MiB (256 KiB if there are more than two ranks). The bits of a row then do not depend on the
// other rows. Otherwise an all-reduce of x in place runs before a kernel for the rest. The
// all-reduce rounds its sums to T, so the bits may differ. Therefore deterministic groups
// (Config.Deterministic) never use the one kernel.
// After the call, the contents of x are undefined unless out is x.
//
// All ranks must give the same types, lengths, Eps, and a scale or none. The one kernel is an AllReduceNorm in the flight recorder, so that ranks that
// differ or call something else are found as those of other collectives. Otherwise the recorder has only the all-reduce, and ranks with
// another Eps or another output have other results.
//
// On GPUs the kernels need NVRTC. Without it, the error matches errors.ErrUnsupported, and nothing
// is enqueued.
func AllReduceNorm[T, O memory.Element](g *Group, out Shards[O], residual, x, weight Shards[T], cfg *NormConfig) error {
	norms, err := normsOf(g, out, residual, x, weight, *cmp.Or(cfg, new(NormConfig)))
	if err != nil {
		return err
	}
	if norms[0].Rows == 0 {
		return nil
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	launch, err := g.routers.TakeNorms(norms)
	if err != nil {
		return err
	}
	if launch != nil {
		ops := make([]collective.Op, len(x))
		for i := range ops {
			o := &ops[i]
			o.Kind, o.DType, o.Reduction, o.Stream, o.Detail, o.Eps = collective.AllReduceNorm, memory.DTypeOf[T](), collective.Sum, g.Stream(i), uint32(norms[i].Cols), norms[i].Eps
			if norms[i].Scale != 0 {
				o.Format = memory.Float8E4M3
			}
			o.Dst, o.Src = collective.OperandOf(x[i]), collective.OperandOf(x[i])
		}
		return g.breakIfRefused(g.batch.EnqueueKernels(g.comms(), ops, launch))
	}
	err = g.enqueueAll(func(i int, m *member) error { return nccl.AllReduce(m.on, m.stream, x[i], x[i], nccl.Sum) })
	for i := 0; i < len(norms) && err == nil; i++ {
		if err = fabric.AddNorm(g.members[i].stream, &norms[i]); err != nil {
			err = g.causeOf(fmt.Errorf("comm: all-reduce and norm: the norm on rank %d, after the all-reduce: %w", g.members[i].comm.Rank(), err))
		}
	}
	return err
}

// normsOf validates the operands and returns the norm of each local rank.
func normsOf[T, O memory.Element](g *Group, out Shards[O], residual, x, weight Shards[T], cfg NormConfig) ([]fabric.Norm, error) {
	const op = "all-reduce and norm"
	for _, xs := range []Shards[T]{residual, x, weight} {
		if err := checkShards(g, op, xs, true); err != nil {
			return nil, err
		}
	}
	if err := checkShards(g, op, out, true); err != nil {
		return nil, err
	}
	n, cols := x[0].Len(), weight[0].Len()
	switch {
	case cols == 0 || n%cols != 0:
		return nil, badArgument(op, "x has %d elements and the weight %d: want rows as long as the weight", n, cols)
	case residual[0].Len() != n || out[0].Len() != n:
		return nil, badArgument(op, "x has %d elements, the residual %d and the output %d: want the same", n, residual[0].Len(), out[0].Len())
	}
	if err := checkScale[T, O](g, op, cfg.Scale); err != nil {
		return nil, err
	}
	norms := make([]fabric.Norm, len(g.members))
	for i := range norms {
		norms[i] = fabric.Norm{DType: memory.DTypeOf[T](), Rows: n / cols, Cols: cols, In: x[i].Ptr(), Residual: residual[i].Ptr(), Weight: weight[i].Ptr(), Out: out[i].Ptr(), Eps: cfg.Eps}
		if cfg.Scale != nil {
			norms[i].Scale = cfg.Scale[i].Ptr()
		}
		if n == 0 {
			continue
		}
		rank := g.members[i].comm.Rank()
		if err := norms[i].Check(); err != nil {
			return nil, asBadArgument(fmt.Errorf("comm: %s on rank %d: %w", op, rank, err))
		}
		if err := fabric.LoadAddNorm(g.Device(i), norms[i].DType); err != nil {
			return nil, fmt.Errorf("comm: %s on rank %d: %w", op, rank, err)
		}
	}
	return norms, nil
}

// checkScale validates the scale, which belongs to outputs of 8-bit floats.
func checkScale[T, O memory.Element](g *Group, op string, scale Shards[float32]) error {
	in, out := memory.DTypeOf[T](), memory.DTypeOf[O]()
	switch {
	case scale == nil && in != out:
		return badArgument(op, "x has %s and the output %s without a scale: want the same type, or NormConfig.Scale and %s", in, out, memory.Float8E4M3)
	case scale == nil:
		return nil
	case out != memory.Float8E4M3:
		return badArgument(op, "there is a scale, and the output has %s: want %s", out, memory.Float8E4M3)
	}
	if err := checkShards(g, op, scale, true); err != nil {
		return err
	}
	if scale[0].Len() != 1 {
		return badArgument(op, "the scale has %d numbers: want 1", scale[0].Len())
	}
	return nil
}
