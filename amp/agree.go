package amp

import (
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Agree enqueues an all-reduce that tells the scalers of all ranks what one of them has found,
// so that all of them skip the same steps and keep the same scale. Call it between Unscale
// and Step if ranks have different gradients. scalers are those of the group's local ranks, in
// order, and serve the same optimisers in the same order on all ranks. The group's streams
// wait for the scalers' last operations, and these streams for the result. Collective.
func Agree(g *comm.Group, scalers ...*Scaler) error {
	const op = "agree"
	if g == nil || len(scalers) != g.Locals() {
		return refuse(op, "%d scalers: want one for each local rank of a group", len(scalers))
	}
	found, streams := make([]memory.Slice[float32], len(scalers)), make([]*stream.Stream, len(scalers))
	for i, sc := range scalers {
		if sc == nil {
			return refuse(op, "scaler %d is nil", i)
		}
		if _, err := sc.enter(op, sc.s); err != nil {
			return err
		}
		found[i], streams[i] = sc.found, sc.s
	}
	return g.Between(streams, func() error { return comm.AllReduce(g, comm.Max, found...) })
}
