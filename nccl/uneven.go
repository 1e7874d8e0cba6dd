package nccl

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// AllGatherV is AllGather of parts of different lengths: counts has the number of
// elements of each rank, the same on all of them; 0 is a rank that has none. dst
// has room for all parts, by rank; in place, src is the rank's part of dst. It is
// one group of broadcasts. Collective.
func AllGatherV[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], counts []int) error {
	o := operation{request: request{kind: allGatherV, dtype: memory.DTypeOf[T]()}, comm: c, stream: s, sends: counts, recvs: counts}
	return issueUneven(&o, dst, src)
}

// ReduceScatterV is ReduceScatter into parts of different lengths: counts has the
// number of elements that each rank gets, the same on all of them; 0 is a rank
// that gets none. src has all parts, by rank; in place, dst is the rank's part of
// src. It is one group of reductions. Collective.
func ReduceScatterV[T memory.Element](c *Communicator, s *stream.Stream, dst, src memory.Slice[T], counts []int, op Op) error {
	o := operation{request: request{kind: reduceScatterV, dtype: memory.DTypeOf[T](), op: op}, comm: c, stream: s, sends: counts, recvs: counts}
	return issueUneven(&o, dst, src)
}

// AllToAllV is AllToAll of parts of different lengths: sends has the number of
// elements of src that go to each rank, recvs the number that comes from each
// into dst, both by rank. What a rank sends to another is what that one receives;
// 0 is nothing. dst and src do not overlap. It is one group of sends and receives.
// Collective.
func AllToAllV[T memory.Element](c *Communicator, s *stream.Stream, dst memory.Slice[T], recvs []int, src memory.Slice[T], sends []int) error {
	o := operation{request: request{kind: allToAllV, dtype: memory.DTypeOf[T]()}, comm: c, stream: s, sends: sends, recvs: recvs}
	return issueUneven(&o, dst, src)
}

// issueUneven is issue for an operation whose parts have lengths of their own.
func issueUneven[T memory.Element](o *operation, dst, src memory.Slice[T]) error {
	if err := checkUneven(o, dst, src); err != nil {
		return spoil(err)
	}
	return o.run()
}

// checkUneven checks such an operation, and finds out what it counts.
func checkUneven[T memory.Element](o *operation, dst, src memory.Slice[T]) error {
	if err := o.begin(); err != nil {
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
	o.n = max(in, out)
	switch o.kind {
	case allGatherV:
		out = o.sends[o.comm.rank]
	case reduceScatterV:
		in = o.recvs[o.comm.rank]
	case allToAllV:
		if me := o.comm.rank; o.sends[me] != o.recvs[me] {
			return fmt.Errorf("nccl: %s on rank %d of %d: the rank sends itself %d elements and receives %d: want as many",
				o.kind, me, o.comm.size, o.sends[me], o.recvs[me])
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

// total adds up the elements of all ranks.
func (o *operation) total(what string, counts []int) (sum int, err error) {
	c := o.comm
	if len(counts) != c.size {
		return 0, fmt.Errorf("nccl: %s on rank %d of %d: %d numbers of elements: want one for each rank", o.kind, c.rank, c.size, len(counts))
	}
	for rank, n := range counts {
		if n < 0 || n > math.MaxInt-sum {
			return 0, fmt.Errorf("nccl: %s on rank %d of %d: it %s %d elements at rank %d: that is no length", o.kind, c.rank, c.size, what, n, rank)
		}
		sum += n
	}
	return sum, nil
}
