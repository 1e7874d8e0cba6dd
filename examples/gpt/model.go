package main

import (
	"errors"
	"io"

	"github.com/gochorus/chorus/examples/gpt/kernels"
	"github.com/gochorus/chorus/memory"
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
	if m.k, err = kernels.New[T](s, rows); err != nil {
		return m, err
	}
	m.owned = append(m.owned, m.k)
	errs := []error{
		m.floats(&m.h, rows), m.floats(&m.dh, rows),
		m.activations(rows, width, &m.normed, &m.y, &m.da), m.activations(rows, kernels.Vocab, &m.logits),
		m.activations(rows, 3*width, &m.dqkv), m.activations(rows, 4*width, &m.dwide),
	}
	for i := range m.layers {
		l, first := &m.layers[i], 2+8*i // behind the embeddings
		l.ln1, l.qkv, l.proj, l.ln2, l.up, l.down = first, first+2, first+3, first+4, first+6, first+7
		errs = append(errs,
			m.floats(&l.h, rows), m.floats(&l.middle, rows),
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
	m.rows = text.Len() / kernels.Line * kernels.Context
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
		m.k.Attention(l.in, l.attended),
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
		m.k.CrossEntropy(m.logits, text, m.p.loss, 1./(batchSize*kernels.Context), m.add),
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
	return first(m.k.EmbedBack(text, m.dh, g[tok], g[pos], m.add), m.done(tok, pos))
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
		m.k.AttentionBack(l.in, m.da, m.dqkv),
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
