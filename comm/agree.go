package comm

import (
	"context"
	"fmt"
	"hash/crc32"
	"slices"

	"github.com/gochorus/chorus/memory"
)

// agree returns an error on all ranks when they have not given the same, or when what one has
// given is a mistake, which only that rank may know of: then it returns that. Where all ranks
// are local there is nobody else to ask. Collective.
func (g *Group) agree(ctx context.Context, op, given string, mistake error) error {
	if len(g.members) == g.size {
		return mistake
	}
	if mistake != nil {
		given = "something wrong: " + mistake.Error()
	}
	all, err := GatherValues(ctx, g, nil, slices.Repeat([]string{given}, g.Locals())...)
	if mistake != nil {
		return mistake
	}
	if err != nil {
		return fmt.Errorf("comm: %s: %w", op, err)
	}
	i := slices.IndexFunc(all, func(other string) bool { return other != all[0] })
	if i < 0 {
		return nil
	}
	return refuse(op, "rank 0 has given %s and rank %d %s: give the same on all ranks", all[0], i, all[i])
}

// inBuckets says what is reduced in buckets, for agree.
func inBuckets[T memory.Element](what string, lens []int, first, bytes int, op Op) string {
	sum, order := 0, crc32.NewIEEE()
	for _, n := range lens {
		sum += n
		fmt.Fprintln(order, n)
	}
	by := op.String()
	if op > Avg { // its number is the communicator's own
		by = "a factor"
	}
	return fmt.Sprintf("%d %s of %s, %d elements in all (lengths %08x), in buckets of %d and %d bytes by %s",
		len(lens), what, memory.DTypeOf[T](), sum, order.Sum32(), first, bytes, by)
}
