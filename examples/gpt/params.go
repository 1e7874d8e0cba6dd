package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/gochorus/chorus/checkpoint"
	"github.com/gochorus/chorus/examples/gpt/kernels"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

type floats = memory.Slice[float32]

// params are the parameters of a model on one device and their gradients, as the model sees
// them. T is the type of the matrix products.
type params[T kernels.Float] struct {
	shapes        []shape
	values, grads []floats
	loss          floats // the sum of the micro-batches

	// copies are the parameters as T. If T is float32, they are the parameters themselves. narrow
	// has the gradients as T if the ranks reduce them so; otherwise it is nil.
	copies, narrow []memory.Slice[T]

	owned []interface{ Close() error }
}

// newReplicated allocates parameters and gradients that the rank has as a
// whole, and draws the initial parameters, which are PyTorch's for the seed.
// Each of the lists is one memory, and the loss is the last of the gradients,
// so that the reducer adds it up over the ranks, too.
func newReplicated[T kernels.Float](s *stream.Stream, of *preset) (p *params[T], flat floats, err error) {
	p = &params[T]{shapes: of.shapes()}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	lens := p.lens()
	if flat, p.values, err = memory.MakeFlat[float32](s, lens...); err != nil {
		return p, flat, err
	}
	p.owned = append(p.owned, flat)
	gradFlat, grads, err := memory.MakeFlat[float32](s, append(lens, 1)...)
	if err != nil {
		return p, flat, err
	}
	p.owned = append(p.owned, gradFlat)
	p.grads, p.loss = grads[:len(lens)], grads[len(lens)]
	if err := errors.Join(gradFlat.Zero(s), flat.Zero(s)); err != nil {
		return p, flat, err
	}
	err = draw(s, of, func(i int) (floats, func() error, error) { return p.values[i], func() error { return nil }, nil })
	return p, flat, errors.Join(err, p.narrowed(s, lens))
}

func (p *params[T]) lens() (lens []int) {
	for _, x := range p.shapes {
		lens = append(lens, x.len())
	}
	return lens
}

// draw draws the initial parameters, as torch.normal_(0, deviation) after torch.manual_seed(seed)
// in this order. room returns memory for a parameter, and what to do afterwards.
func draw(s *stream.Stream, of *preset, room func(i int) (floats, func() error, error)) error {
	g := rng.New(s.Device(), seed)
	for i, x := range of.shapes() {
		to, done, err := room(i)
		if err != nil {
			return err
		}
		switch {
		case x.in > 0:
			err = rng.Normal(g, s, to, 0, of.deviation(x))
		case strings.HasSuffix(x.name, ".w"):
			err = to.CopyFrom(s, slices.Repeat([]float32{1}, x.len()))
		default:
			err = to.Zero(s)
		}
		if err := errors.Join(err, done()); err != nil {
			return err
		}
	}
	return nil
}

// narrowed allocates the copies of the parameters.
func (p *params[T]) narrowed(s *stream.Stream, lens []int) error {
	if same, ok := any(p.values).([]memory.Slice[T]); ok {
		p.copies = same
		return nil
	}
	flat, parts, err := memory.MakeFlat[T](s, lens...)
	if err != nil {
		return err
	}
	p.owned, p.copies = append(p.owned, flat), parts
	return nil
}

// rounds reports whether the copies are rounded.
func rounds[T kernels.Float]() bool { return memory.DTypeOf[T]() != memory.Float32 }

// refresh rounds the parameters to their copies, which the optimiser does
// later.
func (p *params[T]) refresh(s *stream.Stream) error {
	if !rounds[T]() {
		return nil
	}
	for i := range p.copies {
		if err := tensor.Copy(s, matrix(p.copies[i], p.copies[i].Len()), matrix(p.values[i], p.values[i].Len())); err != nil {
			return err
		}
	}
	return nil
}

// optimised returns the parameters for the optimiser.
func (p *params[T]) optimised() []trained {
	var list []trained
	for i, x := range p.shapes {
		o := trained{Param: optim.Of(p.values[i], p.grads[i]), shape: x, len: x.len()}
		if rounds[T]() {
			o.Copy = matrix(p.copies[i], x.len())
		}
		list = append(list, o)
	}
	return list
}

// trained is a run of the elements of a parameter, which the rank's optimiser updates.
type trained struct {
	optim.Param
	shape
	start, len int
	piece      int // of a shard, from 1 on; 0 if it is not of a shard
}

// part returns the part of a checkpoint for the values or a state of the run.
func (x *trained) part(name string, data tensor.Tensor) checkpoint.Part {
	switch {
	case len(data.Shape()) == 0: // the step
		return checkpoint.Part{Name: name, Data: data}
	case x.piece > 0:
		return checkpoint.Part{Name: name, Data: data, Shape: x.dims(), Start: x.start, Flat: true}
	}
	whole, err := data.View(x.dims()...)
	if err != nil {
		panic(err) // parameters and states are contiguous
	}
	return checkpoint.Part{Name: name, Data: whole}
}

// groups returns the groups of the optimiser, and the parameters in their order. Only matrices
// decay, unless the preset says otherwise.
func (p *preset) groups(list []trained) (groups []optim.Group, ordered []trained) {
	decay := func(yes bool) {
		var g optim.Group
		for _, x := range list {
			if yes == (p.decayAll || x.in > 0) {
				g.Params, ordered = append(g.Params, x.Param), append(ordered, x)
			}
		}
		if !yes {
			g.WeightDecay = new(0.)
		}
		if len(g.Params) > 0 {
			groups = append(groups, g)
		}
	}
	decay(true)
	decay(false)
	return groups, ordered
}

// norm returns the parameters of a layer norm, or their gradients.
func norm(from []floats, i int) kernels.Norm { return kernels.Norm{W: from[i], B: from[i+1]} }

func (p *params[T]) close() error {
	var errs []error
	for _, x := range p.owned {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}

// matrix returns memory as a tensor; the shape must fit.
func matrix[T memory.Element](x memory.Slice[T], shape ...int) tensor.Tensor {
	t, err := tensor.Of(x, shape...)
	if err != nil {
		panic(err)
	}
	return t
}
