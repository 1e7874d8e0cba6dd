package comm

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// A Tuning says which strategies carry which collectives out, the fastest first, on
// devices like those that it was measured on. An empty one holds for all, and leaves
// everything to NCCL.
type Tuning struct {
	For     Site     `json:"for"`
	Choices []Choice `json:"choices"`
}

// A Site is where a Tuning holds: what times depend on.
type Site struct {
	GPU     string `json:"gpu"`
	Ranks   int    `json:"ranks"`
	Hosts   int    `json:"hosts"` // that they are on
	Locals  int    `json:"ranks_of_process"`
	Backend string `json:"backend"`
	Driver  string `json:"driver"` // the version of CUDA that it has
	NCCL    string `json:"nccl"`
	Kernels string `json:"kernels"` // which Chorus's own are
}

// A Choice is what was measured of one operation. An operation that was not goes by the
// one that is most like it: of the same kind; of a sum of floats of at most 32 bits, or
// not; of the same type and reduction; of whole 16 bytes, or not; and then of the
// nearest number of bytes, by their logarithms.
type Choice struct {
	Operation string    `json:"operation"`       // such as "all-reduce"
	Type      string    `json:"type,omitempty"`  // of those that reduce, such as "float32"
	Reduction string    `json:"redop,omitempty"` // likewise
	Bytes     int       `json:"bytes"`           // all of an all-reduce or a broadcast, one rank's part of the others
	Times     []Timing  `json:"times"`           // the fastest first
	what      operation // as read from the above
}

// A Timing is how long a strategy took.
type Timing struct {
	Strategy Strategy `json:"strategy"`
	Micros   float64  `json:"us"` // an operation, of the slowest rank, in a graph of some
	// Eager is the same of copy engines without a graph, where the devices wait longer for
	// each other. It goes by this where nothing is captured. That is for copy engines only:
	// they have one call for all ranks, so that there cannot be a graph on some of them.
	Eager float64 `json:"eager_us,omitempty"`
}

// eager is how long an operation takes that is not captured.
func (t Timing) eager() float64 {
	if t.Eager > 0 {
		return t.Eager
	}
	return t.Micros
}

// An operation is what a Choice depends on beside the bytes.
type operation struct {
	kind  nccl.CollectiveKind
	dtype memory.DType // 0 for those that only move
	op    nccl.Op      // likewise
}

var kindNames = map[nccl.CollectiveKind]string{
	nccl.AllReduceKind: "all-reduce", nccl.AllGatherKind: "all-gather", nccl.ReduceScatterKind: "reduce-scatter",
	nccl.BroadcastKind: "broadcast", nccl.AllToAllKind: "all-to-all",
}

var tunedOps = []nccl.Op{nccl.Sum, nccl.Prod, nccl.Max, nccl.Min, nccl.Avg}

// tunedTypes are all types of elements.
var tunedTypes = func() (list []memory.DType) {
	for t := memory.Invalid + 1; t.Size() > 0; t++ {
		list = append(list, t)
	}
	return list
}()

func reduces(k nccl.CollectiveKind) bool {
	return k == nccl.AllReduceKind || k == nccl.ReduceScatterKind
}

