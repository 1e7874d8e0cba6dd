package comm

import (
	"context"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// ExchangeCounts tells each rank how much the others will send it, such as how many rows of a
// layer of experts. sends has, for each local rank, a number for each rank, and the result has
// the number from each rank. The ranks may also have several numbers for each rank, such as one
// for each expert of a rank; those for rank 0 come first, and all ranks have as many. It is an
// all-to-all of 64-bit integers on the group's streams, and one wait, so it returns when all
// work that was enqueued on the streams before has completed. Collective.
//
// With one number for each rank, the result and sends are the arguments of AllToAllV.
func ExchangeCounts(ctx context.Context, g *Group, sends [][]int) (recvs [][]int, err error) {
	const op = "exchange counts"
	_, b := groupOf(g)
	if err := g.check(op); err != nil {
		return nil, b.markRefused(err)
	}
	n := g.Size()
	if len(sends) > 0 && len(sends[0]) > n && len(sends[0])%n == 0 {
		n = len(sends[0])
	}
	if err := g.checkCounts(op, n, sends); err != nil {
		return nil, b.markRefused(err)
	}
	host := make([]*memory.Pinned[int64], g.Locals())
	out, in := make(Shards[int64], g.Locals()), make(Shards[int64], g.Locals())
	defer func() {
		for i := range host {
			err = errors.Join(err, out[i].Close(), in[i].Close(), host[i].Close())
		}
	}()
	for i := range host {
		if host[i], err = memory.MakePinned[int64](g.Device(i), 2*n); err != nil {
			return nil, err
		}
		for k, c := range sends[i] {
			host[i].Data()[k] = int64(c)
		}
		s := g.Stream(i)
		if out[i], err = memory.Make[int64](s, n); err != nil {
			return nil, err
		}
		if in[i], err = memory.Make[int64](s, n); err != nil {
			return nil, err
		}
		if err := out[i].CopyFromPinned(s, host[i].Slice(0, n)); err != nil {
			return nil, err
		}
	}
	if err := AllToAll(g, in, out); err != nil {
		return nil, err
	}
	for i := range host {
		if err := in[i].CopyToPinned(g.Stream(i), host[i].Slice(n, 2*n)); err != nil {
			return nil, err
		}
	}
	if err := g.Wait(ctx); err != nil {
		return nil, err
	}
	for i := range host {
		list := make([]int, n)
		for k, c := range host[i].Data()[n:] {
			if c < 0 || int64(int(c)) != c {
				return nil, fmt.Errorf("comm: %s: rank %d received %d from rank %d: %w", op, g.Rank()+i, c, k/(n/g.Size()), ErrMismatch)
			}
			list[k] = int(c)
		}
		recvs = append(recvs, list)
	}
	return recvs, nil
}

// checkCounts validates n numbers for each local rank, the same number of them for each rank.
func (g *Group) checkCounts(op string, n int, counts [][]int) error {
	if len(counts) != len(g.members) {
		return badArgument(op, "counts of %d ranks for %d local ranks", len(counts), len(g.members))
	}
	for i, list := range counts {
		if len(list) != n {
			return badArgument(op, "local rank %d has %d counts: want %d for each of %d ranks", i, len(list), n/g.size, g.size)
		}
		for k, c := range list {
			if c < 0 {
				return badArgument(op, "local rank %d has the count %d for rank %d: want 0 or more", i, c, k/(n/g.size))
			}
		}
	}
	return nil
}

// AllToAllV enqueues the exchange of rows between all ranks (torch.distributed.all_to_all_single
// with split sizes). A row is an element of the first dimension. sends and recvs have, for each
// local rank, the number of rows to send to each rank and to receive from each rank; see
// ExchangeCounts. The rows to and from rank 0 come first. Both ranks of a pair must agree on
// the number.
//
// The tensors must be contiguous, with rows of the same shape, and dst[i] must have as many
// rows as recvs[i] in all, and src[i] as sends[i]. Collective.
func (x TensorIssuer) AllToAllV(dst []tensor.Tensor, recvs [][]int, src []tensor.Tensor, sends [][]int) error {
	const op = "all-to-all"
	g, b := groupOf(x.on)
	if err := g.check(op); err != nil {
		return b.markRefused(err)
	}
	row, err := g.checkRows(op, dst, recvs, src, sends)
	if err != nil {
		return b.markRefused(err)
	}
	return opsByType[src[0].DType()].allToAllV(x.on, dst, elements(recvs, row), src, elements(sends, row))
}

// elements returns numbers of elements for numbers of rows.
func elements(rows [][]int, row int) [][]int {
	list := make([][]int, len(rows))
	for i := range rows {
		list[i] = make([]int, len(rows[i]))
		for rank, n := range rows[i] {
			list[i][rank] = n * row
		}
	}
	return list
}

// checkRows validates the operands of AllToAllV, and returns the number of elements of a row.
func (g *Group) checkRows(op string, dst []tensor.Tensor, recvs [][]int, src []tensor.Tensor, sends [][]int) (row int, err error) {
	row = -1
	for _, side := range []struct {
		name   string
		ts     []tensor.Tensor
		counts [][]int
	}{{"destination", dst, recvs}, {"source", src, sends}} {
		if len(side.ts) != len(g.members) {
			return 0, badArgument(op, "%d %s tensors for %d local ranks", len(side.ts), side.name, len(g.members))
		}
		if err := g.checkCounts(op, g.size, side.counts); err != nil {
			return 0, err
		}
		for i, t := range side.ts {
			rows := 0
			for _, n := range side.counts[i] {
				rows += n
			}
			switch {
			case t.Device() != g.Device(i):
				return 0, badArgument(op, "the %s tensor of local rank %d is %v: want one on %s", side.name, i, t, g.Device(i))
			case t.DType() != src[0].DType():
				return 0, badArgument(op, "the %s tensor of local rank %d has elements of %s, the first source of %s", side.name, i, t.DType(), src[0].DType())
			case !t.Contiguous() || t.Dims() == 0:
				return 0, badArgument(op, "the %s tensor of local rank %d, %v, is not a contiguous tensor of rows: copy it before", side.name, i, t)
			case t.Size(0) != rows:
				return 0, badArgument(op, "the %s tensor of local rank %d has %d rows, and its counts have %d", side.name, i, t.Size(0), rows)
			}
			n := 1
			for _, d := range t.Shape()[1:] {
				n *= d
			}
			if row < 0 {
				row = n
			}
			if n != row {
				return 0, badArgument(op, "rows of %d and of %d elements: want the same shape", row, n)
			}
		}
	}
	return row, nil
}

func (typedOpsOf[T]) allToAllV(on Issuer, dst []tensor.Tensor, recvs [][]int, src []tensor.Tensor, sends [][]int) (err error) {
	to, from := make(Shards[T], len(dst)), make(Shards[T], len(src))
	for i := range dst {
		if to[i], err = sliceOf[T](dst[i]); err != nil {
			return err
		}
		if from[i], err = sliceOf[T](src[i]); err != nil {
			return err
		}
	}
	return AllToAllV(on, to, recvs, from, sends)
}
