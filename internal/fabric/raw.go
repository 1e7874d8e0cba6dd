package fabric

import (
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Raw is a collective with validated operands, given by their addresses.
type Raw struct {
	Kind      flight.Kind
	Algorithm Algorithm // of all-reduces
	DType     memory.DType
	Op        flight.Reduction
	Root      int
	Count     int    // elements of one rank's part; of all for AllReduces and Broadcasts
	Dst, Src  uint64 // Src is not used if the rank only receives
}

// operation returns the properties of x that are the same on all ranks, and whether there
// is a kernel with enough room.
func (x *Raw) operation(r *Rank) (o operation, ok bool) {
	o = operation{kind: x.Kind, algorithm: x.Algorithm, op: x.Op, root: x.Root, dtype: x.DType, bytes: x.Count * x.DType.Size(), dst: x.Dst, src: x.Src}
	if !hasKernel[x.Kind] {
		return o, false
	}
	if o.reduces() {
		if o.format = formatOf[x.DType]; o.format < 0 || x.Op < 0 || x.Op >= flight.NumReductions {
			return o, false
		}
	}
	_, ok = o.fits(r)
	return o, ok && r.ranks > 1 && o.bytes > 0
}

// Takes reports whether Enqueue supports the collective. Addresses do not matter, so the
// answer is the same on all ranks.
func (r *Rank) Takes(x *Raw) bool {
	_, ok := x.operation(r)
	return ok
}

// Enqueue enqueues a collective on s, a stream of the rank's device. Takes must have returned
// true for it. Destination and source may be in place as in NCCL, except for AllToAlls,
// whose operands must not overlap.
func (r *Rank) Enqueue(s *stream.Stream, x *Raw) error {
	if err := r.Err(); err != nil {
		return err
	}
	o, ok := x.operation(r)
	if !ok {
		return r.errorf(x.Kind.Plain(), "%d elements of %s: there is no kernel for that", x.Count, x.DType)
	}
	if o.src == 0 {
		o.src = o.dst
	}
	if err := r.enqueue(s, &o); err != nil {
		return r.errorf(x.Kind.Plain(), "%w", err)
	}
	return nil
}
