package fabric

import (
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// Tests issue collectives of slices by Rank.Enqueue, as package comm does with addresses that package nccl has checked.

// AllReduceConfig are the options of AllReduce. All ranks have the same.
type AllReduceConfig struct {
	Algorithm Algorithm
}

// AllReduce enqueues an all-reduce of slices.
func AllReduce[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], op collective.Reduction, cfg *AllReduceConfig) error {
	if cfg == nil {
		cfg = &AllReduceConfig{}
	}
	return issue(r, s, collective.Request{Kind: collective.AllReduce, Reduction: op, N: src.Len()}, dst, src, cfg.Algorithm)
}

// AllGather enqueues an all-gather of slices.
func AllGather[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], by ...Algorithm) error {
	return issue(r, s, collective.Request{Kind: collective.AllGather, N: src.Len()}, dst, src, by...)
}

// ReduceScatter enqueues a reduce-scatter of slices.
func ReduceScatter[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], op collective.Reduction, by ...Algorithm) error {
	return issue(r, s, collective.Request{Kind: collective.ReduceScatter, Reduction: op, N: dst.Len()}, dst, src, by...)
}

// Broadcast enqueues a broadcast of slices.
func Broadcast[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], root int) error {
	if r.rank != root {
		src = dst
	}
	return issue(r, s, collective.Request{Kind: collective.Broadcast, Root: root, N: dst.Len()}, dst, src)
}

// AllToAll enqueues an all-to-all of slices.
func AllToAll[T memory.Element](r *Rank, s *stream.Stream, dst, src memory.Slice[T], by ...Algorithm) error {
	return issue(r, s, collective.Request{Kind: collective.AllToAll, N: src.Len() / r.ranks}, dst, src, by...)
}

// issue enqueues an operation, by an algorithm if there is one.
func issue[T memory.Element](r *Rank, s *stream.Stream, q collective.Request, dst, src memory.Slice[T], by ...Algorithm) error {
	q.DType = memory.DTypeOf[T]()
	o := &collective.Op{Call: collective.Call{Request: q, Stream: s}, Dst: collective.OperandOf(dst), Src: collective.OperandOf(src)}
	for _, a := range by {
		o.Algorithm = int8(a)
	}
	return r.Enqueue(o)
}
