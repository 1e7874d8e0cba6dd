package checkpoint

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/gds/safetensors"
	"github.com/gochorus/chorus/internal/dims"
	"github.com/gochorus/chorus/memory"
)

// Info describes a tensor of a checkpoint.
type Info struct {
	Name  string
	DType memory.DType // Invalid where device memory has no such type
	Shape []int        // not to be changed
	File  string       // the path of its file

	Format safetensors.DType // the type as the file names it
}

// Bytes returns the size of the tensor in its file.
func (i Info) Bytes() int64 {
	n := int64(i.Format.Bits())
	for _, d := range i.Shape {
		n *= int64(d)
	}
	return n / 8
}

// A Range is a run of indices of a dimension.
type Range struct{ Start, Len int }

// A Plan returns the placement of each tensor of a checkpoint. It must be the same on all ranks.
type Plan func(t Info) Placement

// A Placement says which part of a tensor each rank gets. The zero Placement is Replicate.
type Placement struct {
	what string // for errors
	dim  int
	cut  func(rank, ranks, size int) Range // nil is everything on all ranks
	rank int                               // of Own
	skip bool
}

// Replicate gives all ranks the whole tensor. It is read once, in parts, and the
// ranks exchange the parts.
func Replicate() Placement { return Placement{} }

// Shard cuts the tensor along a dimension and gives each rank one part, by the rule of
// torch.chunk. The length of a part is the length of the dimension divided by the number of
// ranks, rounded up. The last parts are shorter or empty. A negative dimension counts from the end.
func Shard(dim int) Placement {
	return Placement{what: "shard", dim: dim, cut: chunkOf}
}

// Own gives the whole tensor to one rank, and nothing to the others.
func Own(rank int) Placement {
	return Placement{what: "own", rank: rank, cut: func(r, _, size int) Range {
		if r != rank {
			return Range{}
		}
		return Range{0, size}
	}}
}

// Skip gives the tensor to no rank.
func Skip() Placement { return Placement{skip: true} }

// Slice gives each rank the range of a dimension that the function of returns for it. Ranges
// may overlap, for example if ranks share the heads of an attention, and need not cover the
// dimension.
func Slice(dim int, of func(rank, ranks, size int) Range) Placement {
	return Placement{what: "slice", dim: dim, cut: of}
}

func chunkOf(rank, ranks, size int) Range {
	part := size / ranks
	if size%ranks > 0 { // size may be near the largest int
		part++
	}
	start := min(rank*part, size)
	return Range{start, min(part, size-start)}
}

// A division is a placement of one tensor, resolved: dimension dim has width indices,
// outer times, of inner elements each, and rank r gets the range ranges[r].
type division struct {
	dim                 int
	outer, width, inner int
	ranges              []Range
	owner               int // the only rank that has it, or -1
}

// resolve returns the division of a tensor of the given shape by p.
func (p Placement) resolve(shape []int, ranks int) (division, error) {
	c := division{outer: 1, width: 1, inner: 1, ranges: make([]Range, ranks), owner: -1}
	if p.cut == nil || p.what == "own" {
		err := p.resolveWhole(&c, shape)
		return c, err
	}
	err := p.resolveDim(&c, shape)
	return c, err
}

// resolveWhole resolves a placement that gives a rank everything or nothing.
func (p Placement) resolveWhole(c *division, shape []int) error {
	c.dim = -1
	for _, n := range shape {
		c.width *= n
	}
	ranks := len(c.ranges)
	if p.what == "own" {
		if p.rank < 0 || p.rank >= ranks {
			return fmt.Errorf("the plan gives it to rank %d, but there are %d", p.rank, ranks)
		}
		c.owner = p.rank
	}
	for r := range c.ranges {
		if c.ranges[r] = (Range{0, c.width}); p.cut != nil {
			c.ranges[r] = p.cut(r, ranks, c.width)
		}
	}
	return nil
}

// resolveDim resolves a placement that cuts a dimension.
func (p Placement) resolveDim(c *division, shape []int) error {
	dim, err := dims.Wrap(p.dim, len(shape))
	if err == nil && len(shape) == 0 {
		err = fmt.Errorf("a tensor of one element has no dimension")
	}
	if err != nil {
		return fmt.Errorf("the plan's %s along dimension %d of shape %v: %w", p.what, p.dim, shape, err)
	}
	c.dim, c.width = dim, shape[dim]
	for i, n := range shape {
		if i < dim {
			c.outer *= n
		} else if i > dim {
			c.inner *= n
		}
	}
	for r := range c.ranges {
		g := p.cut(r, len(c.ranges), c.width)
		if g.Start < 0 || g.Len < 0 || g.Len > c.width-g.Start {
			return fmt.Errorf("the plan gives rank %d indices %d to %d of dimension %d, which has %d", r, g.Start, g.Start+g.Len, dim, c.width)
		}
		c.ranges[r] = g
	}
	return nil
}

// shapeOf returns the shape of a rank's part of a tensor of the given shape.
func (c *division) shapeOf(rank int, shape []int) []int {
	part := append([]int(nil), shape...)
	if c.dim >= 0 {
		part[c.dim] = c.ranges[rank].Len
	}
	return part
}

// elements returns how many elements a rank gets.
func (c *division) elements(rank int) int { return c.outer * c.ranges[rank].Len * c.inner }

// holds reports whether a rank gets a part, which may be empty.
func (c *division) holds(rank int) bool { return c.owner < 0 || c.owner == rank }

// flat merges the dimensions behind the cut one with it. If the parts are contiguous, it also
// merges the dimensions before it: then one dimension of all elements is cut.
func (c *division) flat() division {
	if c.outer == 0 || c.width == 0 || c.inner == 0 { // the others may be any numbers
		return division{dim: c.dim, outer: 1, inner: 1, ranges: make([]Range, len(c.ranges)), owner: c.owner}
	}
	f := division{dim: c.dim, outer: c.outer, width: c.width * c.inner, inner: 1, ranges: make([]Range, len(c.ranges)), owner: c.owner}
	whole := true
	for r, g := range c.ranges {
		f.ranges[r] = Range{g.Start * c.inner, g.Len * c.inner}
		whole = whole && (g.Len == 0 || g.Len == c.width)
	}
	if whole {
		f.outer, f.width = 1, c.outer*f.width
		for r := range f.ranges {
			f.ranges[r].Len *= c.outer // everything or nothing
		}
	}
	return f
}

// everywhere reports whether all ranks get everything.
func (c *division) everywhere() bool {
	for _, g := range c.ranges {
		if g.Len != c.width {
			return false
		}
	}
	return true
}

// gap returns the first index of the dimension that no rank gets, if there is one.
func (c *division) gap() (index int, is bool) {
	ranges := slices.Clone(c.ranges)
	slices.SortFunc(ranges, func(a, b Range) int { return cmp.Compare(a.Start, b.Start) })
	for _, g := range ranges {
		if g.Start > index {
			break
		}
		index = max(index, g.Start+g.Len)
	}
	return index, index < c.width
}
