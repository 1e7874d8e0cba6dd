package kernels

import (
	"bytes"
	_ "embed"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ptxtest"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

var (
	//go:embed testdata/host.h
	hostPrelude string
	//go:embed testdata/host.cc
	hostMain string
)

// The CUDA source, compiled as C++ for the host, and the Go functions give the same
// results for the same launches.
func TestSourceAgreesWithGo(t *testing.T) {
	t.Parallel()
	t.Run("float32", func(t *testing.T) { compare[float32](t) })
	t.Run("bfloat16", func(t *testing.T) { compare[memory.BFloat16Bits](t) })
}

func compare[T Float](t *testing.T) {
	g := newRig[T](t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	all := "-DKERNELS="
	for _, d := range g.k.definitions() {
		all += fmt.Sprintf("KERNEL(%s)", d.Name)
	}
	program := ptxtest.Host(t, ptxtest.HostShim+hostPrelude+source+hostMain, append(options[T](), all, "-w")...)
	cases := g.launches()
	require.Len(t, cases, 2*len(g.k.definitions()))
	var in bytes.Buffer
	for _, c := range cases {
		c.write(&in)
	}
	cmd := exec.CommandContext(testgpu.Context(t), program)
	cmd.Stdin = &in
	out, err := cmd.Output()
	require.NoError(t, err)
	for _, c := range cases {
		out = g.check(c, out)
	}
	require.Empty(t, out)
}

// A launch is a kernel with its arguments: numbers, and slices for pointers.
type launch struct {
	name            string
	blocks, threads int
	args            []any
}

// launches has two launches of each kernel, with different flags.
func (g *rig[T]) launches() (list []launch) {
	fs := func(n int) []float32 { return random[float32](g.r, n) }
	ts := func(n int) []T { return random[T](g.r, n) }
	text := func() []int32 {
		xs := make([]int32, sequences*Line)
		for i := range xs {
			xs[i] = int32(g.r.IntN(Vocab))
		}
		return xs
	}
	const n, w = int32(rows), Width
	add := func(name string, blocks, threads int, args ...any) {
		list = append(list, launch{name, blocks, threads, args})
	}
	for flags := range int32(2) {
		add("embed_norm", blocks(rows, warps), threads, text(), fs(Vocab*w), fs(Context*w), fs(rows*w), fs(w), fs(w), ts(rows*w), n)
		add("add_norm", blocks(rows, warps), threads, fs(rows*w), ts(rows*w), fs(rows*w), fs(w), fs(w), ts(rows*w), n)
		add("norm_back", blocks(rows, normRows), threads, ts(rows*w), fs(rows*w), fs(w), fs(rows*w), ts(rows*w), fs(w), fs(w),
			scratch(g.k.parts.Len()), []uint32{0}, n, 3*flags)
		add("embed_back", Vocab+Context, embedGroups*w, text(), fs(rows*w), fs(Vocab*w), fs(Context*w), n, flags)
		add("attention", sequences*Heads, attentionThreads, ts(rows*3*w), ts(rows*w))
		add("attention_back", sequences*Heads, attentionThreads, ts(rows*3*w), ts(rows*w), ts(rows*3*w))
		add("gelu", blocks(rows, threads), threads, ts(rows), ts(rows), n)
		add("gelu_back", blocks(rows, threads), threads, ts(rows), ts(rows), n)
		add("widen", blocks(rows, threads), threads, ts(rows), fs(rows), n, flags)
		add("cross_entropy", blocks(rows, threads), threads, ts(rows*Vocab), text(), fs(1), scratch(g.k.parts.Len()), []uint32{0},
			float32(0.25), n, flags)
		add("end_step", 1, 1, fs(1), fs(1), []int32{3 + 9*flags}, fs(40), int32(20), []float64{0}, 3e-3, int32(10))
	}
	return list
}

// scratch is memory whose contents may differ.
type scratch int

func random[T Float](r *rand.Rand, n int) []T {
	xs := make([]T, n)
	for i := range xs {
		xs[i] = narrow[T](float32(r.NormFloat64()))
	}
	return xs
}

// write writes the launch as host.cc reads it.
func (l *launch) write(to *bytes.Buffer) {
	put := func(x any) {
		if err := binary.Write(to, binary.LittleEndian, x); err != nil {
			panic(err)
		}
	}
	put(uint32(len(l.name)))
	to.WriteString(l.name)
	put([2]uint32{uint32(l.blocks), uint32(l.threads)})
	for _, a := range l.args {
		if n, ok := a.(scratch); ok {
			a = make([]float32, n)
		}
		switch a.(type) {
		case int32, float32, float64:
		default:
			put(uint32(binary.Size(a)))
		}
		put(a)
	}
}

// check launches the Go function and compares its memory with that of host.cc at the begin
// of out. It returns the rest of out.
func (g *rig[T]) check(l launch, out []byte) []byte {
	k, err := g.k.module.Kernel(l.name)
	require.NoError(g.t, err)
	var args []kernel.Arg
	var after []func()
	for i, a := range l.args {
		what := fmt.Sprintf("%s: argument %d", l.name, i)
		switch a := a.(type) {
		case int32:
			args = append(args, kernel.Scalar[int32](a))
		case float32:
			args = append(args, kernel.Scalar[float32](a))
		case float64:
			args = append(args, kernel.Scalar[float64](a))
		case scratch:
			args = append(args, kernel.Ptr(send(g, make([]float32, a))))
			after = append(after, func() { out = out[4*int(a):] })
		case []int32:
			args, after = same(g, what, a, &out, args, after)
		case []uint32:
			args, after = same(g, what, a, &out, args, after)
		case []float64:
			args, after = same(g, what, a, &out, args, after)
		case []float32:
			args, after = alike(g, what, a, &out, args, after)
		case []memory.BFloat16Bits:
			args, after = alike(g, what, a, &out, args, after)
		}
	}
	require.NoError(g.t, k.Launch(g.k.s, grid(l.blocks, l.threads), args...))
	for _, fn := range after {
		fn()
	}
	return out
}

// fetch returns the memory of Go, and that of host.cc at the begin of out, which it cuts off.
func fetch[T Float, E memory.Element](g *rig[T], out *[]byte, x memory.Slice[E]) (here, host []E) {
	here, host = make([]E, x.Len()), make([]E, x.Len())
	require.NoError(g.t, x.CopyTo(g.k.s, here))
	used, err := binary.Decode(*out, binary.LittleEndian, host)
	require.NoError(g.t, err)
	*out = (*out)[used:]
	return here, host
}

// same adds an argument whose memory is the same afterwards.
func same[T Float, E memory.Element](g *rig[T], what string, a []E, out *[]byte, args []kernel.Arg, after []func()) ([]kernel.Arg, []func()) {
	x := send(g, a)
	return append(args, kernel.Ptr(x)), append(after, func() {
		here, host := fetch(g, out, x)
		require.Equal(g.t, here, host, what)
	})
}

// alike adds an argument whose memory is nearly the same afterwards.
func alike[T Float, E Float](g *rig[T], what string, a []E, out *[]byte, args []kernel.Arg, after []func()) ([]kernel.Arg, []func()) {
	x, bound := send(g, a), 1e-4
	if memory.DTypeOf[T]() == memory.BFloat16 {
		bound = 0.03
	}
	return append(args, kernel.Ptr(x)), append(after, func() {
		here, host := fetch(g, out, x)
		theirs := wide(host)
		for i, v := range wide(here) {
			if e := math.Abs(float64(v - theirs[i])); !(e <= bound*(1+math.Abs(float64(v)))) {
				require.Failf(g.t, what, "element %d is %v on the host, and %v in Go", i, theirs[i], v)
			}
		}
	})
}
