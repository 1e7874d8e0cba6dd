// Package kernels has the kernels of the GPT that examples/gpt trains: embedding, layer
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

// Sizes are the sizes of a model, which the kernels are compiled for.
type Sizes struct {
	Vocab   int // tokens
	Context int // places of a sequence
	Width   int // columns of the residual stream
	Heads   int
}

// Line returns the tokens of a sequence, and the one after it.
func (z Sizes) Line() int { return z.Context + 1 }

// head returns the columns of a head.
func (z Sizes) head() int { return z.Width / z.Heads }

func (z Sizes) check() error {
	switch {
	case z.Vocab < 1 || z.Context < 1 || z.Width < 1 || z.Heads < 1:
		return fmt.Errorf("kernels: sizes %+v: want 1 or more of each", z)
	case z.Width%32 != 0 || z.Width > 2048:
		return fmt.Errorf("kernels: a residual stream of %d columns: want a multiple of 32, and 2048 or less", z.Width)
	case z.Width%z.Heads != 0 || z.head() > 128:
		return fmt.Errorf("kernels: %d heads of %d columns: want equal heads of at most 128 columns", z.Heads, z.Width)
	}
	return nil
}

// The shapes of the launches.
const (
	threads = 256
	warps   = threads / 32
)

// tile returns the positions of a block of attention.
func (z Sizes) tile() int {
	if z.head() > 64 {
		return 32
	}
	return 64
}

func (z Sizes) attentionGrid(sequences int) kernel.Grid {
	return grid(sequences*z.Heads*blocks(z.Context, z.tile()), z.tile())
}

// normRows returns the rows of a block of norm_back. The last block adds the sums of all blocks,
// which are therefore few: a large GPU runs all of them at once.
func normRows(rows int) int { return max(32, blocks(rows, 132)) }

// embedShape returns the groups and columns of a block of embed_back, and its entries of the vocabulary.
func (z Sizes) embedShape() (groups, columns, entries int) {
	const most = 768 // threads, which have room in shared memory
	parts := blocks(z.Width, most)
	columns = 32 * blocks(z.Width, 32*parts)
	return most / columns, columns, min(max(z.Vocab/128, 1), 8)
}

func (z Sizes) embedGrid() kernel.Grid {
	groups, columns, entries := z.embedShape()
	g := grid(blocks(z.Vocab, entries)+z.Context, groups*columns)
	g.Blocks[1] = uint32(blocks(z.Width, columns))
	return g
}

// lossThreads returns the threads of a block of cross_entropy, which has a row of the logits.
func (z Sizes) lossThreads() int { return min(1024, 32*blocks(z.Vocab, 32)) }

// lanes returns the elements of a thread of a kernel of single elements.
func lanes[T Float]() int { return 16 / memory.DTypeOf[T]().Size() }

func elementsGrid[T Float](n int) kernel.Grid { return grid(blocks(n, threads*lanes[T]()), threads) }

// The flags of the kernels of the backward pass, as in kernels.cu.
const (
	accumulate = 1 << iota
	residual
	tied
)

//go:embed kernels.cu
var source string

// Float is a type of activations.
type Float interface{ float32 | memory.BFloat16Bits }

type (
	floats  = memory.Slice[float32]
	counter = memory.Slice[uint32]
	tokens  = memory.Slice[int32] // lines of Sizes.Line tokens: a sequence, and the token after it
)

// A Norm is the parameters of a layer norm, or their gradients.
type Norm struct{ W, B floats }

