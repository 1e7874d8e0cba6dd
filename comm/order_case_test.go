package comm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// An orderCase checks the reductions of one buffer, on the local ranks of a group. All processes
// of the group run the same cases.
type orderCase[T memory.Element, A orderNumber] struct {
	ctx   context.Context
	g     *comm.Group
	kit   orderKit[T, A]
	op    comm.Op
	block int
	rng   *rand.Rand // the same on all processes
	in    [][]T      // of all ranks
	want  []T
	src   comm.Shards[T]
	dst   comm.Shards[T]
}

// runOrder checks one buffer of n elements in all ways.
func runOrder[T memory.Element, A orderNumber](ctx context.Context, g *comm.Group, kit orderKit[T, A], op comm.Op, n int, seed uint64) (err error) {
	x := &orderCase[T, A]{ctx: ctx, g: g, kit: kit, op: op, block: g.Deterministic().Block, rng: rand.New(rand.NewPCG(seed, uint64(n)))}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%d elements of %s, op %s, %d ranks in blocks of %d, strategy %s, seed %d: %w", n, memory.DTypeOf[T](), op, g.Size(), x.block, g.Strategy(), seed, err)
		}
	}()
	if err := x.make(n); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, x.src.Close(), x.dst.Close()) }()
	for _, check := range []func() error{x.whole, x.pieces, x.batch, x.graph, x.scatter, x.scatterUneven, x.root, x.factors} {
		if err := check(); err != nil {
			return err
		}
	}
	return nil
}

func (x *orderCase[T, A]) make(n int) (err error) {
	for range x.g.Size() {
		data := make([]T, n)
		for i := range data {
			data[i] = x.kit.random(x.rng)
		}
		x.in = append(x.in, data)
	}
	x.want = x.model(x.op, x.in)
	if x.src, err = comm.Make[T](x.g, n); err != nil {
		return err
	}
	if x.dst, err = comm.Make[T](x.g, n); err != nil {
		return err
	}
	for i, r := range localRanks(x.g) {
		err = errors.Join(err, x.src[i].CopyFrom(x.g.Stream(i), x.in[r]))
	}
	return err
}

// model returns the reduction of all elements.
func (x *orderCase[T, A]) model(op comm.Op, in [][]T) []T {
	out, one := make([]T, len(in[0])), make([]T, len(in))
	for i := range out {
		for r := range in {
			one[r] = in[r][i]
		}
		out[i] = x.kit.reduce(op, x.block, one)
	}
	return out
}

// fill copies the inputs to the destinations.
func (x *orderCase[T, A]) fill() (err error) {
	for i := range x.dst {
		err = errors.Join(err, memory.Copy(x.g.Stream(i), x.dst[i], x.src[i]))
	}
	return err
}

// equal compares n elements of the destination of local rank i with the wanted ones.
func (x *orderCase[T, A]) equal(what string, i int, want []T) error {
	if err := x.g.Wait(x.ctx); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	got := make([]T, len(want))
	if err := x.dst[i].Slice(0, len(want)).CopyTo(x.g.Stream(i), got); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if bytes.Equal(rawBytes(got), rawBytes(want)) {
		return nil
	}
	for k := range got {
		if !bytes.Equal(rawBytes(got[k:k+1]), rawBytes(want[k:k+1])) {
			return fmt.Errorf("%s: element %d of %d of local rank %d has the bits %x, want %x", what, k, len(want), i, rawBytes(got[k:k+1]), rawBytes(want[k:k+1]))
		}
	}
	return nil
}

// all compares the destinations of all local ranks with want.
func (x *orderCase[T, A]) all(what string, want []T) error {
	for i := range x.dst {
		if err := x.equal(what, i, want); err != nil {
			return err
		}
	}
	return nil
}

// cuts returns random positions that divide the buffer into calls.
func (x *orderCase[T, A]) cuts() (spans [][2]int) {
	n := len(x.want)
	for at := 0; at < n; {
		to := n
		if len(spans) < 5 {
			to = min(n, at+1+x.rng.IntN(n))
		}
		spans = append(spans, [2]int{at, to})
		at = to
	}
	return spans
}

// reduceCuts issues one all-reduce for each cut.
func (x *orderCase[T, A]) reduceCuts(on comm.Issuer, cuts [][2]int) error {
	for _, c := range cuts {
		part := make(comm.Shards[T], len(x.dst))
		for i := range part {
			part[i] = x.dst[i].Slice(c[0], c[1])
		}
		if err := comm.AllReduce(on, x.op, part...); err != nil {
			return err
		}
	}
	return nil
}

func (x *orderCase[T, A]) whole() error {
	if err := errors.Join(x.fill(), comm.AllReduce(x.g, x.op, x.dst...)); err != nil {
		return err
	}
	return x.all("all-reduce", x.want)
}

func (x *orderCase[T, A]) pieces() error {
	if err := errors.Join(x.fill(), x.reduceCuts(x.g, x.cuts())); err != nil {
		return err
	}
	return x.all("all-reduces of pieces", x.want)
}

func (x *orderCase[T, A]) batch() error {
	cuts := x.cuts()
	err := errors.Join(x.fill(), x.g.Batch(func(b *comm.Batch) error {
		return errors.Join(b.SetDeterministic(), x.reduceCuts(b, cuts))
	}))
	if err != nil {
		return err
	}
	return x.all("batch of all-reduces of pieces", x.want)
}

