package ddp

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
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

// A powerLocal is the memory of PowerSGD for a bucket on a local rank. P and Q are stored
// transposed: their columns are rows of memory.
type powerLocal[T float32 | float64] struct {
	s             *stream.Stream
	flat          memory.Slice[T] // the bucket
	errs          memory.Slice[T] // the error of the last step; during a step, the gradients with it
	p, q, fresh   memory.Slice[T] // fresh are drawn numbers, for Q
	square, coefs memory.Slice[T] // of a row: its squared norm, and the products with later rows
	views         []powerViews    // by matrix
	drawn         bool            // the first Q
}

// powerViews are a matrix and its factors as tensors.
type powerViews struct{ m, p, q tensor.Tensor }

func (l *powerLocal[T]) open(b *Bucket, x *power[T], local, p, q int) (err error) {
	l.s = b.Group.Stream(local)
	if l.flat, err = tensor.Slice[T](b.Flat[local]); err != nil {
		return err
	}
	if len(x.matrices) == 0 {
		return nil
	}
	feedback := l.flat.Len()
	if x.cfg.NoErrorFeedback {
		feedback = 0
	}
	for _, z := range []struct {
		to *memory.Slice[T]
		n  int
	}{{&l.errs, feedback}, {&l.p, p}, {&l.q, q}, {&l.fresh, q}, {&l.square, 1}, {&l.coefs, x.cfg.Rank}} {
		if *z.to, err = zeroed[T](l.s, z.n); err != nil {
			return err
		}
	}
	for i := range x.matrices {
		v, err := l.view(&x.matrices[i])
		if err != nil {
			return err
		}
		l.views = append(l.views, v)
	}
	return nil
}

func (l *powerLocal[T]) view(x *matrix) (v powerViews, err error) {
	if v.m, err = tensor.Of(l.flat.Slice(x.at, x.at+x.n*x.m), x.n, x.m); err != nil {
		return v, err
	}
	if v.p, err = tensor.Of(l.p.Slice(x.p, x.p+x.rank*x.n), x.rank, x.n); err != nil {
		return v, err
	}
	v.q, err = tensor.Of(l.q.Slice(x.q, x.q+x.rank*x.m), x.rank, x.m)
	return v, err
}

// project adds the error of the last step, and computes P = M·Q of this rank.
func (l *powerLocal[T]) project(x *power[T]) error {
	if !l.drawn || x.cfg.NoWarmStart {
		if err := errors.Join(l.draw(x), memory.Copy(l.s, l.q, l.fresh)); err != nil {
			return err
		}
		l.drawn = true
	}
	for i := range x.matrices {
		k := &x.matrices[i]
		if !x.cfg.NoErrorFeedback {
			m, e := l.flat.Slice(k.at, k.at+k.n*k.m), l.errs.Slice(k.at, k.at+k.n*k.m)
			if err := launch(powerKernels.add, l.s, kernel.Out(m), kernel.In(m), kernel.In(e)); err != nil {
				return err
			}
			if err := memory.Copy(l.s, e, m); err != nil {
				return err
			}
		}
		if err := l.orthonormal(l.q.Slice(k.q, k.q+k.rank*k.m), l.fresh.Slice(k.q, k.q+k.rank*k.m), k.rank); err != nil {
			return err
		}
		v := &l.views[i]
		if err := tensor.MatMul(l.s, v.p, v.q, v.m.T(), nil); err != nil {
			return err
		}
	}
	return nil
}

// back orthonormalizes the summed P, and computes Q = Mᵀ·P of this rank.
func (l *powerLocal[T]) back(x *power[T]) error {
	for i := range x.matrices {
		k, v := &x.matrices[i], &l.views[i]
		if err := l.orthonormal(l.p.Slice(k.p, k.p+k.rank*k.n), memory.Slice[T]{}, k.rank); err != nil {
			return err
		}
		if err := tensor.MatMul(l.s, v.q, v.p, v.m, nil); err != nil {
			return err
		}
	}
	return nil
}

// restore computes the result M = P·Qᵀ, and the error of this rank. All ranks have the same
// result, so each rank has sent one part.
func (l *powerLocal[T]) restore(x *power[T], ranks int) error {
	for i := range x.matrices {
		k, v := &x.matrices[i], &l.views[i]
		if err := tensor.MatMul(l.s, v.m, v.p.T(), v.q, nil); err != nil {
			return err
		}
		if x.cfg.NoErrorFeedback {
			continue
		}
		m, e := l.flat.Slice(k.at, k.at+k.n*k.m), l.errs.Slice(k.at, k.at+k.n*k.m)
		if err := launch(powerKernels.rest, l.s, kernel.Out(e), kernel.In(e), kernel.In(m), kernel.Set("ranks", ranks)); err != nil {
			return err
		}
	}
	return nil
}

// draw fills fresh with rows of normal numbers, divided by their norms, which are the same on all
// ranks.
func (l *powerLocal[T]) draw(x *power[T]) error {
	host, err := memory.MakePinned[T](l.s.Device(), l.fresh.Len())
	if err != nil {
		return err
	}
	for _, k := range x.matrices {
		r := rand.New(rand.NewPCG(x.cfg.Seed, uint64(x.steps)<<32|uint64(uint32(k.number))))
		for row := range slices.Chunk(host.Data()[k.q:k.q+k.rank*k.m], k.m) {
			drawUnit(r, row)
		}
	}
	return errors.Join(l.fresh.CopyFromPinned(l.s, host), host.Close())
}

