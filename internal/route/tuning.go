package route

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/memory"
)

// A Tuning is a comm.Tuning. The documentation of package comm describes the types of this
// file that have the same names.
type Tuning struct {
	For     Site     `json:"for"`
	Choices []Choice `json:"choices"`
}

// A Site is a comm.Site.
type Site struct {
	GPU     string `json:"gpu"`
	Ranks   int    `json:"ranks"`
	Hosts   int    `json:"hosts"`
	Locals  int    `json:"ranks_of_process"`
	Backend string `json:"backend"`
	Driver  string `json:"driver"`
	NCCL    string `json:"nccl"`
	Kernels string `json:"kernels"`
}

// A Choice is a comm.Choice.
type Choice struct {
	Operation string    `json:"operation"`
	Type      string    `json:"type,omitempty"`
	Reduction string    `json:"redop,omitempty"`
	Bytes     int       `json:"bytes"`
	Times     []Timing  `json:"times"` // the fastest first
	what      operation // parsed from the fields above
}

// A Timing is a comm.Timing.
type Timing struct {
	Strategy Strategy `json:"strategy"`
	Micros   float64  `json:"us"`
	Eager    float64  `json:"eager_us,omitempty"`
}

// eager returns the duration of an operation that is not captured.
func (t Timing) eager() float64 {
	if t.Eager > 0 {
		return t.Eager
	}
	return t.Micros
}

// An operation has the properties of a Choice except the size.
type operation struct {
	kind  flight.Kind
	dtype memory.DType     // 0 for operations without reduction
	op    flight.Reduction // likewise
}

// tunedKinds are the collectives that a Tuning can have choices for.
var tunedKinds = []flight.Kind{flight.AllReduce, flight.AllGather, flight.ReduceScatter, flight.Broadcast, flight.AllToAll}

var tunedOps = []flight.Reduction{flight.Sum, flight.Prod, flight.Max, flight.Min, flight.Avg}

// tunedTypes are all element types.
var tunedTypes = func() (list []memory.DType) {
	for t := memory.Invalid + 1; t.Size() > 0; t++ {
		list = append(list, t)
	}
	return list
}()

// parse parses and validates the text fields of a Choice.
func (c *Choice) parse() error {
	c.what.kind = 0 // may be set by an earlier parse
	for _, k := range tunedKinds {
		if k.Plain() == c.Operation {
			c.what.kind = k
		}
	}
	switch {
	case c.what.kind == 0:
		return fmt.Errorf("there is no operation %q", c.Operation)
	case c.Bytes < 1:
		return fmt.Errorf("%s of %d bytes", c.Operation, c.Bytes)
	case len(c.Times) == 0:
		return fmt.Errorf("%s of %d bytes has no times", c.Operation, c.Bytes)
	}
	for i, t := range c.Times {
		if t.Eager != 0 && t.Strategy != CopyEngines || !(t.Eager >= 0) || math.IsInf(t.Eager, 0) {
			return fmt.Errorf("%s of %d bytes has eager_us %v of %s: want a time, of %s only", c.Operation, c.Bytes, t.Eager, t.Strategy, CopyEngines)
		}
		if t.Strategy == ByEnvironment || t.Strategy >= Tuned || !(t.Micros >= 0) || math.IsInf(t.Micros, 0) || i > 0 && t.Micros < c.Times[i-1].Micros {
			return fmt.Errorf("%s of %d bytes has %v of %s: want the fastest first", c.Operation, c.Bytes, t.Micros, t.Strategy)
		}
	}
	if !reduces(c.what.kind) {
		return nil
	}
	i := slices.IndexFunc(tunedTypes, func(t memory.DType) bool { return t.String() == c.Type })
	j := slices.IndexFunc(tunedOps, func(o flight.Reduction) bool { return o.String() == c.Reduction })
	if i < 0 || j < 0 {
		return fmt.Errorf("%s of %q by %q: there is no such type or reduction", c.Operation, c.Type, c.Reduction)
	}
	c.what.dtype, c.what.op = tunedTypes[i], tunedOps[j]
	return nil
}

