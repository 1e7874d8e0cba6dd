package ddp

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A wire is the memory of a bucket that is reduced, on all local ranks. Its methods
// enqueue.
type wire[T memory.Element] interface {
	put(s *stream.Stream, local, at int, x memory.Slice[T]) error // x into the wire
	get(s *stream.Stream, local, at int, x memory.Slice[T]) error // the wire into x
	zero(s *stream.Stream, local, at, n int) error
	// choose sets x to the wire's elements if used is not 0, and to old if it is.
	choose(s *stream.Stream, local, at int, x memory.Slice[T], used memory.Slice[uint8], old memory.Slice[T]) error
	reduce(g *comm.Group, op comm.Op) error
	// divide divides the wire by a number, unless put has done that.
	divide(g *comm.Group, by int) error
	scale(g *comm.Group, factors comm.Shards[float32]) error // by local rank, one element each
	tensors() ([]tensor.Tensor, error)
	record(s *stream.Stream, local int) error
	inPlace(local int) bool // the wire is the gradients' own memory
	close() error
}

// newWire allocates a wire of n elements. The gradients' own memory of each
// local rank, wholes, is the wire if they lie in it as on the wire and are not
// converted.
func newWire[T memory.Element](g *comm.Group, c *ReducerConfig, wholes []memory.Slice[T], n int) (wire[T], error) {
	by := 1
	if *c.Op == comm.Avg {
		by = g.Size()
	}
	switch t := memory.DTypeOf[T](); {
	case !compressible(t):
	case c.Compress == memory.Float16:
		return newNarrow[T, memory.Float16Bits](g, n, by)
	case c.Compress == memory.BFloat16:
		return newNarrow[T, memory.BFloat16Bits](g, n, by)
	}
	w := plain[T]{onWire: onWire[T, T]{make(comm.Shards[T], len(wholes))}, own: make([]bool, len(wholes))}
	for i, whole := range wholes {
		if w.flat[i] = whole; whole.Buffer() != nil {
			continue
		}
		var err error
		if w.flat[i], err = zeroed[T](g.Stream(i), n); err != nil {
			return nil, errors.Join(err, w.close())
		}
		w.own[i] = true
	}
	return w, nil
}

// zeroed allocates a wire's memory and fills it with zeros, because the gaps
// between gradients are reduced too, and so must be numbers.
func zeroed[T memory.Element](s *stream.Stream, n int) (memory.Slice[T], error) {
	x, err := memory.Make[T](s, n)
	if err != nil {
		return x, err
	}
	if err := x.Zero(s); err != nil {
		return memory.Slice[T]{}, errors.Join(err, x.Close())
	}
	return x, nil
}

// onWire is the memory of a wire for gradients of type T, by local rank.
type onWire[T, W memory.Element] struct{ flat comm.Shards[W] }

func (w onWire[T, W]) zero(s *stream.Stream, local, at, n int) error {
	return w.flat[local].Slice(at, at+n).Zero(s)
}

func (w onWire[T, W]) choose(s *stream.Stream, local, at int, x memory.Slice[T], used memory.Slice[uint8], old memory.Slice[T]) error {
	return choose(s, x, used, w.flat[local].Slice(at, at+x.Len()), old)
}

func (w onWire[T, W]) scale(g *comm.Group, factors comm.Shards[float32]) error {
	return scale(g, w.flat, factors)
}

func (w onWire[T, W]) tensors() ([]tensor.Tensor, error) { return tensorsOf(w.flat) }

func (w onWire[T, W]) record(s *stream.Stream, local int) error { return w.flat[local].RecordStream(s) }

// plain is a wire of the gradients' type: their own memory, or copies of the gradients.
type plain[T memory.Element] struct {
	onWire[T, T]
	own []bool // by local rank: flat is the wire's own memory, and has copies
}

func (w plain[T]) put(s *stream.Stream, local, at int, x memory.Slice[T]) error {
	if !w.own[local] {
		return nil
	}
	return memory.Copy(s, w.flat[local].Slice(at, at+x.Len()), x)
}

func (w plain[T]) get(s *stream.Stream, local, at int, x memory.Slice[T]) error {
	if !w.own[local] {
		return nil
	}
	return memory.Copy(s, x, w.flat[local].Slice(at, at+x.Len()))
}

