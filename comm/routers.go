package comm

import (
	"context"

	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/route"
)

// openRouters opens everything that the strategy needs and the devices support, and lets it
// execute the collectives of the group. hosts has the host of each rank; nil means one host.
func (g *Group) openRouters(ctx context.Context, s route.Strategy, hosts []int, exchange func(rank int) fabric.Exchange) (err error) {
	g.routers, err = route.Open(ctx, s, g.cfg.order(hosts), g.comms(), g.Streams(), exchange)
	if err != nil || len(g.routers) == 0 {
		return err
	}
	g.batch = g.routers.NewBatch()
	g.members = withIssuer(g.members, g.batch)
	return nil
}
