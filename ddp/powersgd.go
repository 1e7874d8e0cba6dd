package ddp

import (
	"errors"
	"fmt"
	"io"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// PowerSGD is a [Hook] that sends each gradient of two or more dimensions as the product of two
// thin matrices (torch's powerSGD_hook, arXiv 1905.13727). A gradient whose first dimension has
// n elements, and whose other dimensions have m, becomes (n+m)·Rank numbers instead of n·m. The
// zero PowerSGD has torch's defaults. It keeps its memory in the buckets, so one value serves
// any number of reducers; it must not change while they are open. In each step of a bucket:
//
//  1. Add the error of the last step to the gradients M.
//  2. Make the columns of Q orthonormal. P = M·Q, summed over the ranks.
//  3. Make the columns of P orthonormal. Q = Mᵀ·P, summed over the ranks. The result is P·Qᵀ.
//  4. The error is the gradient minus the rank's share of the result.
//
// Gradients of one dimension, or whose product is not small enough, and buckets of float16 and
// bfloat16 are all-reduced as they are. Gradients need a shape: give NewReducer tensors.
// With ReducerConfig.Compress all buckets have 16 bits, so nothing is sent as a product.
//
// The host waits for nothing. The first Q is drawn on the host from Seed, and is the same on all
// ranks. Columns are made orthonormal by Gram-Schmidt in two passes. A column of P that depends on
// the others becomes zeros, and a column of Q is drawn again. A gradient whose rank as a matrix is
// below Rank is exact but for rounding. A gradient that is infinite or NaN on one rank makes
// the result NaN on all ranks, and leaves no trace in the error or in Q.
// A graph can capture a step after the first compressed one; with NoWarmStart it repeats its Q.
// Errors and Q are not part of checkpoints: after a restart they begin with zeros and Seed.
type PowerSGD struct {
	// Rank is the number of columns of P and Q (matrix_approximation_rank). Default 1.
	Rank int
	// StartStep is the number of steps that are all-reduced first (start_powerSGD_iter).
	// Default 1000; negative means none. Rebuild begins to count again.
	StartStep int
	// MinCompression is the least n·m/((n+m)·Rank) of a gradient that is compressed
	// (min_compression_rate). Default 2.
	MinCompression float64
	// NoErrorFeedback drops the error of each step (use_error_feedback=False).
	NoErrorFeedback bool
	// NoWarmStart draws a new Q in each step (warm_start=False), instead of the last one.
	NoWarmStart bool
	// Seed is the seed of Q (random_seed).
	Seed uint64
}

var _ Hook = (*PowerSGD)(nil)

func (p *PowerSGD) check() error {
	if p == nil {
		return errors.New("the hook is a nil *PowerSGD: give &PowerSGD{}, or no hook for an all-reduce")
	}
	if p.Rank < 0 || p.MinCompression < 0 {
		return fmt.Errorf("PowerSGD of rank %d with a compression of %v: want positive numbers", p.Rank, p.MinCompression)
	}
	return nil
}

// filled returns the options with their defaults.
func (p *PowerSGD) filled() PowerSGD {
	c := *p
	if c.Rank == 0 {
		c.Rank = 1
	}
	if c.StartStep == 0 {
		c.StartStep = 1000
	}
	if c.MinCompression == 0 {
		c.MinCompression = 2
	}
	return c
}

// String returns the options, which must be the same on all ranks.
func (p *PowerSGD) String() string {
	c := p.filled()
	return fmt.Sprintf("PowerSGD of rank %d from step %d, compression %v, without error feedback %v, without warm start %v, seed %d",
		c.Rank, c.StartStep, c.MinCompression, c.NoErrorFeedback, c.NoWarmStart, c.Seed)
}

// Reduce implements [Hook].
func (p *PowerSGD) Reduce(b *Bucket) ([]tensor.Tensor, error) {
	s, ok := b.State.(powerState)
	if !ok {
		s = p.newState(b)
		b.State = s
	}
	return nil, s.reduce(b)
}

// A powerState is the state of a bucket.
type powerState interface {
	reduce(b *Bucket) error
	io.Closer
}

func (p *PowerSGD) newState(b *Bucket) powerState {
	switch b.Flat[0].DType() {
	case memory.Float32:
		return &power[float32]{cfg: p.filled()}
	case memory.Float64:
		return &power[float64]{cfg: p.filled()}
	}
	return uncompressed{}
}

// uncompressed is the state of a bucket whose type has no products.
type uncompressed struct{}

func (uncompressed) reduce(b *Bucket) error { return b.AllReduce() }
func (uncompressed) Close() error           { return nil }

// A matrix is a gradient that is compressed, as n by m elements of a bucket, and its factors.
type matrix struct {
	at, n, m, rank int
	p, q           int // its first elements in the memory of all P and Q
	number         int // of the gradient
}

// A power compresses a bucket.
type power[T float32 | float64] struct {
	cfg      PowerSGD
	steps    int
	matrices []matrix
	others   []comm.Shards[T] // the elements that are all-reduced, by local rank
	batch    *comm.Batch
	ps, qs   comm.Shards[T] // by local rank: the transposed P and Q of all matrices
	locals   []powerLocal[T]
}

func (x *power[T]) reduce(b *Bucket) error {
	x.steps++
	if x.steps <= x.cfg.StartStep {
		return b.AllReduce()
	}
	if x.batch == nil {
		if err := x.open(b); err != nil {
			err = errors.Join(err, x.Close())
			*x = power[T]{cfg: x.cfg, steps: x.steps} // the next step tries again
			return err
		}
	}
	if len(x.matrices) == 0 {
		return b.AllReduce()
	}
	each := func(fn func(l *powerLocal[T]) error) error {
		for i := range x.locals {
			if err := fn(&x.locals[i]); err != nil {
				return fmt.Errorf("ddp: PowerSGD: %w", err)
			}
		}
		return nil
	}
	if err := each(func(l *powerLocal[T]) error { return l.project(x) }); err != nil {
		return err
	}
	if err := x.sumOthers(b.Group); err != nil {
		return err
	}
	if err := comm.AllReduce(b.Group, comm.Sum, x.ps...); err != nil {
		return err
	}
	if err := each(func(l *powerLocal[T]) error { return l.back(x) }); err != nil {
		return err
	}
	if err := comm.AllReduce(b.Group, comm.Sum, x.qs...); err != nil {
		return err
	}
	return each(func(l *powerLocal[T]) error { return l.restore(x, b.Group.Size()) })
}

// sumOthers all-reduces the elements that are not compressed, as one batch.
func (x *power[T]) sumOthers(g *comm.Group) error {
	if len(x.others) == 0 {
		return nil
	}
	x.batch.Reset()
	for _, flats := range x.others {
		if err := comm.AllReduce(x.batch, comm.Sum, flats...); err != nil {
			return err
		}
	}
	return x.batch.Enqueue()
}

// open chooses the matrices of the bucket and allocates their factors.
func (x *power[T]) open(b *Bucket) error {
	p, q, end := 0, 0, 0
	var others [][2]int
	for j, grad := range b.Grads[0] {
		n, m, rank := x.factors(grad)
		if rank == 0 {
			continue
		}
		at := (grad.Offset() - b.Flat[0].Offset()) / grad.DType().Size()
		others = append(others, [2]int{end, at})
		end = at + grad.Len()
		x.matrices = append(x.matrices, matrix{at: at, n: n, m: m, rank: rank, p: p, q: q, number: b.Params[j]})
		p, q = p+n*rank, q+m*rank
	}
	others = append(others, [2]int{end, b.Flat[0].Len()})
	x.locals = make([]powerLocal[T], len(b.Flat))
	for i := range x.locals {
		if err := x.locals[i].open(b, x, i, p, q); err != nil {
			return fmt.Errorf("ddp: PowerSGD: %w", err)
		}
		x.ps, x.qs = append(x.ps, x.locals[i].p), append(x.qs, x.locals[i].q)
	}
	for _, o := range others {
		if o[0] == o[1] {
			continue
		}
		var flats comm.Shards[T]
		for i := range x.locals {
			flats = append(flats, x.locals[i].flat.Slice(o[0], o[1]))
		}
		x.others = append(x.others, flats)
	}
	x.batch = b.Group.NewBatch()
	return nil
}

// factors returns the sides of a gradient as a matrix, and the rank of its product. The rank is 0
// if the gradient is not compressed.
func (x *power[T]) factors(grad tensor.Tensor) (n, m, rank int) {
	shape := grad.Shape()
	if len(shape) < 2 || grad.Len() == 0 {
		return 0, 0, 0
	}
	n = shape[0]
	m = grad.Len() / n
	rank = min(n, m, x.cfg.Rank)
	if float64((n+m)*rank)*x.cfg.MinCompression >= float64(n*m) {
		return 0, 0, 0
	}
	return n, m, rank
}
