package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gochorus/chorus/examples/gpt/kernels"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

const (
	layers = 2
	width  = kernels.Width
)

type floats = memory.Slice[float32]

// A shape is a parameter: a matrix that makes in columns to out columns, an embedding, or a
// vector, whose in is 0.
type shape struct {
	name    string
	out, in int
}

func (p shape) len() int { return p.out * max(p.in, 1) }

// shapes are the parameters, in PyTorch's order of drawing them.
var shapes = func() []shape {
	all := []shape{{"tok", kernels.Vocab, width}, {"pos", kernels.Context, width}}
	for l := range layers {
		for _, p := range []shape{
			{"ln1.w", width, 0}, {"ln1.b", width, 0}, {"qkv", 3 * width, width}, {"proj", width, width},
			{"ln2.w", width, 0}, {"ln2.b", width, 0}, {"up", 4 * width, width}, {"down", width, 4 * width},
		} {
			p.name = fmt.Sprintf("%d.%s", l, p.name)
			all = append(all, p)
		}
	}
	return append(all, shape{"ln.w", width, 0}, shape{"ln.b", width, 0}, shape{"head", kernels.Vocab, width})
}()

// params are the parameters of a model on one device and their gradients. Each of the two is
// one memory. T is the type of the matrix products.
type params[T kernels.Float] struct {
	flat, gradFlat floats
	values, grads  []floats
	// loss is the last of grads, so that the reducer adds it up over the ranks, too.
	loss floats

	// copies are the parameters as T, and narrow has room for their gradients as T. If T is
	// float32, copies are the parameters themselves, and narrow is nil.
	copyFlat, narrowFlat memory.Slice[T]
	copies, narrow       []memory.Slice[T]
}

// newParams draws the initial parameters, which are PyTorch's for the seed.
func newParams[T kernels.Float](s *stream.Stream, seed uint64) (p *params[T], err error) {
	p = &params[T]{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	var lens []int
	for _, x := range shapes {
		lens = append(lens, x.len())
	}
	if p.flat, p.values, err = memory.MakeFlat[float32](s, lens...); err != nil {
		return p, err
	}
	if p.gradFlat, p.grads, err = memory.MakeFlat[float32](s, append(lens, 1)...); err != nil {
		return p, err
	}
	p.loss = p.grads[len(lens)]
	if err := p.gradFlat.Zero(s); err != nil {
		return p, err
	}
	return p, errors.Join(p.draw(s, seed), p.narrowed(s, lens))
}

// draw fills the parameters: torch.randn(shape) * 0.02 after torch.manual_seed(seed).
func (p *params[T]) draw(s *stream.Stream, seed uint64) error {
	g := rng.New(s.Device(), seed)
	if err := p.flat.Zero(s); err != nil {
		return err
	}
	for i, x := range shapes {
		var err error
		switch {
		case x.in > 0:
			err = rng.Normal(g, s, p.values[i], 0, 0.02)
		case strings.HasSuffix(x.name, ".w"):
			err = p.values[i].CopyFrom(s, slices.Repeat([]float32{1}, x.len()))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// narrowed allocates the copies of the parameters.
func (p *params[T]) narrowed(s *stream.Stream, lens []int) (err error) {
	if same, ok := any(p.values).([]memory.Slice[T]); ok {
		p.copies = same
		return nil
	}
	if p.copyFlat, p.copies, err = memory.MakeFlat[T](s, lens...); err != nil {
		return err
	}
	p.narrowFlat, p.narrow, err = memory.MakeFlat[T](s, lens...)
	return err
}

// refresh rounds the parameters to their copies. Later the optimiser does it.
func (p *params[T]) refresh(s *stream.Stream) error {
	for i := range p.narrow {
		if err := tensor.Copy(s, matrix(p.copies[i], shapes[i].len()), matrix(p.values[i], shapes[i].len())); err != nil {
			return err
		}
	}
	return nil
}

// list returns the parameters for the optimiser.
func (p *params[T]) list() []optim.Param {
	var list []optim.Param
	for i := range shapes {
		x := optim.Of(p.values[i], p.grads[i])
		if p.narrow != nil {
			x.Copy = matrix(p.copies[i], shapes[i].len())
		}
		list = append(list, x)
	}
	return list
}

// norm returns the parameters of a layer norm, or their gradients.
func norm(from []floats, i int) kernels.Norm { return kernels.Norm{W: from[i], B: from[i+1]} }

func (p *params[T]) close() error {
	return errors.Join(p.flat.Close(), p.gradFlat.Close(), p.copyFlat.Close(), p.narrowFlat.Close())
}

// matrix returns memory as a tensor; the shape must fit.
func matrix[T memory.Element](x memory.Slice[T], shape ...int) tensor.Tensor {
	t, err := tensor.Of(x, shape...)
	if err != nil {
		panic(err)
	}
	return t
}
