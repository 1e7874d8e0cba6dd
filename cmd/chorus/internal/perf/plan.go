package perf

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/memory"
)

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

// jobs returns the rows in the order of the table.
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
