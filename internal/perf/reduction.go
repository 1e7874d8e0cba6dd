package perf

import (
	"fmt"
	"strings"

	"github.com/gochorus/chorus/nccl"
)

// A Reduction is how an operation puts the ranks' elements together.
type Reduction int

// The reductions of nccl-tests. MulSum multiplies each rank's elements by a factor
// of its own before it adds them.
const (
	Moves Reduction = iota // none
	Sum
	Prod
	Max
	Min
	Avg
	MulSum
)

var reductions = [...]string{"none", "sum", "prod", "max", "min", "avg", "mulsum"}

// String returns the name in the table.
func (r Reduction) String() string { return reductions[r] }

// ParseReductions returns the reductions of a name, or of "all".
func ParseReductions(name string) ([]Reduction, error) {
	if name == "all" {
		return []Reduction{Sum, Prod, Max, Min, Avg, MulSum}, nil
	}
	for r := Sum; r <= MulSum; r++ {
		if name == reductions[r] {
			return []Reduction{r}, nil
		}
	}
	return nil, fmt.Errorf("unknown reduction %q: want all or one of %s", name, strings.Join(reductions[1:], ", "))
}

// raw is the reduction for calls, except for MulSum.
func (r Reduction) raw() nccl.Op {
	return [...]nccl.Op{nccl.Sum, nccl.Sum, nccl.Prod, nccl.Max, nccl.Min, nccl.Avg, nccl.Sum}[r]
}
