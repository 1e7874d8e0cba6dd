// Package kernels has the kernels of the small GPT that examples/gpt trains: embedding, layer
// norm, causal attention, GELU, cross-entropy, and their gradients. kernels.cu is their CUDA
// source, and standin.go the Go functions that virtual devices run in its place.
package kernels

import (
	_ "embed"
	"errors"
	"fmt"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The sizes that the kernels are compiled for.
const (
	Vocab   = 13 // tokens
	Context = 39 // places of a sequence
	Line    = Context + 1
	Width   = 64 // columns of the residual stream
	Heads   = 4

	head = Width / Heads // columns of a head
)

// The shapes of the launches.
const (
	threads          = 256
	warps            = threads / 32
	normRows         = 32 // rows of a block
	embedGroups      = 16
	attentionThreads = 64
)

// The flags of the kernels of the backward pass, as in kernels.cu.
const (
	accumulate = 1 << iota
	residual
)

//go:embed kernels.cu
var source string

// Float is a type of activations.
type Float interface{ float32 | memory.BFloat16Bits }

type (
	floats  = memory.Slice[float32]
	counter = memory.Slice[uint32]
	tokens  = memory.Slice[int32] // lines of Line tokens: a sequence, and the token after it
)

// A Norm is the parameters of a layer norm, or their gradients.
type Norm struct{ W, B floats }

// A Set is the kernels for activations of type T, on one stream. Its methods enqueue on the
// stream, in order.
type Set[T Float] struct {
	s      *stream.Stream
	module *kernel.Module
	parts  floats // sums of blocks
	count  counter

	embedNorm     *kernel.Func[embedNormArgs[T]]
	addNorm       *kernel.Func[addNormArgs[T]]
	normBack      *kernel.Func[normBackArgs[T]]
	embedBack     *kernel.Func[embedBackArgs]
	attention     *kernel.Func[attentionArgs[T]]
	attentionBack *kernel.Func[attentionBackArgs[T]]
	gelu          *kernel.Func[geluArgs[T]]
	geluBack      *kernel.Func[geluBackArgs[T]]
	widen         *kernel.Func[widenArgs[T]]
	crossEntropy  *kernel.Func[crossEntropyArgs[T]]
	endStep       *kernel.Func[endStepArgs]
}

// New compiles the kernels. Batches have at most maxRows rows.
func New[T Float](s *stream.Stream, maxRows int) (*Set[T], error) {
	k := &Set[T]{s: s}
	if err := k.open(maxRows); err != nil {
		return nil, errors.Join(err, k.Close())
	}
	return k, nil
}

func (k *Set[T]) open(maxRows int) (err error) {
	if k.parts, err = memory.Make[float32](k.s, blocks(maxRows, normRows)*2*Width); err != nil {
		return err
	}
	if k.count, err = memory.MakeFrom(k.s, []uint32{0}); err != nil {
		return err
	}
	k.module, err = kernel.Compile(k.s.Device(), k.define())
	return err
}

// define returns the source with the kernels of the set.
func (k *Set[T]) define() *kernel.Source {
	src := &kernel.Source{Name: "kernels.cu", CUDA: source, Options: options[T]()}
	k.embedNorm = kernel.Define(src, "embed_norm", embedNorm[T])
	k.addNorm = kernel.Define(src, "add_norm", addNorm[T])
	k.normBack = kernel.Define(src, "norm_back", normBack[T])
	k.embedBack = kernel.Define(src, "embed_back", embedBack)
	k.attention = kernel.Define(src, "attention", attention[T])
	k.attentionBack = kernel.Define(src, "attention_back", attentionBack[T])
	k.gelu = kernel.Define(src, "gelu", gelu[T])
	k.geluBack = kernel.Define(src, "gelu_back", geluBack[T])
	k.widen = kernel.Define(src, "widen", widen[T])
	k.crossEntropy = kernel.Define(src, "cross_entropy", crossEntropy[T])
	k.endStep = kernel.Define(src, "end_step", endStep)
	return src
}

// options defines the names that kernels.cu leaves open.
func options[T Float]() (list []string) {
	element := "float"
	if memory.DTypeOf[T]() == memory.BFloat16 {
		element = "bf16"
	}
	for _, d := range []struct {
		name  string
		value any
	}{
		{"ELEMENT", element}, {"VOCAB", Vocab}, {"CONTEXT", Context}, {"WIDTH", Width}, {"HEADS", Heads},
		{"NORM_ROWS", normRows}, {"EMBED_GROUPS", embedGroups}, {"ATTENTION_THREADS", attentionThreads},
	} {
		list = append(list, fmt.Sprintf("-D%s=%v", d.name, d.value))
	}
	return list
}

// Close frees the memory of the set.
func (k *Set[T]) Close() error {
	errs := []error{k.parts.Close(), k.count.Close()}
	if k.module != nil {
		errs = append(errs, k.module.Close())
	}
	return errors.Join(errs...)
}

func blocks(n, of int) int { return (n + of - 1) / of }

func grid(blocks, threads int) kernel.Grid {
	return kernel.Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{uint32(threads), 1, 1}}
}

// flags returns the argument of a kernel of the backward pass. add is set if the gradients
// of the parameters add to their previous contents, res if dh does.
func flags(add, res bool) (f int32) {
	if add {
		f |= accumulate
	}
	if res {
		f |= residual
	}
	return f
}

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
