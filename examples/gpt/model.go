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
//
// A pass over a micro-batch is begin, forward of units 0, 1 and so on, and backward of the same
// units from the last to the first. Unit 0 is the embeddings, and unit l+1 is layer l. The head
// belongs to both passes of the last unit.
type model[T kernels.Float] struct {
	*preset
	s      *stream.Stream
	k      *kernels.Set[T]
	p      *params[T]
	access access
	layers []layer[T]

	// Of the micro-batch.
	text  memory.Slice[int32]
	rows  int
	scale float32 // of the loss of a row
	pass

	h      []floats        // the residual stream in front of each layer, and behind the last one
	normed memory.Slice[T] // the layer norm of the last one
	logits memory.Slice[T] // in the backward pass their gradient
	y      memory.Slice[T] // output of attention or of the wide part; in the backward pass its gradient

	dh              floats          // gradient of the residual stream
	da, dqkv, dwide memory.Slice[T] // gradients of activations

	buffers []func(rows int)
	owned   []io.Closer
}

// access is what a model does when it begins and ends to use the parameters of a unit. nil means nothing.
type access struct {
	use   func(k int, backward bool) error
	ready func(i int) error // gradient i is complete
	done  func(k int, backward bool) error
}

// A pass is the place of a micro-batch in a step.
type pass struct {
	add     bool // gradients add to those of earlier micro-batches
	addLoss bool
	final   bool // this is the last micro-batch
}

// A layer has the activations that its backward pass reads.
type layer[T kernels.Float] struct {
	block
	norm1, in, attended memory.Slice[T] // in has queries, keys and values
	lse                 floats          // of attention
	middle              floats          // the residual stream in front of the wide part
	norm2, wide, active memory.Slice[T] // active is gelu(wide)
}

// newModel allocates the activations of at most rows rows.
func newModel[T kernels.Float](s *stream.Stream, of *preset, p *params[T], rows int) (m *model[T], err error) {
	m = &model[T]{preset: of, s: s, p: p, layers: make([]layer[T], of.layers), h: make([]floats, of.layers+1)}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.close())
		}
	}()
	if m.k, err = kernels.New[T](s, of.Sizes, rows); err != nil {
		return m, err
	}
	m.owned = append(m.owned, m.k)
	w := of.Width
	errs := []error{
		allocate(m, rows, w, &m.dh), allocate(m, rows, w, &m.normed, &m.y, &m.da), allocate(m, rows, of.Vocab, &m.logits),
		allocate(m, rows, 3*w, &m.dqkv), allocate(m, rows, 4*w, &m.dwide),
	}
	for i := range m.h {
		errs = append(errs, allocate(m, rows, w, &m.h[i]))
	}
	for i := range m.layers {
		l := &m.layers[i]
		l.block = of.block(i)
		errs = append(errs,
			allocate(m, rows, w, &l.middle), allocate(m, rows, of.Heads, &l.lse),
			allocate(m, rows, w, &l.norm1, &l.attended, &l.norm2),
			allocate(m, rows, 3*w, &l.in), allocate(m, rows, 4*w, &l.wide, &l.active))
	}
	return m, errors.Join(errs...)
}

// allocate allocates matrices, which begin cuts to the rows of a micro-batch.
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

// begin begins the pass over a micro-batch. The loss is divided by the number of targets in the
// whole batch, so that the sums over micro-batches and ranks are the mean loss and its gradients.
func (m *model[T]) begin(text memory.Slice[int32], targets int, p pass) {
	m.text, m.scale, m.pass = text, 1/float32(targets), p
	m.rows = text.Len() / m.Line() * m.Context
	for _, cut := range m.buffers {
		cut(m.rows)
	}
}

// units returns the number of units.
func (m *model[T]) units() int { return len(m.layers) + 1 }

// forward computes the residual stream behind unit k, its layer norm and, behind the last
// unit, the logits.
func (m *model[T]) forward(k int) error {
	if err := m.use(k, false); err != nil {
		return err
	}
	p, a := m.p.values, m.normed
	if k < len(m.layers) {
		a = m.layers[k].norm1
	}
	if k == 0 {
		err := m.k.EmbedNorm(m.text, p[tok], p[pos], m.h[0], norm(p, firstNorm), a)
		return first(err, m.done(k, false))
	}
	l := &m.layers[k-1]
	err := first(
		m.linear(l.in, l.norm1, l.qkv),
		m.k.Attention(l.in, l.attended, l.lse),
		m.linear(m.y, l.attended, l.proj),
		m.k.AddNorm(m.h[k-1], m.y, l.middle, norm(p, l.ln2), l.norm2),

		m.linearGELU(l.wide, l.active, l.norm2, l.up),
		m.linear(m.y, l.active, l.down),
		m.k.AddNorm(l.middle, m.y, m.h[k], norm(p, l.ln), a),
	)
	if k == len(m.layers) {
		err = first(err, m.linear(m.logits, a, m.head()))
	}
	return first(err, m.done(k, false))
}