// Check parses and validates the choices.
func (t *Tuning) Check() error {
	for i := range t.Choices {
		if err := t.Choices[i].parse(); err != nil {
			return err
		}
	}
	return nil
}

// Index returns the strategies of choices that Check has parsed.
func (t *Tuning) Index() *Index {
	x := &Index{}
	for _, kind := range tunedKinds {
		if !reduces(kind) {
			x[kind][0][0] = t.measurements(operation{kind: kind})
			continue
		}
		for _, dtype := range tunedTypes {
			for _, op := range tunedOps {
				x[kind][dtype][op] = t.measurements(operation{kind, dtype, op})
			}
		}
	}
	return x
}

// measurements returns the choices for one operation.
func (t *Tuning) measurements(o operation) *Measurements {
	return &Measurements{Aligned: t.nearest(o, false), Odd: t.nearest(o, true)}
}

// nearest returns the choices that are most similar to an operation, by size.
func (t *Tuning) nearest(o operation, odd bool) (list []Measured) {
	best := -1
	for i := range t.Choices {
		c := &t.Choices[i]
		n := c.similarity(o, odd)
		if n < 0 || n < best {
			continue
		}
		if n > best {
			best, list = n, nil
		}
		p := Measured{Bytes: c.Bytes}
		eager := slices.Clone(c.Times)
		slices.SortStableFunc(eager, func(a, b Timing) int { return cmp.Compare(a.eager(), b.eager()) })
		for k := range eager {
			p.Captured = append(p.Captured, Strategy(c.Times[k].Strategy))
			p.Eager = append(p.Eager, Strategy(eager[k].Strategy))
		}
		list = append(list, p)
	}
	slices.SortStableFunc(list, func(a, b Measured) int { return cmp.Compare(a.Bytes, b.Bytes) })
	return slices.CompactFunc(list, func(a, b Measured) bool { return a.Bytes == b.Bytes }) // the first of equals
}

// similarity returns how similar a Choice is to an operation; negative means not at all.
func (c *Choice) similarity(o operation, odd bool) int {
	if c.what.kind != o.kind {
		return -1
	}
	n := 0
	for i, alike := range []bool{isOdd(c.Bytes) == odd, c.what.op == o.op, c.what.dtype == o.dtype, c.what.summed() == o.summed()} {
		if alike {
			n |= 1 << i
		}
	}
	return n
}

// summed reports whether an operation is a sum of floats of at most 32 bits. NCCL has more
// kernels for these sums than for others.
func (o operation) summed() bool {
	switch o.dtype {
	case memory.Float16, memory.BFloat16, memory.Float32:
		return o.op == flight.Sum
	}
	return false
}

// Fits returns why a Tuning is not valid at a site, or nil.
func (t *Tuning) Fits(at Site) error {
	if t.For == at || len(t.Choices) == 0 {
		return nil
	}
	var differ []string
	for _, x := range []struct {
		what      string
		then, now any
	}{
		{"GPU", t.For.GPU, at.GPU}, {"number of ranks", t.For.Ranks, at.Ranks}, {"number of hosts", t.For.Hosts, at.Hosts}, {"ranks of a process", t.For.Locals, at.Locals},
		{"backend", t.For.Backend, at.Backend}, {"driver", t.For.Driver, at.Driver}, {"NCCL", t.For.NCCL, at.NCCL}, {"Chorus kernels", t.For.Kernels, at.Kernels},
	} {
		if x.then != x.now {
			differ = append(differ, fmt.Sprintf("%s %v, here %v", x.what, x.then, x.now))
		}
	}
	return fmt.Errorf("it was measured with %s: measure again with chorus tune", strings.Join(differ, "; "))
}