// drawUnit fills a row with normal numbers, divided by their norm.
func drawUnit[T float32 | float64](r *rand.Rand, row []T) {
	numbers, square := make([]float64, len(row)), 0.0
	for i := range numbers {
		numbers[i] = r.NormFloat64()
		square += numbers[i] * numbers[i]
	}
	for i, x := range numbers {
		row[i] = T(x / math.Sqrt(square))
	}
}

// orthonormal orthonormalizes rows of equal length, by Gram-Schmidt in two
// passes. What the first pass leaves of a row that depends on earlier rows is
// rounding error, made a unit vector of any direction, which the second pass
// corrects. If less than a tenth is left then, the row depends on the others:
// it becomes a row of fresh, or zeros if there is none. Without fresh, numbers
// that are not finite make rows NaN.
func (l *powerLocal[T]) orthonormal(rows, fresh memory.Slice[T], count int) error {
	n := rows.Len() / count
	for _, least := range []float64{tiny, 0.01}[:min(count, 2)] {
		for i := range count {
			row := rows.Slice(i*n, (i+1)*n)
			if err := l.normalize(row, fresh, i*n, least); err != nil {
				return err
			}
			if err := l.subtract(row, rows.Slice((i+1)*n, count*n), count-i-1); err != nil {
				return err
			}
		}
	}
	return nil
}

// normalize divides a row by its norm, unless the row has no direction because
// its squared norm is at most least.
func (l *powerLocal[T]) normalize(row, fresh memory.Slice[T], at int, least float64) error {
	x, err := tensor.Of(row, 1, row.Len())
	if err != nil {
		return err
	}
	square, err := tensor.Of(l.square, 1, 1)
	if err != nil {
		return err
	}
	if err := tensor.MatMul(l.s, square, x, x.T(), nil); err != nil {
		return err
	}
	if fresh.Buffer() == nil {
		return launch(powerKernels.direction, l.s, kernel.Out(row), kernel.In(row), kernel.In(l.square), kernel.Set("least", least))
	}
	return launch(powerKernels.directionOr, l.s, kernel.Out(row), kernel.In(row), kernel.In(l.square), kernel.In(fresh.Slice(at, at+row.Len())),
		kernel.Set("least", least))
}

// subtract removes the direction of a row from later rows.
func (l *powerLocal[T]) subtract(row, later memory.Slice[T], count int) error {
	if count == 0 {
		return nil
	}
	x, err := tensor.Of(row, 1, row.Len())
	if err != nil {
		return err
	}
	rest, err := tensor.Of(later, count, row.Len())
	if err != nil {
		return err
	}
	coefs, err := tensor.Of(l.coefs.Slice(0, count), count, 1)
	if err != nil {
		return err
	}
	if err := tensor.MatMul(l.s, coefs, rest, x.T(), nil); err != nil {
		return err
	}
	return tensor.MatMul(l.s, rest, coefs, x, &tensor.MatMulConfig{Alpha: new(-1.0), Beta: new(1.0)})
}

// Close frees the memory of all local ranks.
func (x *power[T]) Close() error {
	var errs []error
	for _, l := range x.locals {
		for _, m := range []memory.Slice[T]{l.errs, l.p, l.q, l.fresh, l.square, l.coefs} {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// powerKernels live as long as the process.
var powerKernels = struct {
	add, rest, direction, directionOr func() (*kernel.Elementwise, error)
}{
	add: elementwise("x + y", []string{"x", "y"}, nil, func(in, out []float64) { out[0] = in[0] + in[1] }),
	rest: elementwise("(x - y / ranks) - (x - y / ranks) == T(0) ? x - y / ranks : T(0)", []string{"x", "y"}, []kernel.Operand{kernel.Set("ranks", 1)},
		func(in, out []float64) {
			if out[0] = in[0] - in[1]/in[2]; out[0]-out[0] != 0 {
				out[0] = 0
			}
		}),
	direction: elementwise("square <= least ? T(0) : x / sqrt(square) * (square - square + T(1))", []string{"x", "square"}, []kernel.Operand{kernel.Set("least", tiny)},
		func(in, out []float64) {
			if out[0] = 0; !(in[1] <= in[2]) {
				out[0] = in[0] / math.Sqrt(in[1]) * (in[1] - in[1] + 1)
			}
		}),
	directionOr: elementwise("square > least && square - square == T(0) ? x / sqrt(square) : fresh", []string{"x", "square", "fresh"}, []kernel.Operand{kernel.Set("least", tiny)},
		func(in, out []float64) {
			if out[0] = in[2]; in[1] > in[3] && in[1]-in[1] == 0 {
				out[0] = in[0] / math.Sqrt(in[1])
			}
		}),
}

// tiny is a squared norm that counts as 0: the square of a smaller float32 vanishes.
const tiny = 1e-36

func elementwise(code string, inputs []string, defaults []kernel.Operand, floats func(in, out []float64)) func() (*kernel.Elementwise, error) {
	return sync.OnceValues(func() (*kernel.Elementwise, error) {
		return kernel.NewElementwise(code, &kernel.ElementwiseConfig{Inputs: inputs, Defaults: defaults, Floats: floats})
	})
}

func launch(of func() (*kernel.Elementwise, error), s *stream.Stream, args ...kernel.Operand) error {
	f, err := of()
	if err != nil {
		return err
	}
	return f.Launch(s, args...)
}
