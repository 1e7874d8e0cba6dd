package kernels

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

// The CUDA source and the Go functions give the same results for the same launches: the
// source compiled as C++ for the host, and on a GPU.
func TestSourceAgreesWithGo(t *testing.T) {
	t.Parallel()
	t.Run("host", func(t *testing.T) { agree(t, kernel.VerifyConfig{Host: true}) })
	t.Run("cuda", func(t *testing.T) { agree(t, kernel.VerifyConfig{Device: testgpu.CUDA(t, 1)[0]}) })
	t.Run("cuda, flash", testFlash) // the host has no tensor cores
}

func testFlash(t *testing.T) {
	cfg := kernel.VerifyConfig{Device: testgpu.CUDA(t, 1)[0]}
	seed, f := rand.Uint64(), new(flash[memory.BFloat16Bits])
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, z := range []sized{cases[4], {Sizes{Context: 192, Width: 128, Heads: 2}, 2}, {Sizes{Context: 64, Width: 64, Heads: 1}, 1}, {Sizes{Context: 1024, Width: 192, Heads: 3}, 2}} {
		src, g := f.define(z.Sizes), f.grid(z.Sizes, z.rows())
		acts := func(columns int) []memory.BFloat16Bits { return random[memory.BFloat16Bits](r, z.rows()*columns) }
		qkv, o, do, dqkv := acts(3*z.Width), acts(z.Width), acts(z.Width), acts(3*z.Width)
		lse, along := random[float32](r, z.rows()*z.Heads), random[float32](r, z.rows()*z.Heads)
		for i := range lse {
			lse[i] += 8 // as of random queries and keys
		}
		context, heads := int32(z.Context), int32(z.Heads)
		verify(t, cfg, 0.03, src, []kernel.Trial{
			{Kernel: "flash", Grid: g, Args: []any{qkv, o, lse, context, heads}, Outputs: []string{"o", "lse"}},
			{Kernel: "flash_queries", Grid: g, Args: []any{qkv, o, do, lse, along, dqkv, context, heads}, Outputs: []string{"along"}},
			{Kernel: "flash_keys", Grid: g, Args: []any{qkv, do, lse, along, dqkv, context, heads}},
		})
	}
}

func agree(t *testing.T, cfg kernel.VerifyConfig) {
	t.Run("float32", func(t *testing.T) { compare[float32](t, cfg, 1e-4, cases[0], cases[2], cases[3]) })
	t.Run("bfloat16", func(t *testing.T) { compare[memory.BFloat16Bits](t, cfg, 0.03, cases[0], cases[1]) })
}

// compare verifies two launches of each kernel. The bound is relative to 1 plus the size of an
// element.
func compare[T Float](t *testing.T, cfg kernel.VerifyConfig, bound float64, sizes ...sized) {
	seed := rand.Uint64()
	t.Log("seed", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	for _, z := range sizes {
		t.Run(fmt.Sprint(z.Width), func(t *testing.T) { compareSizes[T](t, z, r, cfg, bound) })
	}
}

func compareSizes[T Float](t *testing.T, z sized, r *rand.Rand, cfg kernel.VerifyConfig, bound float64) {
	src := (&Set[T]{Sizes: z.Sizes}).define()
	trials := trialsOf[T](z, r)
	require.Len(t, trials, 2*len(src.Kernels))
	verify(t, cfg, bound, src, trials)
}

func verify(t *testing.T, cfg kernel.VerifyConfig, bound float64, src *kernel.Source, trials []kernel.Trial) {
	tolerance := kernel.Tolerance{Abs: bound, Rel: bound}
	cfg.Tolerances = map[memory.DType]kernel.Tolerance{memory.Float32: tolerance, memory.BFloat16: tolerance}
	err := kernel.Verify(testgpu.Context(t), src, trials, &cfg)
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip(err)
	}
	require.NoError(t, err)
}

