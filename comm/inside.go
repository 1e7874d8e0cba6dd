package comm

import (
	"context"

	"github.com/gochorus/chorus/internal/groups"
	"github.com/gochorus/chorus/internal/ranks"

	"github.com/gochorus/chorus/internal/route"
)

// ref is how packages above comm reach the inside of a group.
type ref = groups.Ref

// An inside is a group as packages above comm see it.
type inside struct{ g *Group }

func (x inside) Check(op string) error { return x.g.check(op) }

func (x inside) Chosen(k ranks.Collective) string { return x.g.chosen(k).String() }

func (x inside) Fail(cause error) error { return x.g.fail(cause) }

func (x inside) NewBatch() *route.Batch { return x.g.routers.NewBatch() }

func (x inside) UseWhole(ctx context.Context, strategy string) error {
	s, err := ParseStrategy(strategy)
	if err != nil {
		return err
	}
	return x.g.changeStrategy(ctx, s, func() { x.g.routers.UseOnly(route.Strategy(s)) })
}
