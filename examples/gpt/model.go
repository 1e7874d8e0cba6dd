package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/gochorus/chorus/examples/gpt/kernels"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/optim"
	"github.com/gochorus/chorus/rng"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// A model is a GPT on one device. Its methods enqueue on the stream. Matrix products compute
// in T; the residual stream, layer norms, softmax and the loss are in float32.
type model[T kernels.Float] struct {
	s      *stream.Stream
	k      *kernels.Set[T]
	p      *params[T]
	ready  func(i int) error // called when gradient i is complete
	rows   int               // of the micro-batch
	add    bool              // p.grads has the gradients of earlier micro-batches
	final  bool              // this is the last micro-batch
	layers []layer[T]

	h      floats          // the residual stream behind the last layer
	normed memory.Slice[T] // its layer norm
	logits memory.Slice[T] // in the backward pass their gradient
	y      memory.Slice[T] // output of attention or of the wide part; in the backward pass its gradient

	dh              floats          // gradient of the residual stream
	da, dqkv, dwide memory.Slice[T] // gradients of activations

	buffers []buffer
	owned   []io.Closer
}

// A layer has the activations that its backward pass reads.
type layer[T kernels.Float] struct {
	ln1, qkv, proj, ln2, up, down int // numbers of parameters

	h, middle           floats          // the residual stream before attention, and before the wide part
	norm1, in, attended memory.Slice[T] // in has queries, keys and values
	lse                 floats          // of attention
	norm2, wide, active memory.Slice[T] // active is gelu(wide)
}

// A buffer cuts a memory to the rows of a micro-batch.
type buffer func(rows int)

// newModel allocates the activations of at most rows rows.
func newModel[T kernels.Float](s *stream.Stream, p *params[T], rows int) (m *model[T], err error) {
	m = &model[T]{s: s, p: p, layers: make([]layer[T], layers)}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	if m.k, err = kernels.New[T](s, sizes, rows); err != nil {
		return m, err
	}
	m.owned = append(m.owned, m.k)
	errs := []error{
		m.floats(&m.h, rows), m.floats(&m.dh, rows),
		m.activations(rows, width, &m.normed, &m.y, &m.da), m.activations(rows, sizes.Vocab, &m.logits),
		m.activations(rows, 3*width, &m.dqkv), m.activations(rows, 4*width, &m.dwide),
	}
	for i := range m.layers {
		l, first := &m.layers[i], 2+8*i // behind the embeddings
		l.ln1, l.qkv, l.proj, l.ln2, l.up, l.down = first, first+2, first+3, first+4, first+6, first+7
		errs = append(errs,
			m.floats(&l.h, rows), m.floats(&l.middle, rows), allocate(m, rows, sizes.Heads, &l.lse),
			m.activations(rows, width, &l.norm1, &l.attended, &l.norm2),
			m.activations(rows, 3*width, &l.in), m.activations(rows, 4*width, &l.wide, &l.active))
	}
	return m, errors.Join(errs...)
}

// floats allocates rows of the residual stream.
func (m *model[T]) floats(to *floats, rows int) error { return allocate(m, rows, width, to) }

// activations allocates matrices.
func (m *model[T]) activations(rows, columns int, to ...*memory.Slice[T]) error {
	return allocate(m, rows, columns, to...)
}

func allocate[T kernels.Float, E memory.Element](m *model[T], rows, columns int, to ...*memory.Slice[E]) error {
	for _, x := range to {
		whole, err := memory.Make[E](m.s, rows*columns)
		if err != nil {
			return err
		}
		m.owned = append(m.owned, whole)
		m.buffers = append(m.buffers, func(rows int) { *x = whole.Slice(0, rows*columns) })
	}
	return nil
}

// The numbers of the parameters outside of the layers.
var tok, pos, last, head = 0, 1, len(shapes) - 3, len(shapes) - 1

// forward computes the logits of sequences.
func (m *model[T]) forward(text memory.Slice[int32]) error {
	m.rows = text.Len() / line * sizes.Context
	for _, cut := range m.buffers {
		cut(m.rows)
	}
	p, l := m.p.values, &m.layers[0]
	if err := m.k.EmbedNorm(text, p[tok], p[pos], l.h, norm(p, l.ln1), l.norm1); err != nil {
		return err
	}
	for i := range m.layers {
		h, ln, a := m.h, last, m.normed // the outputs of the layer
		if i+1 < layers {
			next := &m.layers[i+1]
			h, ln, a = next.h, next.ln1, next.norm1
		}
		if err := m.forwardLayer(&m.layers[i], h, norm(p, ln), a); err != nil {
			return err
		}
	}
	return m.linear(m.logits, m.normed, head)
}

// forwardLayer computes h and a, its layer norm.
func (m *model[T]) forwardLayer(l *layer[T], h floats, n kernels.Norm, a memory.Slice[T]) error {
	return first(
		m.linear(l.in, l.norm1, l.qkv),
		m.k.Attention(l.in, l.attended, l.lse),
		m.linear(m.y, l.attended, l.proj),
		m.k.AddNorm(l.h, m.y, l.middle, norm(m.p.values, l.ln2), l.norm2),

		m.linear(l.wide, l.norm2, l.up),
		m.k.GELU(l.wide, l.active),
		m.linear(m.y, l.active, l.down),
		m.k.AddNorm(l.middle, m.y, h, n, a),
	)
}

