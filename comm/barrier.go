package comm

import (
	"context"
	"errors"

	"github.com/gochorus/chorus/internal/gpu"
)

// Barrier returns when all ranks have called it and all operations that were already
// enqueued on the group's streams have completed (torch.distributed.barrier). It ends
// early under the same conditions as Wait. Collective.
func (g *Group) Barrier(ctx context.Context) error {
	if err := g.check("barrier"); err != nil {
		return err
	}
	for i := range g.members {
		if err := gpu.StreamOf(g.members[i].stream).RefuseWait("comm: barrier"); err != nil {
			return err
		}
	}
	return unanswered("comm: barrier", gpu.Guard(ctx, func() (err error) {
		xs, err := Make[uint8](g, 1)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, xs.Close()) }()
		if err := AllReduce(g, Max, xs...); err != nil {
			return err
		}
		return g.wait(ctx)
	}))
}
