package nccl

import (
	"fmt"
	"github.com/gochorus/chorus/internal/flight"
	"math"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// AllGatherV is AllGather of parts of different lengths: counts has the number of elements
// of each rank, which may be 0, and must be the same on all ranks. dst has room for all
// parts, by rank; in place, src is the rank's part of dst. It is one group of broadcasts.
// Collective.
func AllGatherV[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], counts []int) error {
	c, b, config := communicatorOf(on)
	o := operation{Op: flight.Op{Request: flight.Request{Kind: flight.AllGatherV, DType: memory.DTypeOf[T]()}, Stream: s}, comm: c, config: config, sends: counts, recvs: counts}
	return issueUneven(b, &o, dst, src)
}

// ReduceScatterV is ReduceScatter into parts of different lengths: counts has the number
// of elements for each rank, which may be 0, and must be the same on all ranks. src has
// all parts, by rank; in place, dst is the rank's part of src. It is one group of
// reductions. Collective.
func ReduceScatterV[T memory.Element](on Issuer, s *stream.Stream, dst, src memory.Slice[T], counts []int, op Op) error {
	c, b, config := communicatorOf(on)
	o := operation{Op: flight.Op{Request: flight.Request{Kind: flight.ReduceScatterV, DType: memory.DTypeOf[T](), Reduction: flight.Reduction(op)}, Stream: s}, comm: c, config: config, sends: counts, recvs: counts}
	return issueUneven(b, &o, dst, src)
}

// AllToAllV is AllToAll of parts of different lengths: sends has the number of elements of
// src to send to each rank, recvs the number of elements to receive in dst from each rank,
// both by rank. Both ranks of a pair must agree on the number, which may be 0. dst and src
// must not overlap. It is one group of sends and receives. Collective.
func AllToAllV[T memory.Element](on Issuer, s *stream.Stream, dst memory.Slice[T], recvs []int, src memory.Slice[T], sends []int) error {
	c, b, config := communicatorOf(on)
	o := operation{Op: flight.Op{Request: flight.Request{Kind: flight.AllToAllV, DType: memory.DTypeOf[T]()}, Stream: s}, comm: c, config: config, sends: sends, recvs: recvs}
	return issueUneven(b, &o, dst, src)
}

// issueUneven is issue for an operation with parts of different lengths.
func issueUneven[T memory.Element](b *Batch, o *operation, dst, src memory.Slice[T]) error {
	if err := checkUneven(o, dst, src); err != nil {
		return b.markRefused(err)
	}
	return o.enqueueOrAdd(b)
}

// checkUneven validates such an operation, and computes its counts.
func checkUneven[T memory.Element](o *operation, dst, src memory.Slice[T]) error {
	if err := o.validate(); err != nil {
		return err
	}
	out, err := o.total("sends", o.sends)
	if err != nil {
		return err
	}
	in, err := o.total("receives", o.recvs)
	if err != nil {
		return err
	}
	o.N = max(in, out)
	switch o.Kind {
	case flight.AllGatherV:
		out = o.sends[o.comm.rank]
	case flight.ReduceScatterV:
		in = o.recvs[o.comm.rank]
	case flight.AllToAllV:
		if me := o.comm.rank; o.sends[me] != o.recvs[me] {
			return fmt.Errorf("nccl: %s on rank %d of %d: the rank sends itself %d elements and receives %d: want as many",
				o.Kind, me, o.comm.size, o.sends[me], o.recvs[me])
		}
	}
	if err := checkSlice(o, "destination", dst, in); err != nil {
		return err
	}
	if err := checkSlice(o, "source", src, out); err != nil {
		return err
	}
	o.dst, o.src = operandOf(dst), operandOf(src)
	return nil
}

// total returns the sum of the elements of all ranks.
func (o *operation) total(what string, counts []int) (sum int, err error) {
	c := o.comm
	if len(counts) != c.size {
		return 0, fmt.Errorf("nccl: %s on rank %d of %d: %d numbers of elements: want one for each rank", o.Kind, c.rank, c.size, len(counts))
	}
	for rank, n := range counts {
		if n < 0 || n > math.MaxInt-sum {
			return 0, fmt.Errorf("nccl: %s on rank %d of %d: it %s %d elements at rank %d: want 0 or more, and a sum without overflow", o.Kind, c.rank, c.size, what, n, rank)
		}
		sum += n
	}
	return sum, nil
}
