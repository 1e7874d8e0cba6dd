package ddp

import (
	"context"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
)

// arguments describe the arguments of a call that must be the same on all ranks.
type arguments struct {
	Given   string
	Wrong   string // its mistake, or ""
	What    string // the things that have Lengths, such as "gradient"
	Lengths []int
	Types   []memory.DType
	Shapes  [][]int // or none
}

// agree compares the arguments of all ranks. It returns an error on all ranks if the
// arguments differ or if one rank has a mistake. The rank with the mistake gets its own
// error. If all ranks are local, agree only returns mistake. Collective.
func agree(ctx context.Context, g *comm.Group, op string, mine arguments, mistake error) error {
	if g.Locals() == g.Size() {
		return mistake
	}
	if mistake != nil {
		mine = arguments{Wrong: mistake.Error()}
	}
	all, err := comm.GatherValues(ctx, g, nil, slices.Repeat([]arguments{mine}, g.Locals())...)
	if mistake != nil {
		return mistake
	}
	if err != nil {
		return fmt.Errorf("ddp: %s: %w", op, err)
	}
	if i := slices.IndexFunc(all, func(x arguments) bool { return x.Wrong != "" }); i >= 0 {
		return refuse(op, "rank %d has given something wrong: %s", i, all[i].Wrong)
	}
	for i := range all {
		if why := all[0].differ(&all[i], i); why != "" {
			return refuse(op, "%s: give the same on all ranks", why)
		}
	}
	return nil
}

// differ names the first difference between rank 0 and another rank, or returns "".
func (x *arguments) differ(other *arguments, rank int) string {
	if len(x.Lengths) == len(other.Lengths) {
		for i, n := range x.Lengths {
			if m := other.Lengths[i]; m != n {
				return fmt.Sprintf("%s %d has %d elements on rank 0 and %d on rank %d", x.What, i, n, m, rank)
			}
			if t, u := x.Types[i], other.Types[i]; t != u {
				return fmt.Sprintf("%s %d is %s on rank 0 and %s on rank %d", x.What, i, t, u, rank)
			}
			if len(x.Shapes) > i && len(other.Shapes) > i && !slices.Equal(x.Shapes[i], other.Shapes[i]) {
				return fmt.Sprintf("%s %d has shape %v on rank 0 and %v on rank %d", x.What, i, x.Shapes[i], other.Shapes[i], rank)
			}
		}
	}
	if x.Given != other.Given {
		return fmt.Sprintf("rank 0 has given %s and rank %d %s", x.Given, rank, other.Given)
	}
	return ""
}

// describe describes gradients or parameters and their buckets, for agree.
func describe(what string, lens []int, types []memory.DType, first, bytes int, op comm.Op) arguments {
	sum := 0
	for _, n := range lens {
		sum += n
	}
	by := op.String()
	if op > comm.Avg { // each communicator numbers its own
		by = "a factor"
	}
	given := fmt.Sprintf("%d %ss of %v, %d elements in all, in buckets of %d and %d bytes by %s",
		len(lens), what, slices.Compact(slices.Clone(types)), sum, first, bytes, by)
	return arguments{Given: given, What: what, Lengths: lens, Types: types}
}
