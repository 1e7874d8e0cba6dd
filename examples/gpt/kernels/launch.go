package kernels

import (
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The methods get the number of rows from the lengths of the matrices. Matrices of T are
// activations, or gradients of activations. If add is true, a method adds to the gradients of
// parameters; otherwise it overwrites them.

// EmbedNorm computes h, the sum of the embeddings of the tokens and of their places, and
// a = layer_norm(h).
func (k *Set[T]) EmbedNorm(text tokens, tok, pos, h floats, n Norm, a memory.Slice[T]) error {
	rows := h.Len() / Width
	return k.embedNorm.Launch(k.s, grid(blocks(rows, warps), threads), embedNormArgs[T]{text, tok, pos, h, n.W, n.B, a, int32(rows)})
}

// AddNorm computes h = before + y and a = layer_norm(h).
func (k *Set[T]) AddNorm(before floats, y memory.Slice[T], h floats, n Norm, a memory.Slice[T]) error {
	rows := h.Len() / Width
	return k.addNorm.Launch(k.s, grid(blocks(rows, warps), threads), addNormArgs[T]{before, y, h, n.W, n.B, a, int32(rows)})
}

// NormBack is the backward pass of a = layer_norm(h) with the parameters n. From da it
// computes dh and grads. If res is true, it adds to the previous contents of dh. It writes
// dh also to dy, as T: this is the gradient of the product that was added to h.
func (k *Set[T]) NormBack(da memory.Slice[T], h floats, n Norm, dh floats, res bool, dy memory.Slice[T], grads Norm, add bool) error {
	rows := h.Len() / Width
	return k.normBack.Launch(k.s, grid(blocks(rows, normRows), threads),
		normBackArgs[T]{da, h, n.W, dh, dy, grads.W, grads.B, k.parts, k.count, int32(rows), flags(add, res)})
}

// EmbedBack computes the gradients of both embeddings from dh, the gradient of their sum.
func (k *Set[T]) EmbedBack(text tokens, dh, dtok, dpos floats, add bool) error {
	return k.embedBack.Launch(k.s, grid(Vocab+Context, embedGroups*Width),
		embedBackArgs{text, dh, dtok, dpos, int32(dh.Len() / Width), flags(add, false)})
}

// Attention computes o, causal attention. A row of qkv has the queries of all heads, then
// the keys, and then the values.
func (k *Set[T]) Attention(qkv, o memory.Slice[T]) error {
	return k.attention.Launch(k.s, grid(o.Len()/(Width*Context)*Heads, attentionThreads), attentionArgs[T]{qkv, o})
}

// AttentionBack computes dqkv, the gradient of qkv, from do, the gradient of o.
func (k *Set[T]) AttentionBack(qkv, do, dqkv memory.Slice[T]) error {
	return k.attentionBack.Launch(k.s, grid(do.Len()/(Width*Context)*Heads, attentionThreads), attentionBackArgs[T]{qkv, do, dqkv})
}

// GELU computes y = gelu(x, approximate='tanh').
func (k *Set[T]) GELU(x, y memory.Slice[T]) error {
	return k.gelu.Launch(k.s, kernel.Cover(x.Len()), geluArgs[T]{x, y, int32(x.Len())})
}

// GELUBack turns d from the gradient of gelu(x) into the gradient of x.
func (k *Set[T]) GELUBack(x, d memory.Slice[T]) error {
	return k.geluBack.Launch(k.s, kernel.Cover(x.Len()), geluBackArgs[T]{x, d, int32(x.Len())})
}

// Widen sets sum to x, or adds x to it.
func (k *Set[T]) Widen(x memory.Slice[T], sum floats, add bool) error {
	return k.widen.Launch(k.s, kernel.Cover(x.Len()), widenArgs[T]{x, sum, int32(x.Len()), flags(add, false)})
}

// CrossEntropy computes scale times the sum of the cross-entropies of the logits z with the
// next tokens, as the one element of loss, and overwrites z by its gradient.
func (k *Set[T]) CrossEntropy(z memory.Slice[T], text tokens, loss floats, scale float32, add bool) error {
	rows := z.Len() / Vocab
	return k.crossEntropy.Launch(k.s, grid(blocks(rows, threads), threads),
		crossEntropyArgs[T]{z, text, loss, k.parts, k.count, scale, int32(rows), flags(add, false)})
}

// EndStep writes loss and norm to the log, which has two elements for each step, at the place
// of *step. It increments *step and sets *rate to the learning rate of the next step, which
// grows to peak in warmup steps.
func (k *Set[T]) EndStep(loss, norm floats, step memory.Slice[int32], log floats, rate memory.Slice[float64], peak float64, warmup int) error {
	return k.endStep.Launch(k.s, grid(1, 1), endStepArgs{loss, norm, step, log, int32(log.Len() / 2), rate, peak, int32(warmup)})
}
