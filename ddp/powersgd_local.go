package ddp

import (
	"errors"
	"math"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

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

// back makes the summed P orthonormal, and computes Q = Mᵀ·P of this rank.
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

// orthonormal makes rows of equal length orthonormal, by Gram-Schmidt in two passes. What the
// first pass leaves of a row that depends on earlier rows is rounding error, made a unit vector
// of any direction. The second pass corrects it. If less than a tenth is left then, the row
// depends on the others: it becomes a row of fresh, or zeros if there is none. Without
// fresh, numbers that are not finite make rows NaN.
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

// normalize divides a row by its norm. A row whose squared norm is at most least has no direction.
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
