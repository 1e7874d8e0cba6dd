package amp

import (
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Agree enqueues an all-reduce of the scalers' results of checks. If a scaler has found an
// infinity or NaN on one rank, the scalers of all ranks skip the step, and all keep the same
// scale. If ranks have different gradients, call Unscale or Check for each optimiser, then Agree,
// and then Step. Agree returns an error if no gradients were checked since the last Update. After
// Agree, Step refuses an optimiser that was not checked. scalers has
// one scaler for each local rank of the group, in order. On all ranks, they serve the same
// optimisers in the same order. The group's streams wait for the scalers' last operations, and
// the scalers' streams wait for the result. Collective.
//
// After an error, such as a closed scaler, the process has enqueued no all-reduce, and the other
// processes wait for it: close the group, so that they get an error.
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
		if !sc.cfg.Disabled && !sc.looked() {
			return refuse(op, "scaler %d has checked no gradients since the last Update: call Unscale or Check before", i)
		}
		found[i], streams[i] = sc.found, sc.s
	}
	err := g.Between(streams, func() error { return comm.AllReduce(g, comm.Max, found...) })
	if err == nil {
		for _, sc := range scalers {
			sc.agreed = true
		}
	}
	return err
}
