package amp

import (
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Agree enqueues an all-reduce of the scalers' results of checks. If a scaler has found an
// infinity or NaN on one rank, the scalers of all ranks skip the step, and all keep the same
// scale. Call Agree between Unscale and Step if ranks have different gradients. scalers has
// one scaler for each local rank of the group, in order. On all ranks, they serve the same
// optimisers in the same order. The group's streams wait for the scalers' last operations, and
// the scalers' streams wait for the result. Collective.
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
