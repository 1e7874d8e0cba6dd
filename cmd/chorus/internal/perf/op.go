package perf

import (
	"fmt"
	"strings"
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

// Operations lists all operations in the order of the help.
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