func (x *orderCase[T, A]) graph() (err error) {
	cuts := x.cuts()
	exec, err := graph.Capture(x.g.Streams(), func() error { return errors.Join(x.fill(), x.reduceCuts(x.g, cuts)) }, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, exec.Close()) }()
	for range 2 {
		for i := range x.dst {
			if err := x.dst[i].Zero(x.g.Stream(i)); err != nil {
				return err
			}
			if i > 0 {
				if err := x.g.Stream(0).WaitStream(x.g.Stream(i)); err != nil {
					return err
				}
			}
		}
		if err := exec.Launch(x.g.Stream(0)); err != nil {
			return err
		}
		for i := 1; i < len(x.dst); i++ {
			if err := x.g.Stream(i).WaitStream(x.g.Stream(0)); err != nil {
				return err
			}
		}
		if err := x.all("all-reduces of pieces in a graph", x.want); err != nil {
			return err
		}
	}
	return nil
}

func (x *orderCase[T, A]) scatter() error {
	size := x.g.Size()
	n := len(x.want) / size
	if n == 0 {
		return nil
	}
	for _, inPlace := range []bool{false, true} {
		dst, src := make(comm.Shards[T], len(x.dst)), make(comm.Shards[T], len(x.dst))
		for i, r := range localRanks(x.g) {
			dst[i], src[i] = x.dst[i].Slice(0, n), x.src[i].Slice(0, n*size)
			if inPlace {
				dst[i], src[i] = x.dst[i].Slice(r*n, (r+1)*n), x.dst[i].Slice(0, n*size)
			}
		}
		if err := errors.Join(x.fill(), comm.ReduceScatter(x.g, x.op, dst, src)); err != nil {
			return err
		}
		for i, r := range localRanks(x.g) {
			if inPlace {
				if err := memory.Copy(x.g.Stream(i), x.dst[i].Slice(0, n), dst[i]); r > 0 && err != nil {
					return err
				}
			}
			if err := x.equal(fmt.Sprint("reduce-scatter, in place ", inPlace), i, x.want[r*n:(r+1)*n]); err != nil {
				return err
			}
		}
	}
	return nil
}

func (x *orderCase[T, A]) scatterUneven() error {
	counts, from := make([]int, x.g.Size()), make([]int, x.g.Size()+1)
	for left, r := len(x.want), 0; r < len(counts); r++ {
		if counts[r] = x.rng.IntN(left + 1); r == len(counts)-1 {
			counts[r] = left
		}
		left -= counts[r]
		from[r+1] = from[r] + counts[r]
	}
	dst := make(comm.Shards[T], len(x.dst))
	for i, r := range localRanks(x.g) {
		dst[i] = x.dst[i].Slice(0, counts[r])
	}
	if err := comm.ReduceScatterV(x.g, x.op, dst, x.src, counts); err != nil {
		return err
	}
	for i, r := range localRanks(x.g) {
		if err := x.equal(fmt.Sprint("reduce-scatter of parts ", counts), i, x.want[from[r]:from[r+1]]); err != nil {
			return err
		}
	}
	return nil
}

func (x *orderCase[T, A]) root() error {
	root := x.rng.IntN(x.g.Size())
	if err := comm.ReduceTo(x.g, root, x.op, x.dst, x.src); err != nil {
		return err
	}
	for i, r := range localRanks(x.g) {
		if r == root {
			return x.equal("reduce", i, x.want)
		}
	}
	return nil
}

// factors checks a PreMulSum with a factor of each rank, from the host or from the device.
func (x *orderCase[T, A]) factors() (err error) {
	if x.op != comm.Sum {
		return nil
	}
	factors, in := make([]T, x.g.Size()), make([][]T, x.g.Size())
	for r := range factors {
		factors[r] = x.kit.random(x.rng)
		in[r] = make([]T, len(x.want))
		for i := range in[r] {
			in[r][i] = x.kit.scaled(x.in[r][i:i+1], factors[r:r+1])[0]
		}
	}
	ops, closeAll, err := x.preMulSums(factors, x.rng.IntN(2) == 0)
	defer func() { err = errors.Join(err, closeAll()) }()
	if err != nil {
		return err
	}
	err = errors.Join(x.fill(), routed(x.g, func(b *nccl.Batch) (err error) {
		for i := range ops {
			err = errors.Join(err, nccl.AllReduce(b.On(x.g.Communicator(i)), x.g.Stream(i), x.dst[i], x.dst[i], ops[i].Op()))
		}
		return err
	}))
	if err != nil {
		return err
	}
	return x.all("all-reduce by a PreMulSum", x.model(comm.Sum, in))
}

// preMulSums makes the reductions of the local ranks.
func (x *orderCase[T, A]) preMulSums(factors []T, onDevice bool) (ops []*nccl.PreMulSum, closeAll func() error, err error) {
	var owned []interface{ Close() error }
	closeAll = func() (err error) {
		for _, o := range owned {
			err = errors.Join(err, o.Close())
		}
		return err
	}
	for i, r := range localRanks(x.g) {
		c := x.g.Communicator(i)
		var op *nccl.PreMulSum
		if onDevice {
			at, err := memory.MakeFrom(x.g.Stream(i), factors[r:r+1])
			if err != nil {
				return nil, closeAll, err
			}
			owned = append(owned, at)
			op, err = nccl.NewPreMulSumFrom(c, at)
			if err != nil {
				return nil, closeAll, err
			}
		} else if op, err = nccl.NewPreMulSum(c, factors[r]); err != nil {
			return nil, closeAll, err
		}
		ops, owned = append(ops, op), append(owned, op)
	}
	return ops, closeAll, nil
}
