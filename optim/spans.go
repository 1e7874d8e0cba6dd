package optim

import (
	"cmp"
	"slices"

	"github.com/gochorus/chorus/tensor"
)

// A span is the memory of a contiguous tensor, from a first address up to, and without, an end.
type span struct {
	from, end uint64
	name      string
}

type spans []span

func (x *spans) add(t *tensor.Tensor, name string) {
	if t.Len() > 0 {
		*x = append(*x, span{t.Ptr(), t.Ptr() + uint64(t.Bytes()), name})
	}
}

// apart returns an error that names two spans with common memory, if there are such.
func (x spans) apart(op string) error {
	slices.SortStableFunc(x, func(a, b span) int { return cmp.Compare(a.from, b.from) })
	for i := 1; i < len(x); i++ {
		if a, b := x[i-1], x[i]; b.from < a.end {
			return refuse(op, "%s and %s share memory: give each its own", a.name, b.name)
		}
	}
	return nil
}

// apartFrom returns an error if y and a span have common memory. The spans are sorted, as apart
// leaves them.
func (x spans) apartFrom(op string, y span) error {
	i, _ := slices.BinarySearchFunc(x, y.from, func(s span, from uint64) int { return cmp.Compare(s.end, from+1) })
	if i < len(x) && x[i].from < y.end {
		return refuse(op, "%s and %s share memory: give each its own", x[i].name, y.name)
	}
	return nil
}
