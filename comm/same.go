package comm

import (
	"context"
	"fmt"
	"slices"
)

// sameArguments is the usual cure of a failure of checkSame.
const sameArguments = "give the same on all ranks"

// checkSame returns an error on all ranks if the processes have different arguments, because the
// ranks would wait for each other. Collective.
func (g *Group) checkSame(ctx context.Context, op, has, cure string) error {
	if err := g.check(op); err != nil {
		return err
	}
	if len(g.members) == g.size {
		if err := context.Cause(ctx); err != nil {
			return fmt.Errorf("comm: %s: %w", op, err)
		}
		return nil
	}
	all, err := GatherValues(ctx, g, nil, slices.Repeat([]string{has}, len(g.members))...)
	if err != nil {
		return fmt.Errorf("comm: %s: %w", op, err)
	}
	i := slices.IndexFunc(all, func(x string) bool { return x != all[0] })
	if i < 0 {
		return nil
	}
	// A rank may close its group as soon as it has all values, and would end the exchange of ranks that do
	// not have them. So all ranks wait here. This rank has the reason, whatever the barrier returns.
	_ = g.Barrier(ctx)
	return badArgument(op, "rank 0 has %s and rank %d %s: %s", all[0], i, all[i], cure)
}
