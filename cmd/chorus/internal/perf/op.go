package perf

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/memory"
)

// An Operation is an operation of nccl-tests.
type Operation struct {
	Name    string
	kind    kind
	reduces bool // takes a reduction
	rooted  bool // takes a root
	inPlace bool // can run in place
	factor  func(n float64) float64
	layout  func(count, n, align int) layout
}

// A kind selects the NCCL call.
type kind int

const (
	allReduce kind = iota
	allGather
	reduceScatter
	broadcast
	reduce
	allToAll
	allToAllV
	gather
	scatter
	sendRecv
	hypercube
)

// A layout holds the element counts of an operation for one size.
type layout struct {
	send, recv int // lengths of a rank's buffers
	param      int // count argument of the call, as shown in the table
	moved      int // elements counted by the algorithm bandwidth
}

// size returns the length of the larger buffer, which is the size of the row.
func (l layout) size() int { return max(l.send, l.recv) }

// A factor converts algorithm bandwidth to bus bandwidth: the fraction of the
// data that crosses a rank's link. The result is comparable to the link's
// bandwidth.
func whole(float64) float64    { return 1 }
func others(n float64) float64 { return (n - 1) / n }
func twice(n float64) float64  { return 2 * (n - 1) / n }

// chunk returns the part of each of n ranks, a multiple of 16 bytes.
func chunk(count, n, align int) int { return count / n / align * align }

func alike(count, _, _ int) layout { return layout{count, count, count, count} }

func spread(count, n, align int) layout { // from one part to all parts
	c := chunk(count, n, align)
	return layout{c, c * n, c, c * n}
}

func gathered(count, n, align int) layout { // from all parts to one
	c := chunk(count, n, align)
	return layout{c * n, c, c, c * n}
}

func exchanged(count, n, align int) layout {
	c := chunk(count, n, align)
	return layout{c * n, c * n, c, c * n}
}

func doubled(count, n, align int) layout {
	c := chunk(count, n, align)
	return layout{c, c * n, c, c * (n - 1)}
}

// Operations lists all operations in the order that the help shows.
var Operations = []*Operation{
	{Name: "all_reduce", kind: allReduce, reduces: true, inPlace: true, factor: twice, layout: alike},
	{Name: "all_gather", kind: allGather, inPlace: true, factor: others, layout: spread},
	{Name: "reduce_scatter", kind: reduceScatter, reduces: true, inPlace: true, factor: others, layout: gathered},
	{Name: "broadcast", kind: broadcast, rooted: true, inPlace: true, factor: whole, layout: alike},
	{Name: "reduce", kind: reduce, reduces: true, rooted: true, inPlace: true, factor: whole, layout: alike},
	{Name: "alltoall", kind: allToAll, factor: others, layout: exchanged},
	{Name: "alltoallv", kind: allToAllV, factor: others, layout: exchanged},
	{Name: "gather", kind: gather, rooted: true, inPlace: true, factor: others, layout: spread},
	{Name: "scatter", kind: scatter, rooted: true, inPlace: true, factor: others, layout: gathered},
	{Name: "sendrecv", kind: sendRecv, factor: whole, layout: alike},
	{Name: "hypercube", kind: hypercube, inPlace: true, factor: whole, layout: doubled},
}

// Find returns the operation with a name. It also accepts names of nccl-tests'
// programs, such as all_reduce_perf.
func Find(name string) (*Operation, error) {
	names := make([]string, len(Operations))
	for i, o := range Operations {
		if o.Name == strings.TrimSuffix(name, "_perf") {
			return o, nil
		}
		names[i] = o.Name
	}
	return nil, fmt.Errorf("unknown operation %q: want one of %s", name, strings.Join(names, ", "))
}

// fits returns an error if the operation does not support n ranks.
func (o *Operation) fits(n int) error {
	if o.kind == hypercube && n&(n-1) != 0 {
		return fmt.Errorf("hypercube on %d ranks: want a power of two", n)
	}
	return nil
}

// uneven returns the number of elements that rank from sends to rank to, for a
// part of c elements: between half as many and half as many again. The total is
// the same as for alltoall.
func uneven(c, n, from, to int) int {
	k := (from + to) % n
	half := c / 2
	switch {
	case k == n-1-k: // the middle of an odd number
		return c
	case k < n-1-k:
		return c - half
	}
	return c + half
}

// ParseBytes parses a size in the syntax of nccl-tests: K, M and G are 2^10, 2^20 and 2^30.
func ParseBytes(s string) (int, error) {
	number, shift := strings.TrimSuffix(strings.ToUpper(s), "B"), 0
	number = strings.TrimSuffix(number, "I")
	for i, unit := range []string{"K", "M", "G", "T"} {
		if rest, ok := strings.CutSuffix(number, unit); ok {
			number, shift = rest, 10*(i+1)
		}
	}
	n, err := strconv.ParseFloat(number, 64)
	if err != nil || !(n >= 0) || n > float64(int64(1)<<50>>shift) {
		return 0, fmt.Errorf("%q is not a size: want bytes, such as 8, 64K, 1M or 1.5G", s)
	}
	return int(n * float64(int(1)<<shift)), nil
}

