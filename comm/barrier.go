package comm

import (
	"context"
	"errors"
)

// Barrier returns when all ranks have called it, and all that was enqueued on the
// group's streams before is done (torch.distributed.barrier). It ends early as Wait
// does. Collective.
func (g *Group) Barrier(ctx context.Context) (err error) {
	if err := g.checkWait("barrier"); err != nil {
		return err
	}
	for i := range g.members {
		if err := g.members[i].stream.RefuseWait("comm: barrier"); err != nil {
			return err
		}
	}
	xs, err := Make[uint8](g, 1)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, xs.Close()) }()
	if err := AllReduce(g, Max, xs...); err != nil {
		return err
	}
	return g.Wait(ctx)
}
