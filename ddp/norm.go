package ddp

import (
	"math"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
)

// Powers prepares the norm of gradients that are divided over the ranks, as a Sharder's are. It
// enqueues one all-reduce of one number: the sum of |x|^p over all gradients of all ranks, or the
// largest |x| if p is +Inf. Then Coef of each of the Grads returns the norm over all ranks, and
// the factor that clips it (FSDP's clip_grad_norm_):
//
//	err = ddp.Powers(g, 2, []*optim.Grads{grads}, []*stream.Stream{s})
//	norm, factor, err := grads.Coef(s, 1)
//	err = opt.Step(s, &optim.StepConfig{Clip: factor})
//
// grads[i] has the gradients of local rank i. Each gradient is on one rank only. streams[i] is
// the stream that has computed them; it waits for the result. The host does not wait. Gradients
// that a Reducer has reduced are the same on all ranks and need no Powers. Collective.
//
// p must be the same on all ranks: Powers does not compare it, and norms of different p are wrong.
// After an error, such as closed Grads, the process has enqueued no all-reduce, and the other
// processes wait for it: close the group, so that they get an error.
func Powers(g *comm.Group, p float64, grads []*optim.Grads, streams []*stream.Stream) error {
	const op = "powers"
	if err := checkGroup(g, op); err != nil {
		return err
	}
	if len(grads) != g.Locals() || len(streams) != g.Locals() {
		return refuse(op, "%d gradients and %d streams: want one for each of the %d local ranks", len(grads), len(streams), g.Locals())
	}
	reduction := comm.Sum
	if math.IsInf(p, 1) {
		reduction = comm.Max
	}
	numbers := make([]memory.Slice[float32], len(grads))
	for i, x := range grads {
		var err error
		if numbers[i], err = x.Powers(streams[i], p); err != nil {
			return err
		}
	}
	return g.Between(streams, func() error { return comm.AllReduce(g, reduction, numbers...) })
}