// backward computes the gradients of unit k and, before those of the last one, the loss. Between the
// units, da is the gradient of the layer norm behind the next one, and dh, if there is one in front
// of the loss, that of the residual stream.
func (m *model[T]) backward(k int) error {
	last := k == len(m.layers)
	if last {
		if err := first(
			m.use(0, true),
			m.k.CrossEntropy(m.logits, m.text, m.p.loss, m.scale, m.addLoss),
			m.ready(len(m.p.shapes)),
		); err != nil {
			return err
		}
	}
	if k > 0 {
		if err := m.use(k, true); err != nil {
			return err
		}
	}
	if last {
		if err := m.linearBack(m.da, m.logits, m.normed, m.head()); err != nil {
			return err
		}
	}
	p, g := m.p.values, m.p.grads
	if k == 0 {
		return first(
			m.k.NormBack(m.da, m.h[0], norm(p, firstNorm), m.dh, true, m.y, norm(g, firstNorm), m.add),
			m.ready(firstNorm, firstNorm+1),
			m.k.EmbedBack(m.text, m.dh, g[tok], g[pos], m.tied, m.add),
			m.ready(tok, pos),
			m.done(0, true),
		)
	}
	l := &m.layers[k-1]
	return first(
		m.k.NormBack(m.da, m.h[k], norm(p, l.ln), m.dh, !last, m.y, norm(g, l.ln), m.add),
		m.ready(l.ln, l.ln+1),

		m.linearBack(m.dwide, m.y, l.active, l.down, l.wide),
		m.linearBack(m.da, m.dwide, l.norm2, l.up),
		m.k.NormBack(m.da, l.middle, norm(p, l.ln2), m.dh, true, m.y, norm(g, l.ln2), m.add),
		m.ready(l.ln2, l.ln2+1),

		m.linearBack(m.da, m.y, l.attended, l.proj),
		m.k.AttentionBack(l.in, l.attended, m.da, l.lse, m.dqkv),
		m.linearBack(m.da, m.dqkv, l.norm1, l.qkv),
		m.done(k, true),
	)
}

// linear computes y = x·wᵀ with matrix w of the parameters.
func (m *model[T]) linear(y, x memory.Slice[T], w int) error {
	p := m.p.shapes[w]
	return tensor.MatMul(m.s, matrix(y, m.rows, p.out), matrix(x, m.rows, p.in), matrix(m.p.copies[w], p.out, p.in).T(), nil)
}

// linearGELU computes y = x·wᵀ and active = gelu(y). The product of bfloat16 does both; the epilogue's
// tanh is not precise enough for float32.
func (m *model[T]) linearGELU(y, active, x memory.Slice[T], w int) error {
	if !rounds[T]() {
		return first(m.linear(y, x, w), m.k.GELU(y, active))
	}
	p := m.p.shapes[w]
	return tensor.MatMul(m.s, matrix(active, m.rows, p.out), matrix(x, m.rows, p.in), matrix(m.p.copies[w], p.out, p.in).T(),
		&tensor.MatMulConfig{Epilogue: tensor.GELU, Aux: matrix(y, m.rows, p.out)})
}

// linearBack computes dx and the gradient of w, from dy. If x is the GELU of some numbers, these are
// active, and dx is their gradient.
func (m *model[T]) linearBack(dx, dy, x memory.Slice[T], w int, active ...memory.Slice[T]) error {
	p := m.p.shapes[w]
	d, weight, in := matrix(dy, m.rows, p.out), matrix(m.p.copies[w], p.out, p.in), matrix(x, m.rows, p.in)
	var cfg tensor.MatMulConfig
	if len(active) > 0 && rounds[T]() {
		cfg.Epilogue, cfg.Aux = tensor.GELUGrad, matrix(active[0], m.rows, p.in)
	}
	if err := tensor.MatMul(m.s, matrix(dx, m.rows, p.in), d, weight, &cfg); err != nil {
		return err
	}
	if len(active) > 0 && !rounds[T]() {
		if err := m.k.GELUBack(active[0], dx); err != nil {
			return err
		}
	}
	if m.p.narrow != nil {
		if err := tensor.MatMul(m.s, matrix(m.p.narrow[w], p.out, p.in), d.T(), in, nil); err != nil {
			return err
		}
		if m.p.grads[w].Len() > 0 {
			if err := m.k.Widen(m.p.narrow[w], m.p.grads[w], m.add); err != nil {
				return err
			}
		}
	} else {
		beta := 0.
		if m.add {
			beta = 1
		}
		if err := tensor.MatMul(m.s, matrix(m.p.grads[w], p.out, p.in), d.T(), in, &tensor.MatMulConfig{Beta: &beta}); err != nil {
			return err
		}
	}
	if w == tok {
		return nil // the gradient of the embedding is missing
	}
	return m.ready(w)
}

// ready says that gradients are enqueued, which the last micro-batch completes.
func (m *model[T]) ready(gradients ...int) error {
	if !m.final || m.access.ready == nil {
		return nil
	}
	for _, i := range gradients {
		if err := m.access.ready(i); err != nil {
			return err
		}
	}
	return nil
}

func (m *model[T]) use(k int, backward bool) error {
	if m.access.use == nil {
		return nil
	}
	return m.access.use(k, backward)
}

func (m *model[T]) done(k int, backward bool) error {
	if m.access.done == nil {
		return nil
	}
	return m.access.done(k, backward)
}

// first returns the first error of a list of calls, all of which run even if
// one of them fails.
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
