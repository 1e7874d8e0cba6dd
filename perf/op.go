package perf

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/gochorus/chorus/memory"
)

// An operation is an operation of nccl-tests.
type operation struct {
	name    string
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

// operations are the rows of all operations.
var operations = []*operation{
	{name: "all_reduce", kind: allReduce, reduces: true, inPlace: true, factor: twice, layout: alike},
	{name: "all_gather", kind: allGather, inPlace: true, factor: others, layout: spread},
	{name: "reduce_scatter", kind: reduceScatter, reduces: true, inPlace: true, factor: others, layout: gathered},
	{name: "broadcast", kind: broadcast, rooted: true, inPlace: true, factor: whole, layout: alike},
	{name: "reduce", kind: reduce, reduces: true, rooted: true, inPlace: true, factor: whole, layout: alike},
	{name: "alltoall", kind: allToAll, factor: others, layout: exchanged},
	{name: "alltoallv", kind: allToAllV, factor: others, layout: exchanged},
	{name: "gather", kind: gather, rooted: true, inPlace: true, factor: others, layout: spread},
	{name: "scatter", kind: scatter, rooted: true, inPlace: true, factor: others, layout: gathered},
	{name: "sendrecv", kind: sendRecv, factor: whole, layout: alike},
	{name: "hypercube", kind: hypercube, inPlace: true, factor: whole, layout: doubled},
}

// Operations returns the names of all operations: those of nccl-tests, without _perf.
func Operations() []string {
	names := make([]string, len(operations))
	for i, o := range operations {
		names[i] = o.name
	}
	return names
}

// find returns the operation with a name, which may also be that of an
// nccl-tests' program, such as all_reduce_perf.
func find(name string) (*operation, error) {
	for _, o := range operations {
		if o.name == strings.TrimSuffix(name, "_perf") {
			return o, nil
		}
	}
	return nil, fmt.Errorf("unknown operation %q: want one of %s", name, strings.Join(Operations(), ", "))
}

// fits returns an error if the operation does not support n ranks.
func (o *operation) fits(n int) error {
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

// ParseBytes parses a size in the syntax of nccl-tests, such as 8, 64K, 1M or 1.5G: K, M and G are 2^10, 2^20 and 2^30.
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

// mostSizes limits the length of a table.
const mostSizes = 10000

// sizes returns the sizes in ascending order.
func (p *Plan) sizes() ([]int, error) {
	switch {
	case p.MinBytes < 1 || p.MaxBytes < p.MinBytes:
		return nil, fmt.Errorf("sizes from %d to %d bytes: want at least 1, and the smallest first", p.MinBytes, p.MaxBytes)
	case p.StepFactor == 1 || p.StepFactor < 0 || p.StepBytes < 0:
		return nil, fmt.Errorf("step %d, factor %d: want a step of 1 byte or more, or a factor of 2 or more", p.StepBytes, p.StepFactor)
	case p.StepFactor == 0 && p.StepBytes == 0 && p.MinBytes != p.MaxBytes:
		return nil, fmt.Errorf("sizes from %d to %d bytes: want a step or a factor", p.MinBytes, p.MaxBytes)
	}
	var list []int
	for n := p.MinBytes; ; {
		if list = append(list, n); len(list) > mostSizes {
			return nil, fmt.Errorf("more than %d sizes from %d to %d bytes: want a larger step or factor", mostSizes, p.MinBytes, p.MaxBytes)
		}
		switch {
		case p.StepFactor > 1 && n <= p.MaxBytes/p.StepFactor:
			n *= p.StepFactor
		case p.StepFactor == 0 && p.StepBytes > 0 && p.StepBytes <= p.MaxBytes-n:
			n += p.StepBytes
		default:
			return list, nil
		}
	}
}

// A Plan configures [Run]. It must be the same on all ranks. Operations, MinBytes and Iterations are required.
type Plan struct {
	Operations []string `json:"operations"`        // names of Operations
	Types      []string `json:"types"`             // element types, named as in nccl-tests or package memory; "all": all of NCCL; nil: float
	Reductions []string `json:"redops"`            // sum, prod, max, min, avg, mulsum or all; nil: sum
	Root       int      `json:"root"`              // of rooted operations, or AllRoots
	MinBytes   int      `json:"min_bytes"`         // the smallest size
	MaxBytes   int      `json:"max_bytes"`         // the largest size; 0: MinBytes
	StepBytes  int      `json:"step_bytes"`        // the next size is larger by StepBytes,
	StepFactor int      `json:"step_factor"`       // or larger by this factor if it is not 0
	Iterations int      `json:"iterations"`        // timed operations of each row
	Warmups    int      `json:"warmup_iterations"` // untimed operations before each measurement
	Launches   int      `json:"graph_launches"`    // launches of a graph with all iterations; 0: no graph
	Checks     int      `json:"checks"`            // checks of each result; 0: none
	Register   int      `json:"registration"`      // buffers: 0 not registered, 1 by ncclCommRegister, 2 as symmetric windows

	Strategies bool `json:"-"` // measure each strategy of the group, whose strategy must be comm.Tuned
	Fitting    bool `json:"-"` // skip operations that do not support the number of ranks

	only     func(job) bool // selects the rows to measure; nil selects all
	together bool           // one thread issues the operations of all local ranks
}

// AllRoots measures every rank as root.
const AllRoots = -1

// The registrations of Plan.Register.
const (
	unregistered = iota
	registered
	windows
)

// A job is one row of the table.
type job struct {
	op     *operation
	dtype  memory.DType
	red    reduction
	root   int
	layout layout
}

// complete returns the plan with its defaults, and with names instead of "all".
func (p *Plan) complete() (*Plan, error) {
	q := *p
	if q.MaxBytes == 0 {
		q.MaxBytes = q.MinBytes
	}
	q.Operations, q.Types, q.Reductions = nil, nil, nil
	for _, name := range p.Operations {
		o, err := find(name)
		if err != nil {
			return nil, err
		}
		q.Operations = append(q.Operations, o.name)
	}
	for _, name := range defaults(p.Types, "float") {
		list, err := ParseTypes(name)
		if err != nil {
			return nil, err
		}
		for _, t := range list {
			q.Types = append(q.Types, typeName(t))
		}
	}
	for _, name := range defaults(p.Reductions, sum.String()) {
		list, err := parseReductions(name)
		if err != nil {
			return nil, err
		}
		for _, r := range list {
			q.Reductions = append(q.Reductions, r.String())
		}
	}
	return &q, nil
}

// defaults returns names, or one name instead of none.
func defaults(names []string, name string) []string {
	if len(names) == 0 {
		return []string{name}
	}
	return names
}

// Check reports what is wrong with the plan for a number of ranks.
func (p *Plan) Check(ranks int) error {
	_, err := p.jobs(ranks)
	return err
}

// Rows returns the rows that [Run] measures on a number of ranks, without measurements.
func (p *Plan) Rows(ranks int) ([]*Row, error) {
	jobs, err := p.jobs(ranks)
	if err != nil {
		return nil, err
	}
	rows := make([]*Row, len(jobs))
	for i, j := range jobs {
		rows[i] = j.describe()
	}
	return rows, nil
}

// jobs returns the rows in table order.
func (p *Plan) jobs(n int) (list []job, err error) {
	if p, err = p.complete(); err != nil {
		return nil, err
	}
	sizes, err := p.sizes()
	if err != nil {
		return nil, err
	}
	switch {
	case len(p.Operations) == 0:
		return nil, errors.New("want at least one operation")
	case p.Iterations < 1 || p.Warmups < 0 || p.Launches < 0 || p.Checks < 0:
		return nil, fmt.Errorf("%d iterations, %d warm-ups, %d graph launches, %d checks: want 1 iteration or more, and no negative number",
			p.Iterations, p.Warmups, p.Launches, p.Checks)
	case p.Root < AllRoots || p.Root >= n:
		return nil, fmt.Errorf("root %d: want a rank from 0 to %d", p.Root, n-1)
	case p.Register < unregistered || p.Register > windows:
		return nil, fmt.Errorf("registration %d: want 0 for none, 1 for the communicator or 2 for windows", p.Register)
	}
	for _, name := range p.Operations {
		o, err := find(name)
		if err != nil {
			return nil, err
		}
		if err := o.fits(n); err != nil {
			if p.Fitting {
				continue
			}
			return nil, err
		}
		each, err := p.sweep(o, sizes, n)
		if err != nil {
			return nil, err
		}
		list = append(list, each...)
	}
	if len(list) == 0 {
		return nil, fmt.Errorf("sizes up to %d bytes have less than one element for each of %d ranks: want larger sizes", p.MaxBytes, n)
	}
	return list, nil
}

// sweep returns the rows of an operation of a complete plan. It skips sizes with less than
// one element for each rank.
func (p *Plan) sweep(o *operation, sizes []int, n int) (list []job, err error) {
	roots, reductions := []int{p.Root}, []string{moves.String()}
	if !o.rooted {
		roots = []int{-1}
	} else if p.Root == AllRoots {
		roots = roots[:0]
		for i := range n {
			roots = append(roots, i)
		}
	}
	if o.reduces {
		reductions = p.Reductions
	}
	for _, name := range p.Types {
		types, err := ParseTypes(name)
		if err != nil {
			return nil, err
		}
		t := types[0]
		for _, r := range reductions {
			for _, root := range roots {
				for _, bytes := range sizes {
					l := o.layout(bytes/t.Size(), n, max(16/t.Size(), 1))
					if l.param > 0 {
						list = append(list, job{o, t, reduction(slices.Index(reductionNames[:], r)), root, l})
					}
				}
			}
		}
	}
	return list, nil
}
