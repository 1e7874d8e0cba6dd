package main

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/gochorus/chorus/examples/gpt/kernels"
)

// The options of training that all models share.
const (
	seed        = 1234
	clipNorm    = 1.0
	weightDecay = 0.1
)

// A preset is a model, and how it is trained. All are GPT-2's: layer norms in front of attention and
// of the wide part, with weight and bias, and matrices without biases.
type preset struct {
	kernels.Sizes
	layers int
	batch  int // sequences of a step, over all ranks

	tied      bool    // the head's matrix is the embedding of the tokens
	scaled    bool    // products that add to the residual stream start smaller, so that its variance does not grow with layers
	decayAll  bool    // weight decay of vectors, too
	peakRate  float64 // learning rate after warmup
	warmup    int     // steps
	bucket    int     // bytes of gradients that are reduced together; 0 means ddp's default
	generated source  // the text without a file
}

// The models by their names.
var presets = map[string]*preset{
	// Sums learns to add two numbers. PyTorch's losses are in testdata. There are two buckets: the
	// reduction of the second layer overlaps with the backward pass of the first layer.
	"sums": {Sizes: kernels.Sizes{Vocab: len(vocabulary), Context: 39, Width: 64, Heads: 4}, layers: 2,
		batch: 32, decayAll: true, peakRate: 3e-3, warmup: 10, bucket: 216 << 10, generated: sums},
	// GPT-2 with 124 million parameters, and its vocabulary rounded up to a multiple of 128.
	"gpt2": {Sizes: kernels.Sizes{Vocab: 50304, Context: 1024, Width: 768, Heads: 12}, layers: 12,
		batch: 32, tied: true, scaled: true, peakRate: 6e-4, warmup: 100, generated: chain},
}

// presetOf returns the preset of a name; "" means sums.
func presetOf(name string) (*preset, error) {
	if name == "" {
		name = "sums"
	}
	p := presets[name]
	if p == nil {
		return nil, fmt.Errorf("model %q: want one of %s", name, strings.Join(slices.Sorted(maps.Keys(presets)), ", "))
	}
	return p, nil
}

// A shape is a parameter: a matrix that makes in columns to out columns, an embedding, or a
// vector, whose in is 0.
type shape struct {
	name    string
	out, in int
}

func (p shape) len() int { return p.out * max(p.in, 1) }

func (p shape) dims() []int {
	if p.in == 0 {
		return []int{p.out}
	}
	return []int{p.out, p.in}
}

// shapes returns the parameters, in PyTorch's order of drawing them.
func (p *preset) shapes() []shape {
	w := p.Width
	all := []shape{{"tok", p.Vocab, w}, {"pos", p.Context, w}}
	for l := range p.layers {
		for _, x := range []shape{
			{"ln1.w", w, 0}, {"ln1.b", w, 0}, {"qkv", 3 * w, w}, {"proj", w, w},
			{"ln2.w", w, 0}, {"ln2.b", w, 0}, {"up", 4 * w, w}, {"down", w, 4 * w},
		} {
			x.name = fmt.Sprintf("%d.%s", l, x.name)
			all = append(all, x)
		}
	}
	all = append(all, shape{"ln.w", w, 0}, shape{"ln.b", w, 0})
	if !p.tied {
		all = append(all, shape{"head", p.Vocab, w})
	}
	return all
}

// deviation returns the standard deviation of the initial values of a matrix.
func (p *preset) deviation(x shape) float64 {
	if p.scaled && (strings.HasSuffix(x.name, ".proj") || strings.HasSuffix(x.name, ".down")) {
		return 0.02 / math.Sqrt(2*float64(p.layers))
	}
	return 0.02
}

// rate returns the learning rate of a step after the first, as kernel end_step computes it.
func (p *preset) rate(step int) float64 {
	if step+1 < p.warmup {
		return p.peakRate * (float64(step+1) / float64(p.warmup))
	}
	return p.peakRate
}

// The numbers of the first parameters.
const (
	tok = iota
	pos
	firstNorm // the weight; the bias follows
)

// A block is the numbers of the parameters of a layer. The kernel that ends a layer computes the
// layer norm of the next one. So a block has the norm behind it, and the first norm belongs to the embeddings.
type block struct{ qkv, proj, ln2, up, down, ln int }

func (p *preset) block(l int) block {
	i := firstNorm + 8*l
	return block{qkv: i + 2, proj: i + 3, ln2: i + 4, up: i + 6, down: i + 7, ln: i + 8}
}

// head returns the number of the head's matrix.
func (p *preset) head() int {
	if p.tied {
		return tok
	}
	return firstNorm + 8*p.layers + 2
}

// units returns the parameters by units: the embeddings with the head, and then the layers.
func (p *preset) units() [][]int {
	first := []int{tok, pos, firstNorm, firstNorm + 1}
	if !p.tied {
		first = append(first, p.head())
	}
	all := [][]int{first}
	for l := range p.layers {
		b := p.block(l)
		all = append(all, []int{b.qkv, b.proj, b.ln2, b.ln2 + 1, b.up, b.down, b.ln, b.ln + 1})
	}
	return all
}
