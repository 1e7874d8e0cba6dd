package comm

import (
	"context"
	"fmt"
	"slices"
)

// checkSame returns an error on all ranks if the processes have given different arguments, which
// the ranks could not act on together. Collective.
func (g *Group) checkSame(ctx context.Context, op, given string) error {
	if err := g.check(op); err != nil {
		return err
	}
	if len(g.members) == g.size {
		if err := context.Cause(ctx); err != nil {
			return fmt.Errorf("comm: %s: %w", op, err)
		}
		return nil
	}
	all, err := GatherValues(ctx, g, nil, slices.Repeat([]string{given}, len(g.members))...)
	if err != nil {
		return fmt.Errorf("comm: %s: %w", op, err)
	}
	i := slices.IndexFunc(all, func(x string) bool { return x != all[0] })
	if i < 0 {
		return nil
	}
	// A rank that closes its group now would end the exchange on ranks that do not have all values
	// yet. A rank that does not come to the barrier has them, or is lost.
	_ = g.Barrier(ctx)
	return badArgument(op, "rank 0 has given %s and rank %d %s: give the same on all ranks", all[0], i, all[i])
}
