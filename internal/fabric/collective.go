package fabric

import (
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// AllReduceConfig are the options of AllReduce. All ranks have the same.
type AllReduceConfig struct {
	Algorithm Algorithm
}

// AllReduce enqueues the reduction of src over all ranks into dst on all ranks, the
// same bits on each (ncclAllReduce). dst and src have the same length and may be the
// same, but not overlap otherwise. The elements are numbers; float16 and bfloat16 are
// reduced as float32 and rounded once. With bool and the floats of 8 bits the error
// matches errors.ErrUnsupported. What is too long is an error too; see Limits.
//
// What is wrong with the arguments is found before anything is enqueued. Without
// elements nothing is.
func AllReduce[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], op Op, cfg *AllReduceConfig) error {
	o := operation{kind: AllReduces, op: op}
	if cfg != nil {
		o.algorithm = cfg.Algorithm
	}
	return issue(r, s, &o, dst, src)
}

// AllGather enqueues the concatenation of src of all ranks, by rank, into dst on all
// ranks (ncclAllGather). dst is Ranks times as long as src; in place, src is the
// rank's part of dst. The elements are of any type.
func AllGather[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(r, s, &operation{kind: AllGathers}, dst, src)
}

// ReduceScatter enqueues the reduction of src over all ranks, of which each rank gets
// its part into dst (ncclReduceScatter). src is Ranks times as long as dst; in place,
// dst is the rank's part of src. The elements are as those of AllReduce.
func ReduceScatter[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], op Op) error {
	return issue(r, s, &operation{kind: ReduceScatters, op: op}, dst, src)
}

// Broadcast enqueues the copy of src on rank root into dst on all ranks
// (ncclBroadcast). src is not used elsewhere and may be the zero Slice there; on the
// root it may be dst. The elements are of any type.
func Broadcast[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	return issue(r, s, &operation{kind: Broadcasts, root: root}, dst, src)
}

// AllToAll enqueues the exchange of parts: part j of src goes to part i of dst on rank
// j, where i is this rank (ncclAlltoAll). dst and src have the same length, a multiple
// of Ranks, and do not overlap. The elements are of any type.
func AllToAll[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T]) error {
	return issue(r, s, &operation{kind: AllToAlls}, dst, src)
}