// A batch whose tokens embed_back reads in two parts.
func TestEmbedBackOfManyRows(t *testing.T) {
	t.Parallel()
	z := sized{Sizes{Vocab: 101, Context: 83, Width: 32, Heads: 1}, 100}
	r := rand.New(rand.NewPCG(rand.Uint64(), 0))
	text := make([]int32, z.sequences*z.Line())
	for i := range text {
		text[i] = int32(r.IntN(z.Vocab))
	}
	trial := kernel.Trial{Kernel: "embed_back", Grid: z.embedGrid(), Outputs: []string{"dtok", "dpos"}, Args: []any{
		text, random[float32](r, z.rows()*z.Width), make([]float32, z.Vocab*z.Width), make([]float32, z.Context*z.Width), int32(z.rows()), int32(0)}}
	tolerance := map[memory.DType]kernel.Tolerance{memory.Float32: {Abs: 1e-4, Rel: 1e-4}}
	src := (&Set[float32]{Sizes: z.Sizes}).define()
	t.Run("host", func(t *testing.T) {
		err := kernel.Verify(testgpu.Context(t), src, []kernel.Trial{trial}, &kernel.VerifyConfig{Host: true, Tolerances: tolerance})
		if errors.Is(err, exec.ErrNotFound) {
			t.Skip(err)
		}
		require.NoError(t, err)
	})
	t.Run("cuda", func(t *testing.T) {
		cfg := kernel.VerifyConfig{Device: testgpu.CUDA(t, 1)[0], Tolerances: tolerance}
		require.NoError(t, kernel.Verify(testgpu.Context(t), src, []kernel.Trial{trial}, &cfg))
	})
}

// trialsOf has two launches of each kernel, with different flags. A launch that adds to its
// outputs gets random numbers there; other outputs are poisoned.
func trialsOf[T Float](z sized, r *rand.Rand) (list []kernel.Trial) {
	fs := func(n int) []float32 { return random[float32](r, n) }
	ts := func(n int) []T { return random[T](r, n) }
	text := func() []int32 {
		xs := make([]int32, z.sequences*z.Line())
		for i := range xs {
			xs[i] = int32(r.IntN(z.Vocab))
		}
		return xs
	}
	rows, w, v := z.rows(), z.Width, z.Vocab
	n, per := int32(rows), normRows(rows)
	add := func(name string, g kernel.Grid, outputs []string, args ...any) {
		list = append(list, kernel.Trial{Kernel: name, Grid: g, Args: args, Outputs: outputs, Scratch: scratch[name]})
	}
	for flags := range int32(2) {
		set := func(names ...string) []string { // outputs without the flag accumulate
			if flags&accumulate != 0 {
				return nil
			}
			return names
		}
		parts, count := make([]float32, z.partsLen(rows)), []uint32{0}
		add("embed_norm", grid(blocks(rows, warps), threads), []string{"h", "a"}, text(), fs(v*w), fs(z.Context*w), fs(rows*w), fs(w), fs(w), ts(rows*w), n)
		add("add_norm", grid(blocks(rows, warps), threads), []string{"h", "a"}, fs(rows*w), ts(rows*w), fs(rows*w), fs(w), fs(w), ts(rows*w), n)
		add("norm_back", grid(blocks(rows, per), threads), set("dh", "dy", "dw", "db"), ts(rows*w), fs(rows*w), fs(w), fs(rows*w), ts(rows*w), fs(w), fs(w),
			parts, count, n, int32(per), 3*flags)
		outputs := set("dtok", "dpos")
		if flags != 0 {
			outputs = []string{"dpos"}
		}
		add("embed_back", z.embedGrid(), outputs, text(), fs(rows*w), fs(v*w), fs(z.Context*w), n, flags*tied)
		qkv, o, lse := ts(rows*3*w), ts(rows*w), fs(rows*z.Heads)
		add("attention", z.attentionGrid(z.sequences), []string{"o", "lse"}, qkv, o, lse)
		add("attention_back", z.attentionGrid(z.sequences), []string{"dqkv"}, qkv, o, ts(rows*w), lse, ts(rows*3*w))
		add("gelu", elementsGrid[T](rows), []string{"y"}, ts(rows), ts(rows), int64(rows))
		add("gelu_back", elementsGrid[T](rows), nil, ts(rows), ts(rows), int64(rows))
		add("widen", elementsGrid[T](rows), set("sum"), ts(rows), fs(rows), int64(rows), flags)
		add("cross_entropy", grid(rows, z.lossThreads()), set("loss"), ts(rows*v), text(), fs(1), parts, count, float32(0.25), n, flags)
		add("end_step", grid(1, 1), []string{"rate", "other"}, fs(1), fs(1), []int32{3 + 9*flags}, fs(40), int32(20), []float64{0}, []float64{0}, 3e-3, int32(10))
	}
	return list
}

// scratch is memory of kernels that their Go functions do not write.
var scratch = map[string][]string{"norm_back": {"parts"}, "cross_entropy": {"parts"}}

func random[T Float](r *rand.Rand, n int) []T {
	xs := make([]T, n)
	for i := range xs {
		xs[i] = narrow[T](float32(r.NormFloat64()))
	}
	return xs
}
