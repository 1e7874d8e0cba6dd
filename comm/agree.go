package comm

import (
	"context"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/memory"
)

// terms are what a rank has given to a call that must be alike on all ranks.
type terms struct {
	Given   string
	Wrong   string // its mistake, or ""
	What    string // of what Lengths are the lengths, such as "gradient"
	Lengths []int
}

// agree returns an error on all ranks when they have not given the same, or when what one has
// given is a mistake, which only that rank may know of: then it returns that. Where all ranks
// are local there is nobody else to ask. Collective.
func (g *Group) agree(ctx context.Context, op string, mine terms, mistake error) error {
	if len(g.members) == g.size {
		return mistake
	}
	if mistake != nil {
		mine = terms{Wrong: mistake.Error()}
	}
	all, err := GatherValues(ctx, g, nil, slices.Repeat([]terms{mine}, g.Locals())...)
	if mistake != nil {
		return mistake
	}
	if err != nil {
		return fmt.Errorf("comm: %s: %w", op, err)
	}
	if i := slices.IndexFunc(all, func(x terms) bool { return x.Wrong != "" }); i >= 0 {
		return refuse(op, "rank %d has given something wrong: %s", i, all[i].Wrong)
	}
	for i := range all {
		if why := all[0].differ(&all[i], i); why != "" {
			return refuse(op, "%s: give the same on all ranks", why)
		}
	}
	return nil
}

// differ says where the terms of another rank are not those of rank 0, or "".
func (x *terms) differ(other *terms, rank int) string {
	if len(x.Lengths) == len(other.Lengths) {
		for i, n := range x.Lengths {
			if m := other.Lengths[i]; m != n {
				return fmt.Sprintf("%s %d has %d elements on rank 0 and %d on rank %d", x.What, i, n, m, rank)
			}
		}
	}
	if x.Given != other.Given {
		return fmt.Sprintf("rank 0 has given %s and rank %d %s", x.Given, rank, other.Given)
	}
	return ""
}

// inBuckets says what is reduced in buckets, for agree.
func inBuckets[T memory.Element](what string, lens []int, first, bytes int, op Op) terms {
	sum := 0
	for _, n := range lens {
		sum += n
	}
	by := op.String()
	if op > Avg { // its number is the communicator's own
		by = "a factor"
	}
	given := fmt.Sprintf("%d %ss of %s, %d elements in all, in buckets of %d and %d bytes by %s",
		len(lens), what, memory.DTypeOf[T](), sum, first, bytes, by)
	return terms{Given: given, What: what, Lengths: lens}
}