func (w plain[T]) reduce(g *comm.Group, op comm.Op) error { return comm.AllReduce(g, op, w.flat...) }

func (w plain[T]) divide(g *comm.Group, by int) error {
	for i, x := range w.flat {
		if err := divide(g.Stream(i), x, x, by); err != nil {
			return err
		}
	}
	return nil
}

func (w plain[T]) inPlace(local int) bool { return !w.own[local] }

func (w plain[T]) close() error {
	var errs []error
	for i, own := range w.own {
		if own {
			errs = append(errs, w.flat[i].Close())
		}
	}
	return errors.Join(errs...)
}

// narrow is a wire of a smaller type. The mean is taken on the way in, because
// the sum may be larger than that type can hold.
type narrow[T, W memory.Element] struct {
	onWire[T, W]
	by int // what gradients are divided by
}

func newNarrow[T, W memory.Element](g *comm.Group, n, by int) (wire[T], error) {
	w := narrow[T, W]{by: by}
	for _, s := range g.Streams() {
		flat, err := zeroed[W](s, n)
		if err != nil {
			return nil, errors.Join(err, w.close())
		}
		w.flat = append(w.flat, flat)
	}
	return w, nil
}

func (w narrow[T, W]) put(s *stream.Stream, local, at int, x memory.Slice[T]) error {
	return divide(s, w.flat[local].Slice(at, at+x.Len()), x, w.by)
}

func (w narrow[T, W]) get(s *stream.Stream, local, at int, x memory.Slice[T]) error {
	return divide(s, x, w.flat[local].Slice(at, at+x.Len()), 1)
}

func (w narrow[T, W]) reduce(g *comm.Group, op comm.Op) error {
	if op == comm.Avg {
		op = comm.Sum
	}
	return comm.AllReduce(g, op, w.flat...)
}

func (w narrow[T, W]) divide(*comm.Group, int) error { return nil }

func (w narrow[T, W]) inPlace(int) bool { return false }

func (w narrow[T, W]) close() error { return w.flat.Close() }

// The kernels live as long as the process.
var (
	divider = sync.OnceValues(func() (*kernel.Elementwise, error) {
		return kernel.NewElementwise("x / by", &kernel.ElementwiseConfig{
			Inputs:   []string{"x"},
			Defaults: []kernel.Operand{kernel.Set("by", 1)},
			Floats:   func(in, out []float64) { out[0] = in[0] / in[1] },
		})
	})
	multiplier = sync.OnceValues(func() (*kernel.Elementwise, error) {
		return kernel.NewElementwise("x * factor", &kernel.ElementwiseConfig{
			Inputs: []string{"x", "factor"},
			Floats: func(in, out []float64) { out[0] = in[0] * in[1] },
		})
	})
	chooser = sync.OnceValues(func() (*kernel.Elementwise, error) {
		return kernel.NewElementwise("used != 0 ? reduced : old", &kernel.ElementwiseConfig{
			Inputs: []string{"used", "reduced", "old"},
			Floats: func(in, out []float64) {
				out[0] = in[2]
				if in[0] != 0 {
					out[0] = in[1]
				}
			},
		})
	})
)

// divide converts x/by to the type of dst, rounding once from the wider of the
// two.
func divide[D, S memory.Element](s *stream.Stream, dst memory.Slice[D], x memory.Slice[S], by int) error {
	f, err := divider()
	if err != nil {
		return err
	}
	if err := f.Launch(s, kernel.Out(dst), kernel.In(x), kernel.Set("by", by)); err != nil {
		return fmt.Errorf("ddp: convert: %w", err)
	}
	return nil
}

// scale multiplies flat memory by a device number for each local rank.
func scale[T memory.Element](g *comm.Group, flat comm.Shards[T], factors comm.Shards[float32]) error {
	f, err := multiplier()
	if err != nil {
		return err
	}
	for i, x := range flat {
		if err := f.Launch(g.Stream(i), kernel.Out(x), kernel.In(x), kernel.In(factors[i])); err != nil {
			return fmt.Errorf("ddp: scale gradients: %w", err)
		}
	}
	return nil
}

func tensorsOf[T memory.Element](flat comm.Shards[T]) ([]tensor.Tensor, error) {
	ts := make([]tensor.Tensor, len(flat))
	for i, x := range flat {
		var err error
		if ts[i], err = tensor.Of(x, x.Len()); err != nil {
			return nil, err
		}
	}
	return ts, nil
}

