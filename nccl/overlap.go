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

// An extent is the memory that an operation of a group reads or writes.
type extent struct {
	o          *operation
	begin, end cudadrv.DevicePtr
	written    bool
}

// checkOverlap refuses transfers of one rank that share memory with another operation of it
// which one of the two writes: they run side by side. Collectives of one buffer may be in a
// group, as benchmarks have them.
func (g *group) checkOverlap() error {
	transfers := false
	for i := range g.ops {
		transfers = transfers || kinds[g.ops[i].kind].peer
	}
	if !transfers {
		return nil
	}
	for i := range g.ops {
		o := &g.ops[i]
		g.addExtent(o, &o.dst, true)
		g.addExtent(o, &o.src, false)
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
			if a.o.comm == b.o.comm && (a.written || b.written) && (kinds[a.o.kind].peer || kinds[b.o.kind].peer) && !g.toItself(a, b) {
				return a.o.overlapping(b.o)
			}
		}
	}
	return nil
}

// addExtent takes a buffer of an operation among the extents, if it has one.
func (g *group) addExtent(o *operation, x *operand, written bool) {
	if x.len > 0 {
		g.extents = append(g.extents, extent{o, x.ptr, x.ptr + cudadrv.DevicePtr(x.len*o.dtype.Size()), written})
	}
}

// toItself reports whether two transfers are the two ends of what a rank sends to itself in
// place, as the root of a gather made of transfers does.
func (g *group) toItself(a, b extent) bool {
	me := a.o.comm.rank
	return a.begin == b.begin && a.end == b.end && a.o.root == me && b.o.root == me && a.o.kind != b.o.kind &&
		kinds[a.o.kind].peer && kinds[b.o.kind].peer && g.turn(a.o) == g.turn(b.o)
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

// overlapping is the error of two operations that cannot run side by side.
func (o *operation) overlapping(with *operation) error {
	return fmt.Errorf("nccl: %s and %s, on rank %d of %d: their buffers overlap and they are in one group, where they run side by side: want no memory in common: %w",
		o.inGroup(), with.inGroup(), o.comm.rank, o.comm.size, ErrorInvalidUsage)
}

// inGroup tells an operation from the others of its group.
func (o *operation) inGroup() string {
	if kinds[o.kind].peer {
		return fmt.Sprintf("%s with rank %d", o.kind, o.root)
	}
	return o.kind.String()
}