// read finds out what a Choice is of.
func (c *Choice) read() error {
	c.what.kind = 0 // it may have been read before
	for k, name := range kindNames {
		if name == c.Operation {
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
	j := slices.IndexFunc(tunedOps, func(o nccl.Op) bool { return o.String() == c.Reduction })
	if i < 0 || j < 0 {
		return fmt.Errorf("%s of %q by %q: there is no such type or reduction", c.Operation, c.Type, c.Reduction)
	}
	c.what.dtype, c.what.op = tunedTypes[i], tunedOps[j]
	return nil
}

// clone returns a copy that may be checked, which notes what it has read.
func (t *Tuning) clone() *Tuning {
	if t == nil {
		return &Tuning{}
	}
	return &Tuning{For: t.For, Choices: slices.Clone(t.Choices)}
}

// index is a Tuning as it is looked up: the choices of every operation that there can
// be, of whole 16 bytes and others.
type index map[operation]*[2][]measured

// What was measured of a number of bytes.
type measured struct {
	log             float64
	captured, eager []Strategy // the fastest first
}

// index makes one, of choices that have been read.
func (t *Tuning) index() *index {
	x := index{}
	for kind := range kindNames {
		if !reduces(kind) {
			x.add(t, operation{kind: kind})
			continue
		}
		for _, dtype := range tunedTypes {
			for _, op := range tunedOps {
				x.add(t, operation{kind, dtype, op})
			}
		}
	}
	return &x
}

// add finds the choices for one operation.
func (x index) add(t *Tuning, o operation) {
	var both [2][]measured
	for i := range both {
		both[i] = t.places(o, i == 1)
	}
	x[o] = &both
}

// places are the choices that are most like an operation, by their bytes.
func (t *Tuning) places(o operation, odd bool) (list []measured) {
	best := -1
	for i := range t.Choices {
		c := &t.Choices[i]
		like := c.like(o, odd)
		if like < 0 || like < best {
			continue
		}
		if like > best {
			best, list = like, nil
		}
		p := measured{log: math.Log(float64(c.Bytes))}
		eager := slices.Clone(c.Times)
		slices.SortStableFunc(eager, func(a, b Timing) int { return cmp.Compare(a.eager(), b.eager()) })
		for k := range eager {
			p.captured = append(p.captured, c.Times[k].Strategy)
			p.eager = append(p.eager, eager[k].Strategy)
		}
		list = append(list, p)
	}
	slices.SortStableFunc(list, func(a, b measured) int { return cmp.Compare(a.log, b.log) })
	return list
}

// like says how much a Choice tells of an operation: nothing below 0.
func (c *Choice) like(o operation, odd bool) int {
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

// summed reports whether an operation is a sum of floats of at most 32 bits, for which
// NCCL has more kernels than for others.
func (o operation) summed() bool {
	switch o.dtype {
	case memory.Float16T, memory.BFloat16T, memory.Float32:
		return o.op == nccl.Sum
	}
	return false
}

// isOdd reports whether a number of bytes is not made of whole 16.
func isOdd(bytes int) bool { return bytes%16 != 0 }

// find returns what carries an operation out, the fastest first.
func (x *index) find(c nccl.Collective) []Strategy {
	if x == nil {
		return nil
	}
	o := operation{kind: c.Kind}
	if reduces(c.Kind) {
		o.dtype, o.op = c.DType, c.Op
	}
	both, bytes := (*x)[o], bytesOf(c)
	if both == nil || bytes == 0 {
		return nil
	}
	list := both[0]
	if isOdd(bytes) {
		list = both[1]
	}
	if len(list) == 0 {
		return nil
	}
	log := math.Log(float64(bytes))
	i, _ := slices.BinarySearchFunc(list, log, func(p measured, log float64) int { return cmp.Compare(p.log, log) })
	switch {
	case i == len(list), i > 0 && log-list[i-1].log < list[i].log-log:
		i--
	}
	if c.Captured {
		return list[i].captured
	}
	return list[i].eager
}

// fits returns why a Tuning does not hold at a site, or nil.
func (t *Tuning) fits(at Site) error {
	if t.For == at || len(t.Choices) == 0 {
		return nil
	}
	var differ []string
	for _, x := range []struct {
		what      string
		then, now any
	}{
		{"GPU", t.For.GPU, at.GPU}, {"number of ranks", t.For.Ranks, at.Ranks}, {"number of hosts", t.For.Hosts, at.Hosts}, {"ranks of a process", t.For.Locals, at.Locals},
		{"backend", t.For.Backend, at.Backend}, {"driver", t.For.Driver, at.Driver}, {"NCCL", t.For.NCCL, at.NCCL}, {"own kernels", t.For.Kernels, at.Kernels},
	} {
		if x.then != x.now {
			differ = append(differ, fmt.Sprintf("%s %v, here %v", x.what, x.then, x.now))
		}
	}
	return fmt.Errorf("it was measured with %s: measure anew with chorus tune", strings.Join(differ, "; "))
}
