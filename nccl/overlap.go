package nccl

import (
	"cmp"
	"fmt"
	"github.com/gochorus/chorus/internal/flight"
	"slices"

	"github.com/gochorus/chorus/internal/cudadrv"
)

// checkOverlap refuses buffers that overlap, unless the operation is in place.
func (o *operation) checkOverlap() error {
	size := cudadrv.DevicePtr(o.DType.Size())
	d, s := o.dst.ptr, o.src.ptr
	if d+cudadrv.DevicePtr(o.dst.len)*size <= s || s+cudadrv.DevicePtr(o.src.len)*size <= d {
		return nil
	}
	if k := &flight.Kinds[o.Kind]; d == s && k.Dst == flight.One && k.Src == flight.One {
		return nil
	}
	return o.checkInPlace()
}

// checkInPlace refuses buffers that overlap, unless one is the rank's part of the other.
func (o *operation) checkInPlace() error {
	if o.dst.len == 0 || o.src.len == 0 {
		return nil
	}
	part := cudadrv.DevicePtr(o.part() * o.DType.Size())
	switch k := &flight.Kinds[o.Kind]; {
	case k.Dst == flight.All && k.Src == flight.One && o.src.ptr == o.dst.ptr+part,
		k.Dst == flight.One && k.Src == flight.All && o.dst.ptr == o.src.ptr+part:
		return nil
	}
	return fmt.Errorf("nccl: %s on rank %d of %d: the destination and the source overlap: %s",
		o.Kind, o.comm.rank, o.comm.size, inPlace(o.Kind))
}

// inPlace describes how the two buffers of an operation may overlap.
func inPlace(k flight.Kind) string {
	switch d := &flight.Kinds[k]; {
	case d.Dst == flight.One && d.Src == flight.One:
		return "want the same memory or none in common"
	case d.Dst == flight.All && d.Src == flight.One:
		return "want the source to be the rank's part of the destination, or none in common"
	case d.Dst == flight.One && d.Src == flight.All:
		return "want the destination to be the rank's part of the source, or none in common"
	}
	return "want none in common"
}

// part returns the index of the rank's part in a buffer with the parts of all ranks.
func (o *operation) part() (at int) {
	if o.sends == nil {
		return o.comm.rank * o.N
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

// checkOverlap refuses two operations of one rank that share memory which one of them writes,
// because NCCL executes the operations of a group concurrently, in any order. Collectives of a
// single rank are copies on their streams, so those on one stream run in order.
func (g *group) checkOverlap() error {
	if g.single() && !flight.Kinds[g.ops[0].Kind].Peer {
		return nil
	}
	for i := range g.ops {
		o := &g.ops[i]
		g.addExtent(o, &o.dst, true)
		g.addExtent(o, &o.src, false)
	}
	if x := g.extents; len(x) < 2 || len(x) == 2 && (x[0].end <= x[1].begin || x[1].end <= x[0].begin) {
		return nil // the usual exchange
	}
	slices.SortFunc(g.extents, func(a, b extent) int { return cmp.Compare(a.begin, b.begin) })
	for i, a := range g.extents {
		for _, b := range g.extents[i+1:] {
			if b.begin >= a.end {
				break
			}
			if a.o != b.o && a.o.comm == b.o.comm && (a.written || b.written) && !inOrder(a.o, b.o) && !g.toItself(a, b) {
				return g.errOverlap(a.o, b.o)
			}
		}
	}
	return nil
}

// inOrder reports whether two operations of a rank are collectives of a single rank on one stream.
func inOrder(a, b *operation) bool {
	return a.comm.size == 1 && a.Stream == b.Stream && !flight.Kinds[a.Kind].Peer && !flight.Kinds[b.Kind].Peer
}

// addExtent adds the buffer of an operand, unless it is empty.
func (g *group) addExtent(o *operation, x *operand, written bool) {
	if x.len > 0 {
		g.extents = append(g.extents, extent{o, x.ptr, x.ptr + cudadrv.DevicePtr(x.len*o.DType.Size()), written})
	}
}

// toItself reports whether two transfers are the send and the receive of one in-place
// transfer of a rank to itself, as in a gather made of transfers.
func (g *group) toItself(a, b extent) bool {
	me := a.o.comm.rank
	return a.begin == b.begin && a.end == b.end && a.o.Root == me && b.o.Root == me && a.o.Kind != b.o.Kind &&
		flight.Kinds[a.o.Kind].Peer && flight.Kinds[b.o.Kind].Peer && g.transferIndex(a.o) == g.transferIndex(b.o)
}

// transferIndex returns the number of similar transfers of the rank that precede o in the group.
// Sends and receives with the same number match.
func (g *group) transferIndex(o *operation) (n int) {
	for i := range g.ops {
		switch x := &g.ops[i]; {
		case x == o:
			return n
		case x.comm == o.comm && x.Kind == o.Kind && x.Root == o.Root:
			n++
		}
	}
	return n
}

// errOverlap returns the error of two operations that cannot run concurrently.
func (g *group) errOverlap(a, b *operation) error {
	return fmt.Errorf("nccl: %s and %s, on rank %d of %d: their buffers overlap, and NCCL runs them concurrently because they are in one group: issue them one after the other: %w",
		g.nameInGroup(a), g.nameInGroup(b), a.comm.rank, a.comm.size, ErrorInvalidUsage)
}

// nameInGroup describes an operation so that it differs from others in its group.
func (g *group) nameInGroup(o *operation) string {
	name := o.Kind.String()
	if flight.Kinds[o.Kind].Peer {
		name = fmt.Sprintf("%s with rank %d", o.Kind, o.Root)
	}
	for i := range g.ops {
		if &g.ops[i] == o && i < len(g.places) && g.places[i].String() != "" {
			name += " (" + g.places[i].String() + ")"
		}
	}
	return name
}
