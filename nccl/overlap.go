package nccl

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// checkOverlap refuses buffers that share memory in another way than in place.
func (o *operation) checkOverlap() error {
	size := cudadrv.DevicePtr(o.dtype.Size())
	d, s := o.dst.ptr, o.src.ptr
	if d+cudadrv.DevicePtr(o.dst.len)*size <= s || s+cudadrv.DevicePtr(o.src.len)*size <= d {
		return nil
	}
	if k := &kinds[o.kind]; d == s && k.dst == one && k.src == one {
		return nil
	}
	return o.checkInPlace()
}

// checkInPlace refuses buffers that overlap, unless the one is the rank's part of the other.
func (o *operation) checkInPlace() error {
	if o.dst.len == 0 || o.src.len == 0 {
		return nil
	}
	part := cudadrv.DevicePtr(o.part() * o.dtype.Size())
	switch k := &kinds[o.kind]; {
	case k.dst == all && k.src == one && o.src.ptr == o.dst.ptr+part,
		k.dst == one && k.src == all && o.dst.ptr == o.src.ptr+part:
		return nil
	}
	return fmt.Errorf("nccl: %s on rank %d of %d: the destination and the source overlap: %s",
		o.kind, o.comm.rank, o.comm.size, o.kind.inPlace())
}

// inPlace says how the two buffers of an operation may share memory.
func (k kind) inPlace() string {
	switch d := &kinds[k]; {
	case d.dst == one && d.src == one:
		return "want the same memory or none in common"
	case d.dst == all && d.src == one:
		return "want the source to be the rank's part of the destination, or none in common"
	case d.dst == one && d.src == all:
		return "want the destination to be the rank's part of the source, or none in common"
	}
	return "want none in common"
}

// part is where the rank's part begins in a buffer that has those of all ranks.
func (o *operation) part() (at int) {
	if o.sends == nil {
		return o.comm.rank * o.n
	}
	for _, n := range o.sends[:o.comm.rank] {
		at += n
	}
	return at
}

// An extent is the memory that a transfer of a group reads or writes.
type extent struct {
	o          *operation
	begin, end cudadrv.DevicePtr
}

// checkOverlap refuses transfers of one rank of which one receives into what another one
// sends or receives into: they run side by side. Collectives of one buffer may be in a
// group, as benchmarks have them.
func (g *group) checkOverlap() error {
	for i := range g.ops {
		if o := &g.ops[i]; kinds[o.kind].peer && o.n > 0 {
			g.extents = append(g.extents, o.extent())
		}
	}
	if x := g.extents; len(x) < 2 || len(x) == 2 && (x[0].end <= x[1].begin || x[1].end <= x[0].begin) {
		return nil // as an exchange has it
	}
	slices.SortFunc(g.extents, func(a, b extent) int { return cmp.Compare(a.begin, b.begin) })
	for i, a := range g.extents {
		for _, b := range g.extents[i+1:] {
			if b.begin >= a.end {
				break
			}
			if a.o.comm == b.o.comm && (a.o.kind == recv || b.o.kind == recv) && !g.toItself(a, b) {
				return a.o.overlapping(b.o)
			}
		}
	}
	return nil
}

// toItself reports whether two transfers are the two ends of what a rank sends to itself in
// place, as the root of a gather made of transfers does.
func (g *group) toItself(a, b extent) bool {
	me := a.o.comm.rank
	return a.begin == b.begin && a.end == b.end && a.o.root == me && b.o.root == me && a.o.kind != b.o.kind &&
		g.turn(a.o) == g.turn(b.o)
}

// turn is how many transfers like it a rank has in the group before one: ends of the same
// turn belong together.
func (g *group) turn(o *operation) (n int) {
	for i := range g.ops {
		switch x := &g.ops[i]; {
		case x == o:
			return n
		case x.comm == o.comm && x.kind == o.kind && x.root == o.root:
			n++
		}
	}
	return n
}

// extent is the memory of a transfer, which has one buffer.
func (o *operation) extent() extent {
	x := &o.dst
	if o.kind == send {
		x = &o.src
	}
	return extent{o, x.ptr, x.ptr + cudadrv.DevicePtr(x.len*o.dtype.Size())}
}

// overlapping is the error of two transfers that cannot run side by side.
func (o *operation) overlapping(with *operation) error {
	return fmt.Errorf("nccl: %s with rank %d and %s with rank %d, on rank %d of %d: their buffers overlap and they are in one group, where they run side by side: want no memory in common: %w",
		o.kind, o.root, with.kind, with.root, o.comm.rank, o.comm.size, ErrorInvalidUsage)
}
