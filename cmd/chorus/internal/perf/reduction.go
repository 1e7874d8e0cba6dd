package perf

import (
	"fmt"
	"strings"

	"github.com/gochorus/chorus/nccl"
)

// A Reduction is a reduction operator.
type Reduction int

// The reductions of nccl-tests. MulSum multiplies the elements of each rank by
// the rank's factor before it adds them.
const (
	Moves Reduction = iota // no reduction
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

// ParseReductions returns the reduction with a name, or all reductions for "all".
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

// raw returns the NCCL operator. It is not valid for MulSum.
func (r Reduction) raw() nccl.Op {
	return [...]nccl.Op{nccl.Sum, nccl.Sum, nccl.Prod, nccl.Max, nccl.Min, nccl.Avg, nccl.Sum}[r]
}
