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

func (x inside) CheckSame(ctx context.Context, op, given string) error {
	return x.g.checkSame(ctx, op, given, sameArguments)
}

func (x inside) Chosen(k ranks.Collective) string { return string(x.g.chosen(k)) }

func (x inside) Fail(cause error) error { return x.g.fail(cause) }

func (x inside) NewBatch() *route.Batch { return x.g.routers.NewBatch() }

func (x inside) Rendezvous() any {
	if x.g.reporter == nil {
		return nil
	}
	return x.g.reporter.r
}

func (x inside) TunePlan(cfg route.PlanConfig) ([]route.Choice, error) { return x.g.plan(cfg) }

func (x inside) UseWhole(ctx context.Context, strategy string) error {
	return x.g.changeStrategy(ctx, Strategy(strategy), func(s route.Strategy) { x.g.routers.UseOnly(s) })
}
