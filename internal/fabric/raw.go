package fabric

import (
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Raw is a collective whose operands somebody else has checked, as their addresses.
type Raw struct {
	Kind      Kind
	Algorithm Algorithm // of AllReduces
	DType     memory.DType
	Op        Op
	Root      int
	Count     int    // elements of one rank's part; of all for AllReduces and Broadcasts
	Dst, Src  uint64 // Src is not used where the rank only receives
}

// operation returns what is known of x, alike on all ranks, and whether there is a
// kernel with room for it.
func (x *Raw) operation(r *Rank) (o operation, ok bool) {
	o = operation{kind: x.Kind, algorithm: x.Algorithm, op: x.Op, root: x.Root, dtype: x.DType, bytes: x.Count * x.DType.Size(), dst: x.Dst, src: x.Src}
	if o.reduces() {
		if o.format = formatOf[x.DType]; o.format < 0 || x.Op < 0 || x.Op >= ops {
			return o, false
		}
	}
	_, ok = o.fits(r)
	return o, ok && r.ranks > 1 && o.bytes > 0
}

// Takes reports whether Enqueue carries out such a collective. Addresses do not
// matter, so the answer is the same on all ranks.
func (r *Rank) Takes(x *Raw) bool {
	_, ok := x.operation(r)
	return ok
}

// Enqueue enqueues a collective that Takes has agreed to on s, a stream of the rank's
// device. Destination and source may be in place as NCCL has it, but those of AllToAlls
// share no memory.
func (r *Rank) Enqueue(s *stream.Stream, x *Raw) error {
	if err := r.Err(); err != nil {
		return err
	}
	o, ok := x.operation(r)
	if !ok {
		return r.errorf(x.Kind.String(), "%d elements of %s: there is no kernel for that", x.Count, x.DType)
	}
	if o.src == 0 {
		o.src = o.dst
	}
	if err := r.enqueue(s, &o); err != nil {
		return r.errorf(x.Kind.String(), "%w", err)
	}
	return nil
}