// Sizes are the sizes of a sweep in bytes, from Min to Max. Each size is Factor
// times the previous one, or Step larger if Factor is 0.
type Sizes struct{ Min, Max, Step, Factor int }

// Check validates the sizes.
func (s Sizes) Check() error {
	_, err := s.list()
	return err
}

// mostSizes limits the length of a table.
const mostSizes = 10000

// list returns the sizes in ascending order.
func (s Sizes) list() ([]int, error) {
	switch {
	case s.Min < 1 || s.Max < s.Min:
		return nil, fmt.Errorf("sizes from %d to %d bytes: want at least 1, and the smallest first", s.Min, s.Max)
	case s.Factor == 1 || s.Factor < 0 || s.Step < 0:
		return nil, fmt.Errorf("step %d, factor %d: want a step of 1 byte or more, or a factor of 2 or more", s.Step, s.Factor)
	case s.Factor == 0 && s.Step == 0 && s.Min != s.Max:
		return nil, fmt.Errorf("sizes from %d to %d bytes: want a step or a factor", s.Min, s.Max)
	}
	var list []int
	for n := s.Min; ; {
		if list = append(list, n); len(list) > mostSizes {
			return nil, fmt.Errorf("more than %d sizes from %d to %d bytes: want a larger step or factor", mostSizes, s.Min, s.Max)
		}
		switch {
		case s.Factor > 1 && n <= s.Max/s.Factor:
			n *= s.Factor
		case s.Factor == 0 && s.Step > 0 && s.Step <= s.Max-n:
			n += s.Step
		default:
			return list, nil
		}
	}
}

// A Plan configures a run. It must be the same on all ranks.
type Plan struct {
	Operations []*Operation
	DTypes     []memory.DType
	Reductions []Reduction
	Root       int // or AllRoots
	Sizes      Sizes
	Iterations int
	Warmups    int // iterations before each measurement
	Launches   int // launches of a graph with all iterations; 0: no graph
	Checks     int // checks of each row; 0: none
	Register   Registration
	Fitting    bool // skip operations that do not support n ranks

	only     func(job) bool // selects the rows to measure; nil selects all
	together bool           // one thread issues the operations of all local ranks
}

// AllRoots measures every rank as root.
const AllRoots = -1

// A Registration selects how buffers are registered with NCCL.
type Registration int

// The registrations: none, as buffers of the communicator (ncclCommRegister), and
// as symmetric windows of all ranks (ncclCommWindowRegister).
const (
	Unregistered Registration = iota
	Registered
	Windows
)

// A job is one row of the table.
type job struct {
	op     *Operation
	dtype  memory.DType
	red    Reduction
	root   int
	layout layout
}

// Check validates a plan for n ranks.
func (p *Plan) Check(n int) error {
	_, err := p.jobs(n)
	return err
}

// jobs returns the rows in table order.
func (p *Plan) jobs(n int) (list []job, err error) {
	sizes, err := p.Sizes.list()
	if err != nil {
		return nil, err
	}
	switch {
	case len(p.Operations) == 0 || len(p.DTypes) == 0 || len(p.Reductions) == 0:
		return nil, errors.New("want at least one operation, element type and reduction")
	case p.Iterations < 1 || p.Warmups < 0 || p.Launches < 0 || p.Checks < 0:
		return nil, fmt.Errorf("%d iterations, %d warm-ups, %d graph launches, %d checks: want 1 iteration or more, and no negative number",
			p.Iterations, p.Warmups, p.Launches, p.Checks)
	case p.Root < AllRoots || p.Root >= n:
		return nil, fmt.Errorf("root %d: want a rank from 0 to %d", p.Root, n-1)
	case p.Register < Unregistered || p.Register > Windows:
		return nil, fmt.Errorf("registration %d: want 0 for none, 1 for the communicator or 2 for windows", p.Register)
	}
	for _, o := range p.Operations {
		if err := o.fits(n); err != nil {
			if p.Fitting {
				continue
			}
			return nil, err
		}
		for _, t := range p.DTypes {
			for _, r := range p.reductions(o) {
				list = append(list, p.sweep(o, t, r, sizes, n)...)
			}
		}
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("sizes up to %d bytes have less than one element for each of %d ranks: want larger sizes", p.Sizes.Max, n)
	}
	return list, nil
}

func (p *Plan) reductions(o *Operation) []Reduction {
	if !o.reduces {
		return []Reduction{Moves}
	}
	return p.Reductions
}

// sweep returns the rows of all roots and sizes. It skips sizes with less than
// one element for each rank.
func (p *Plan) sweep(o *Operation, t memory.DType, r Reduction, sizes []int, n int) (list []job) {
	roots := []int{p.Root}
	if !o.rooted {
		roots = []int{-1}
	} else if p.Root == AllRoots {
		roots = roots[:0]
		for i := range n {
			roots = append(roots, i)
		}
	}
	for _, root := range roots {
		for _, bytes := range sizes {
			l := o.layout(bytes/t.Size(), n, max(16/t.Size(), 1))
			if l.param > 0 {
				list = append(list, job{o, t, r, root, l})
			}
		}
	}
	return list
}
