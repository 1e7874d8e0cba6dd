package main

import (
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The sizes of the model.
const (
	tokens    = 16 // of the prompt
	layers    = 3
	heads     = 8
	headWidth = 16
	width     = heads * headWidth
	inner     = 4 * width // of the feed-forward layers
	eps       = 1e-5
	seed      = 1
)

// A linear is a layer without bias: y = x · weightᵀ.
type linear struct {
	weight  bfloats
	out, in int // of this rank
}

// A block is a transformer block on one rank. The first layer of each half is column-parallel: a
// rank has some of its outputs. The second one is row-parallel: a rank has the weights for
// its inputs, and the sum over all ranks is the result.
type block struct {
	qkv, proj, up, down linear
	norms               [2]bfloats
}

// A shard is the model of one local rank, with its activations.
type shard struct {
	s             *stream.Stream
	rank, ranks   int
	embed         bfloats // rows of the tokens that the rank owns; zeros for other tokens
	first         bfloats // weight of the first norm
	blocks        [layers]block
	x, residual   bfloats // the rank's part of a sum, and the residual
	a             bfloats // normalized
	qkv, attended bfloats
	up            bfloats
	all           []io.Closer

	scores, softmax, weights tensor.Tensor // of attention: [heads of this rank, tokens, tokens]
	mask                     tensor.Tensor // [tokens, tokens]: a token sees those before it
}

func newShard(g *comm.Group, local int) (m *shard, err error) {
	m = &shard{s: g.Stream(local), rank: g.Rank() + local, ranks: g.Size()}
	if heads%m.ranks != 0 {
		return m, fmt.Errorf("%d heads on %d ranks: want a number of ranks that divides %[1]d", heads, m.ranks)
	}
	rng := rand.New(rand.NewPCG(seed, 0))
	part := func(n int) int { return n / m.ranks }
	m.embed, m.first = m.keep(embedding(rng, m.rank, m.ranks), &err), m.keep(normWeight(rng), &err)
	for i := range m.blocks {
		b := &m.blocks[i]
		b.qkv, b.proj = m.columns(rng, 3, width, width, &err), m.rows(rng, width, width, &err)
		b.norms[0] = m.keep(normWeight(rng), &err)
		b.up, b.down = m.columns(rng, 1, inner, width, &err), m.rows(rng, width, inner, &err)
		b.norms[1] = m.keep(normWeight(rng), &err)
	}
	for _, x := range []struct {
		to   *bfloats
		cols int
	}{{&m.x, width}, {&m.residual, width}, {&m.a, width}, {&m.qkv, part(3 * width)}, {&m.attended, part(width)}, {&m.up, part(inner)}} {
		*x.to = m.keep(make([]memory.BFloat16Bits, tokens*x.cols), &err)
	}
	mask := make([]float32, tokens*tokens)
	for i := range mask {
		if i%tokens > i/tokens {
			mask[i] = float32(math.Inf(-1))
		}
	}
	var errs [4]error
	m.mask, errs[0] = tensor.MakeFrom(m.s, mask, tokens, tokens)
	m.scores, errs[1] = tensor.Make(m.s, memory.Float32, part(heads), tokens, tokens)
	m.softmax, errs[2] = tensor.Make(m.s, memory.Float32, part(heads), tokens, tokens)
	m.weights, errs[3] = tensor.Make(m.s, memory.BFloat16, part(heads), tokens, tokens)
	m.all = append(m.all, m.mask, m.scores, m.softmax, m.weights)
	return m, errors.Join(append(errs[:], err)...)
}

// keep copies numbers to the device, until close. It does nothing after an error.
func (m *shard) keep(x []memory.BFloat16Bits, err *error) bfloats {
	if *err != nil {
		return bfloats{}
	}
	y, failed := memory.MakeFrom(m.s, x)
	*err = failed
	m.all = append(m.all, y)
	return y
}

// columns returns a column-parallel layer of several matrices. The rank has a part of the outputs of
// each matrix.
func (m *shard) columns(rng *rand.Rand, matrices, out, in int, err *error) linear {
	part, mine := out/m.ranks, []memory.BFloat16Bits(nil)
	for range matrices {
		mine = append(mine, random(rng, out*in, in)[m.rank*part*in:][:part*in]...)
	}
	return linear{m.keep(mine, err), matrices * part, in}
}

// rows returns a row-parallel layer.
func (m *shard) rows(rng *rand.Rand, out, in int, err *error) linear {
	part, all := in/m.ranks, random(rng, out*in, in)
	var mine []memory.BFloat16Bits
	for o := range out {
		mine = append(mine, all[o*in+m.rank*part:][:part]...)
	}
	return linear{m.keep(mine, err), out, part}
}

// random returns weights that keep the variance of their inputs.
func random(rng *rand.Rand, n, in int) []memory.BFloat16Bits {
	x := make([]memory.BFloat16Bits, n)
	for i := range x {
		x[i] = memory.BFloat16Of(float32(rng.NormFloat64() / math.Sqrt(float64(in))))
	}
	return x
}

func normWeight(rng *rand.Rand) []memory.BFloat16Bits {
	x := make([]memory.BFloat16Bits, width)
	for i := range x {
		x[i] = memory.BFloat16Of(float32(1 + rng.NormFloat64()/10))
	}
	return x
}

// embedding returns the embeddings of the prompt. Each rank owns some tokens of the vocabulary,
// and has zeros for the others, so the sum over all ranks is the embedding.
func embedding(rng *rand.Rand, rank, ranks int) []memory.BFloat16Bits {
	x := random(rng, tokens*width, 1)
	for t := range tokens {
		if t%ranks != rank {
			clear(x[t*width:][:width])
		}
	}
	return x
}

func (m *shard) close() error {
	var errs []error
	for _, x := range m.all {
		errs = append(errs, x.Close())
	}
	return errors.Join(errs...)
}

// forward enqueues y = x · weightᵀ.
func (m *shard) forward(y, x bfloats, l linear, cfg *tensor.MatMulConfig) error {
	c, err1 := tensor.Of(y, tokens, l.out)
	a, err2 := tensor.Of(x, tokens, l.in)
	b, err3 := tensor.Of(l.weight, l.out, l.in)
	if err := errors.Join(err1, err2, err3); err != nil {
		return err
	}
	return tensor.MatMul(m.s, c, a, b.T(), cfg)
}

// begin enqueues the embedding.
func (m *shard) begin() error {
	return errors.Join(memory.Copy(m.s, m.x, m.embed), m.residual.Zero(m.s))
}

// attend enqueues the first half of a block up to the sum over all ranks.
func (m *shard) attend(b *block) error {
	if err := m.forward(m.qkv, m.a, b.qkv, nil); err != nil {
		return err
	}
	var parts [4]tensor.Tensor // [heads of this rank, tokens, headWidth]: queries, keys, values, and the result
	for i := range parts {
		of, matrices, at := m.qkv, 3, i
		if i == 3 {
			of, matrices, at = m.attended, 1, 0
		}
		x, err := tensor.Of(of, tokens, matrices, heads/m.ranks, headWidth)
		if err == nil {
			x, err = x.Select(1, at)
		}
		if err == nil {
			parts[i], err = x.Transpose(0, 1)
		}
		if err != nil {
			return err
		}
	}
	keys, err := parts[1].Transpose(1, 2)
	return errors.Join(err,
		tensor.MatMul(m.s, m.scores, parts[0], keys, &tensor.MatMulConfig{Alpha: new(1 / math.Sqrt(headWidth)), Add: m.mask}),
		tensor.Softmax(m.s, m.softmax, m.scores),
		tensor.Copy(m.s, m.weights, m.softmax),
		tensor.MatMul(m.s, parts[3], m.weights, parts[2], nil),
		m.forward(m.x, m.attended, b.proj, nil),
	)
}

// feed enqueues the second half.
func (m *shard) feed(b *block) error {
	if err := m.forward(m.up, m.a, b.up, &tensor.MatMulConfig{Epilogue: tensor.GELU}); err != nil {
		return err
	}
	return m.forward(m.x, m.up, b.down, nil)
}

type bfloats = memory.Slice[memory.BFloat16Bits]