// backward computes the loss and the gradients of the sequences that forward has read. It
// divides by the number of targets in the whole batch, so that the sums over micro-batches
// and ranks are the mean loss and its gradients.
func (m *model[T]) backward(text memory.Slice[int32]) error {
	p, g := m.p.values, m.p.grads
	err := first(
		m.k.CrossEntropy(m.logits, text, m.p.loss, 1/float32(batchSize*sizes.Context), m.add),
		m.done(len(shapes)),
		m.linearBack(m.da, m.logits, m.normed, head),
		m.k.NormBack(m.da, m.h, norm(p, last), m.dh, false, m.y, norm(g, last), m.add),
		m.done(last, last+1),
	)
	for i := layers - 1; i >= 0 && err == nil; i-- {
		err = m.backwardLayer(&m.layers[i])
	}
	if err != nil {
		return err
	}
	return first(m.k.EmbedBack(text, m.dh, g[tok], g[pos], false, m.add), m.done(tok, pos))
}

// backwardLayer is the backward pass of a layer. dh, and y as T, are the gradient of the
// residual stream behind the layer before the call, and in front of the layer after it.
func (m *model[T]) backwardLayer(l *layer[T]) error {
	p, g := m.p.values, m.p.grads
	return first(
		m.linearBack(m.dwide, m.y, l.active, l.down),
		m.k.GELUBack(l.wide, m.dwide),
		m.linearBack(m.da, m.dwide, l.norm2, l.up),
		m.k.NormBack(m.da, l.middle, norm(p, l.ln2), m.dh, true, m.y, norm(g, l.ln2), m.add),
		m.done(l.ln2, l.ln2+1),

		m.linearBack(m.da, m.y, l.attended, l.proj),
		m.k.AttentionBack(l.in, l.attended, m.da, l.lse, m.dqkv),
		m.linearBack(m.da, m.dqkv, l.norm1, l.qkv),
		m.k.NormBack(m.da, l.h, norm(p, l.ln1), m.dh, true, m.y, norm(g, l.ln1), m.add),
		m.done(l.ln1, l.ln1+1),
	)
}

// linear computes y = x·wᵀ with matrix w of the parameters.
func (m *model[T]) linear(y, x memory.Slice[T], w int) error {
	p := shapes[w]
	return tensor.MatMul(m.s, matrix(y, m.rows, p.out), matrix(x, m.rows, p.in), matrix(m.p.copies[w], p.out, p.in).T(), nil)
}

// linearBack computes dx and the gradient of w, from dy.
func (m *model[T]) linearBack(dx, dy, x memory.Slice[T], w int) error {
	p := shapes[w]
	d, weight, in := matrix(dy, m.rows, p.out), matrix(m.p.copies[w], p.out, p.in), matrix(x, m.rows, p.in)
	if err := tensor.MatMul(m.s, matrix(dx, m.rows, p.in), d, weight, nil); err != nil {
		return err
	}
	if m.p.narrow != nil {
		return first(
			tensor.MatMul(m.s, matrix(m.p.narrow[w], p.out, p.in), d.T(), in, nil),
			m.k.Widen(m.p.narrow[w], m.p.grads[w], m.add),
			m.done(w),
		)
	}
	beta := 0.
	if m.add {
		beta = 1
	}
	return first(
		tensor.MatMul(m.s, matrix(m.p.grads[w], p.out, p.in), d.T(), in, &tensor.MatMulConfig{Beta: &beta}),
		m.done(w),
	)
}

// done tells the reducer that gradients are enqueued, which the last micro-batch completes.
func (m *model[T]) done(gradients ...int) error {
	if !m.final {
		return nil
	}
	for _, i := range gradients {
		if err := m.ready(i); err != nil {
			return err
		}
	}
	return nil
}

// first returns the first error of a list of calls. An error does not end the list.
func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (m *model[T]) close() error {
	var errs []error
	for _, x := range m.owned {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}

const (
	layers = 2
	width  = 64
)

var sizes = kernels.Sizes{Vocab: len(vocabulary), Context: 39, Width: width, Heads: 4}

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
	all := []shape{{"tok", sizes.Vocab, width}, {"pos", sizes.Context, width}}
	for l := range layers {
		for _, p := range []shape{
			{"ln1.w", width, 0}, {"ln1.b", width, 0}, {"qkv", 3 * width, width}, {"proj", width, width},
			{"ln2.w", width, 0}, {"ln2.b", width, 0}, {"up", 4 * width, width}, {"down", width, 4 * width},
		} {
			p.name = fmt.Sprintf("%d.%s", l, p.name)
			all = append(all, p)
		}
	}
	return append(all, shape{"ln.w", width, 0}, shape{"ln.b", width, 0}, shape{"head", sizes.Vocab, width})
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
