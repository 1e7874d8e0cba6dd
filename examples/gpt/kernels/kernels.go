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
	floats = memory.Slice[float32]
	tokens = memory.Slice[int32] // lines of Line tokens: a sequence, and the token after it
)

// A Norm is the parameters of a layer norm, or their gradients.
type Norm struct{ W, B floats }

// A Set is the kernels for activations of type T, on one stream. Its methods enqueue on the
// stream, in order.
type Set[T Float] struct {
	s      *stream.Stream
	module *kernel.Module
	parts  floats // sums of blocks
	count  memory.Slice[uint32]

	embedNorm, addNorm, normBack, embedBack, attention, attentionBack *kernel.Kernel
	gelu, geluBack, widen, crossEntropy, endStep                      *kernel.Kernel
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
	src := &kernel.Source{Name: "kernels.cu", CUDA: source, Options: options[T]()}
	defs := k.definitions()
	for _, d := range defs {
		src.Kernels = append(src.Kernels, d.Def)
	}
	if k.module, err = kernel.Compile(k.s.Device(), src); err != nil {
		return err
	}
	for _, d := range defs {
		if *d.to, err = k.module.Kernel(d.Name); err != nil {
			return err
		}
	}
	return nil
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

// A definition is a kernel and the field for it.
type definition struct {
	to **kernel.Kernel
	kernel.Def
}

func (k *Set[T]) definitions() []definition {
	def := func(to **kernel.Kernel, name string, standIn func(*kernel.Call), params ...kernel.Param) definition {
		return definition{to, kernel.Def{Name: name, Params: params, Go: standIn}}
	}
	const p, n, f = kernel.Pointer, kernel.I32, kernel.F32
	return []definition{
		def(&k.embedNorm, "embed_norm", embedNorm[T], p, p, p, p, p, p, p, n),
		def(&k.addNorm, "add_norm", addNorm[T], p, p, p, p, p, p, n),
		def(&k.normBack, "norm_back", normBack[T], p, p, p, p, p, p, p, p, p, n, n),
		def(&k.embedBack, "embed_back", embedBack, p, p, p, p, n, n),
		def(&k.attention, "attention", attention[T], p, p),
		def(&k.attentionBack, "attention_back", attentionBack[T], p, p, p),
		def(&k.gelu, "gelu", gelu[T], p, p, n),
		def(&k.geluBack, "gelu_back", geluBack[T], p, p, n),
		def(&k.widen, "widen", widen[T], p, p, n, n),
		def(&k.crossEntropy, "cross_entropy", crossEntropy[T], p, p, p, p, p, f, n, n),
		def(&k.endStep, "end_step", endStep, p, p, p, p, n, p, kernel.F64, n),
	}
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

func number(n int) kernel.Arg { return kernel.Scalar[int32](int32(n)) }

// flags returns the argument of a kernel of the backward pass. add is set if the gradients
// of the parameters add to their previous contents, res if dh does.
func flags(add, res bool) kernel.Arg {
	f := 0
	if add {
		f |= accumulate
	}
	if res {
		f |= residual
	}
	return number(f)
}