func choose[T, W memory.Element](s *stream.Stream, x memory.Slice[T], used memory.Slice[uint8], reduced memory.Slice[W], old memory.Slice[T]) error {
	f, err := chooser()
	if err != nil {
		return err
	}
	if err := f.Launch(s, kernel.Out(x), kernel.In(used), kernel.In(reduced), kernel.In(old)); err != nil {
		return fmt.Errorf("ddp: keep unused gradients: %w", err)
	}
	return nil
}

// A verifier finds numbers that are not finite in the buckets of each step, before they are
// reduced.
type verifier struct{ locals []localVerifier }

type localVerifier struct {
	found   memory.Slice[float32] // by bucket: not 0 if there is one
	buckets []*optim.Grads        // nil for types without such numbers
}

func (r *Reducer) newVerifier(buckets []bucket, parts []contents) (*verifier, error) {
	if !r.cfg.Verify {
		return nil, nil
	}
	v := &verifier{locals: make([]localVerifier, r.g.Locals())}
	for i := range v.locals {
		l := &v.locals[i]
		var err error
		if l.found, err = zeroed[float32](r.g.Stream(i), len(parts)); err != nil {
			return nil, errors.Join(err, v.close())
		}
		for k := range parts {
			grads, err := r.numbers(&buckets[k], parts[k], i)
			if err != nil {
				return nil, errors.Join(err, v.close())
			}
			l.buckets = append(l.buckets, grads)
		}
	}
	return v, nil
}

// numbers returns the gradients in the wire of a bucket, without the gaps between them, or nil.
func (r *Reducer) numbers(b *bucket, part contents, local int) (*optim.Grads, error) {
	flat, err := part.tensors()
	if err != nil || !isFloat(flat[local].DType()) {
		return nil, err
	}
	views, err := r.views(b, local, flat[local])
	if err != nil {
		return nil, err
	}
	return optim.NewGrads(r.g.Stream(local), views...)
}

// look enqueues the check of bucket k.
func (v *verifier) look(g *comm.Group, k int) error {
	if v == nil {
		return nil
	}
	for i, l := range v.locals {
		if l.buckets[k] == nil {
			continue
		}
		if err := l.buckets[k].Unscale(g.Stream(i), memory.Slice[float32]{}, l.found.Slice(k, k+1)); err != nil {
			return err
		}
	}
	return nil
}

// forget clears the results of a step that ends with another error.
func (v *verifier) forget(g *comm.Group) error {
	var errs []error
	for i, l := range v.locals {
		errs = append(errs, l.found.Zero(g.Stream(i)))
	}
	return errors.Join(errs...)
}

// result waits for the step, and returns an error that names the gradients with numbers that are
// not finite.
func (v *verifier) result(op string, q *queue) error {
	var ranks []string
	for i, l := range v.locals {
		s, host := q.g.Stream(i), make([]float32, l.found.Len())
		if err := errors.Join(l.found.CopyTo(s, host), l.found.Zero(s)); err != nil {
			return fmt.Errorf("ddp: %s: %w", op, err)
		}
		for k, found := range host {
			if found != 0 {
				ranks = append(ranks, fmt.Sprintf("on rank %d an element of gradients %s", q.rank(i), runs(q.buckets[k].grads)))
			}
		}
	}
	if len(ranks) == 0 {
		return nil
	}
	return fmt.Errorf("ddp: %s: %s is infinite or NaN: skip the update on all ranks", op, strings.Join(ranks, "; "))
}

// verified returns the error of the step, which is the same on all ranks with
// ReducerConfig.Verify.
func (r *Reducer) verified(op string, err error) error {
	if r.verifier == nil || r.g.Err() != nil {
		return err
	}
	if err == nil {
		err = r.verifier.result(op, r.queue)
	} else {
		err = errors.Join(err, r.verifier.forget(r.g))
	}
	return agree(context.Background(), r.g, op, arguments{}, err)
}

func (v *verifier) close() error {
	if v == nil {
		return nil
	}
	var errs []error
	for _, l := range v.locals {
		errs = append(errs, l.found.Close())
		for _, x := range l.buckets {
			errs = append(errs, x.Close())
		}
	}
	return errors.Join(errs...)
}