// A Set is the kernels for activations of type T, on one stream. Its methods enqueue on the
// stream, in order.
type Set[T Float] struct {
	Sizes
	s      *stream.Stream
	module *kernel.Module
	parts  floats // sums of blocks
	count  counter
	flash  *flash[T] // nil if attention has no such kernels

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

// New compiles the kernels for a model of these sizes. Batches have at most maxRows rows.
func New[T Float](s *stream.Stream, z Sizes, maxRows int) (*Set[T], error) {
	if err := z.check(); err != nil {
		return nil, err
	}
	k := &Set[T]{Sizes: z, s: s}
	if err := k.open(maxRows); err != nil {
		return nil, errors.Join(err, k.Close())
	}
	return k, nil
}

func (k *Set[T]) open(maxRows int) (err error) {
	if k.parts, err = memory.Make[float32](k.s, k.partsLen(maxRows)); err != nil {
		return err
	}
	if k.count, err = memory.MakeFrom(k.s, []uint32{0}); err != nil {
		return err
	}
	major, _, err := k.s.Device().Capability()
	if err != nil {
		return err
	}
	if flashes[T](k.Sizes, major) {
		if k.flash, err = newFlash[T](k.s, k.Sizes, maxRows); err != nil {
			return err
		}
	}
	k.module, err = kernel.Compile(k.s.Device(), k.define())
	return err
}

// partsLen returns the length of parts for a number of rows: a loss of each row, or sums of each
// block of norm_back.
func (z Sizes) partsLen(rows int) int { return max(rows, blocks(rows, normRows(rows))*2*z.Width) }

// define returns the source with the kernels of the set.
func (k *Set[T]) define() *kernel.Source {
	src := &kernel.Source{Name: "kernels.cu", CUDA: source, Options: options[T](k.Sizes)}
	host := standIn[T]{k.Sizes}
	k.embedNorm = kernel.Define(src, "embed_norm", host.embedNorm)
	k.addNorm = kernel.Define(src, "add_norm", host.addNorm)
	k.normBack = kernel.Define(src, "norm_back", host.normBack)
	k.embedBack = kernel.Define(src, "embed_back", host.embedBack)
	k.attention = kernel.Define(src, "attention", host.attention)
	k.attentionBack = kernel.Define(src, "attention_back", host.attentionBack)
	k.gelu = kernel.Define(src, "gelu", gelu[T])
	k.geluBack = kernel.Define(src, "gelu_back", geluBack[T])
	k.widen = kernel.Define(src, "widen", widen[T])
	k.crossEntropy = kernel.Define(src, "cross_entropy", host.crossEntropy)
	k.endStep = kernel.Define(src, "end_step", endStep)
	return src
}

// options defines the names that kernels.cu leaves open.
func options[T Float](z Sizes) (list []string) {
	element := "float"
	if memory.DTypeOf[T]() == memory.BFloat16 {
		element = "bf16"
	}
	groups, columns, entries := z.embedShape()
	for _, d := range []struct {
		name  string
		value any
	}{
		{"ELEMENT", element}, {"VOCAB", z.Vocab}, {"CONTEXT", z.Context}, {"WIDTH", z.Width}, {"HEADS", z.Heads},
		{"EMBED_GROUPS", groups}, {"EMBED_COLUMNS", columns}, {"EMBED_ENTRIES", entries}, {"LOSS_THREADS", z.lossThreads()},
	} {
		list = append(list, fmt.Sprintf("-D%s=%v", d.name, d.value))
	}
	return list
}

// Close frees the memory of the set.
func (k *Set[T]) Close() error {
	errs := []error{k.parts.Close(), k.count.Close(), k.flash.close()}
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
	rows := h.Len() / k.Width
	return k.embedNorm.Launch(k.s, grid(blocks(rows, warps), threads), embedNormArgs[T]{text, tok, pos, h, n.W, n.B, a, int32(rows)})
}

// AddNorm computes h = before + y and a = layer_norm(h).
func (k *Set[T]) AddNorm(before floats, y memory.Slice[T], h floats, n Norm, a memory.Slice[T]) error {
	rows := h.Len() / k.Width
	return k.addNorm.Launch(k.s, grid(blocks(rows, warps), threads), addNormArgs[T]{before, y, h, n.W, n.B, a, int32(rows)})
}

// NormBack is the backward pass of a = layer_norm(h) with the parameters n. From da it
// computes dh and grads. If res is true, it adds to the previous contents of dh. It writes
// dh also to dy, as T: this is the gradient of the product that was added to h.
func (k *Set[T]) NormBack(da memory.Slice[T], h floats, n Norm, dh floats, res bool, dy memory.Slice[T], grads Norm, add bool) error {
	rows := h.Len() / k.Width
	per := normRows(rows)
	return k.normBack.Launch(k.s, grid(blocks(rows, per), threads),
		normBackArgs[T]{da, h, n.W, dh, dy, grads.W, grads.B, k.parts, k.count, int32(rows), int32(per), flags(add, res)})
}

// EmbedBack computes the gradients of both embeddings from dh, the gradient of their sum. If
// withHead is true, it adds to the previous contents of dtok in any case: the gradient of the
// head, whose matrix is the embedding.
func (k *Set[T]) EmbedBack(text tokens, dh, dtok, dpos floats, withHead, add bool) error {
	f := flags(add, false)
	if withHead {
		f |= tied
	}
	return k.embedBack.Launch(k.s, k.embedGrid(), embedBackArgs{text, dh, dtok, dpos, int32(dh.Len() / k.Width), f})
}

// Attention computes o, causal attention. A row of qkv has the queries of all heads, then
// the keys, and then the values. It writes to lse the logarithm of the sum of the exponentials of
// each query's scores: of the first sequence's first head, then of its other heads, and then of
// the other sequences.
func (k *Set[T]) Attention(qkv, o memory.Slice[T], lse floats) error {
	if k.flash != nil {
		return k.flash.attention(k.s, k.Sizes, qkv, o, lse)
	}
	return k.attention.Launch(k.s, k.attentionGrid(o.Len()/(k.Width*k.Context)), attentionArgs[T]{qkv, o, lse})
}

// AttentionBack computes dqkv, the gradient of qkv, from do, the gradient of o. lse and o are
// what Attention has written.
func (k *Set[T]) AttentionBack(qkv, o, do memory.Slice[T], lse floats, dqkv memory.Slice[T]) error {
	if k.flash != nil {
		return k.flash.attentionBack(k.s, k.Sizes, qkv, o, do, lse, dqkv)
	}
	return k.attentionBack.Launch(k.s, k.attentionGrid(do.Len()/(k.Width*k.Context)), attentionBackArgs[T]{qkv, o, do, lse, dqkv})
}

// GELU computes y = gelu(x, approximate='tanh').
func (k *Set[T]) GELU(x, y memory.Slice[T]) error {
	return k.gelu.Launch(k.s, elementsGrid[T](x.Len()), geluArgs[T]{x, y, int64(x.Len())})
}

// GELUBack turns d from the gradient of gelu(x) into the gradient of x.
func (k *Set[T]) GELUBack(x, d memory.Slice[T]) error {
	return k.geluBack.Launch(k.s, elementsGrid[T](x.Len()), geluBackArgs[T]{x, d, int64(x.Len())})
}

// Widen sets sum to x, or adds x to it.
func (k *Set[T]) Widen(x memory.Slice[T], sum floats, add bool) error {
	return k.widen.Launch(k.s, elementsGrid[T](x.Len()), widenArgs[T]{x, sum, int64(x.Len()), flags(add, false)})
}

// CrossEntropy computes scale times the sum of the cross-entropies of the logits z with the
// next tokens, as the one element of loss, and overwrites z by its gradient.
func (k *Set[T]) CrossEntropy(z memory.Slice[T], text tokens, loss floats, scale float32, add bool) error {
	rows := z.Len() / k.Vocab
	return k.crossEntropy.Launch(k.s, grid(rows, k.lossThreads()),
		crossEntropyArgs[T]{z, text, loss, k.parts, k.count, scale, int32(rows), flags(add, false)})
}

// EndStep writes loss and norm to the log, which has two elements for each step, at the place
// of *step. It increments *step and sets *rate and *other, which may be the same, to the learning
// rate of the next step, which grows to peak in warmup steps.
func (k *Set[T]) EndStep(loss, norm floats, step memory.Slice[int32], log floats, rate, other memory.Slice[float64], peak float64, warmup int) error {
	return k.endStep.Launch(k.s, grid(1, 1), endStepArgs{loss, norm, step, log, int32(log.Len() / 2), rate, other, peak, int32(warmup)})
}
