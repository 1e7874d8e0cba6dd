package fabric

import "fmt"

// An Op is a reduction.
type Op int

// The reductions. Avg divides the sum by the number of ranks, integers toward zero.
// Of a number and a NaN, Max and Min take the number.
const (
	Sum Op = iota
	Prod
	Max
	Min
	Avg
	ops
)

// String returns the name of the reduction, such as "sum".
func (o Op) String() string {
	if names := [ops]string{"sum", "prod", "max", "min", "avg"}; o >= 0 && o < ops {
		return names[o]
	}
	return fmt.Sprintf("op %d", int(o))
}

// templates has the names in the source.
var templates = [ops]string{"Sum", "Prod", "Max", "Min", "Avg"}
