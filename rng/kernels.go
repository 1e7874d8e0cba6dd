package rng

import (
	_ "embed"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudacc"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

//go:embed rng.cu
var source string

// packed is rng.cu compiled for each distribution and element type; make ptx
// writes it.
//
//go:embed rng.ptx.zst
var packed []byte

var archive = cudacc.OpenArchive(packed)

// A dist is a distribution.
type dist int

const (
	uniform dist = iota
	normal
	logNormal
	exponential
	bernoulli
	geometric
	random
	randomNear // with bounds, from 32 bits
	randomFar  // with bounds, from 64 bits
	cauchy     // in draws.cu
	dists
)

// templates holds the names in rng.cu, ops the names in errors.
var (
	templates = [dists]string{"Uniform", "Normal", "LogNormal", "Exponential", "Bernoulli", "Geometric", "Random", "RandomNear", "RandomFar", "Cauchy"}
	ops       = [dists]string{"rng: uniform", "rng: normal", "rng: log-normal", "rng: exponential", "rng: bernoulli", "rng: geometric", "rng: random", "rng: random", "rng: random", "rng: cauchy"}
)

// unroll returns the number of elements from one draw of four words.
func (d dist) unroll(f *format) int {
	wide := f.wide
	switch d {
	case random:
		wide = f.wide || f.dtype == memory.Int64
	case randomNear:
		wide = false
	case randomFar:
		wide = true
	}
	if wide {
		return 2
	}
	return 4
}

// A toolbox holds the kernels and the policy of a device.
type toolbox struct {
	kernels [dists][len(formats)]atomic.Pointer[kernel.Kernel]

	modules [moduleKinds][len(formats)]atomic.Pointer[kernel.Module]

	mu     sync.Mutex // guards the fields below, and compilation
	policy policy     // set before the first kernel
}

var toolboxKey handle.Key

func tools(dev *device.Device) *toolbox {
	return gpu.DeviceOf(dev).Local(&toolboxKey, func() any { return new(toolbox) }).(*toolbox)
}

// macros returns the compiler options that select a kernel in rng.cu.
func macros(d dist, f *format) []string {
	return []string{"--define-macro=CHORUS_DIST=" + templates[d], "--define-macro=CHORUS_TYPE=" + f.Short}
}

// kernelOf returns the kernel for a distribution and an element type, and loads
// it at the first call.
func kernelOf[T memory.Element](t *toolbox, dev *device.Device, d dist) (*kernel.Kernel, error) {
	f := formatOf[T]()
	at := &t.kernels[d][f.dtype]
	if k := at.Load(); k != nil {
		return k, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if k := at.Load(); k != nil {
		return k, nil
	}
	if d == cauchy {
		m, err := loadModule[T](t, dev, ops[d], drawsModule)
		if err != nil {
			return nil, err
		}
		k, err := m.Kernel("cauchy_kernel")
		at.Store(k)
		return k, err
	}
	if err := t.prepare(dev); err != nil {
		return nil, fmt.Errorf("%s: %w", ops[d], err)
	}
	src := &kernel.Source{
		Name:    "rng.cu",
		CUDA:    source,
		Options: macros(d, f),
		Kernels: []kernel.Def{{Name: "fill_kernel", Params: params, Go: standIn[T](d, f)}},
	}
	inside.Embed(src, archive)
	inside.MakeResident(src)
	m, err := kernel.Compile(dev, src)
	if err != nil {
		return nil, fmt.Errorf("%s of %s: %w", ops[d], f.dtype, err)
	}
	k, err := m.Kernel("fill_kernel")
	if err != nil {
		return nil, fmt.Errorf("%s of %s: %w", ops[d], f.dtype, err)
	}
	at.Store(k)
	return k, nil
}

// prepare reads from the device how many blocks fill it, unless that is known
// already. t.mu is held.
func (t *toolbox) prepare(dev *device.Device) error {
	if t.policy.blocks != 0 {
		return nil
	}
	p, err := dev.Properties()
	if err != nil {
		return err
	}
	t.policy.blocks = uint32(p.Multiprocessors * (p.ThreadsPerMultiproc / block))
	return nil
}

// params are the slice, its length, five 64-bit numbers in halves, and the place
// of a graph's launch.
var params = []kernel.Param{kernel.Pointer, kernel.I32,
	kernel.I32, kernel.I32, kernel.I32, kernel.I32,
	kernel.I32, kernel.I32, kernel.I32, kernel.I32, kernel.I32, kernel.I32, kernel.Pointer}

// The sources that NVRTC compiles after rng.cu.
var (
	//go:embed draws.cu
	drawsSource string
	//go:embed sort.cu
	sortSource string
	//go:embed samples.cu
	samplesSource string
)

// A moduleKind is one of these sources.
type moduleKind int

const (
	drawsModule moduleKind = iota
	sortModule
	samplesModule
	moduleKinds
)

// sourceOf returns a source for an element type.
func sourceOf[T memory.Element](kind moduleKind) *kernel.Source {
	f := formatOf[T]()
	src := &kernel.Source{Options: []string{"--define-macro=CHORUS_ELEMENT=" + f.Short}}
	switch kind {
	case drawsModule:
		src.Name, src.CUDA, src.Kernels = "draws.cu", source+drawsSource, drawKernels[T](f)
		if f.IsFloat() {
			src.Options = append(src.Options, "--define-macro=CHORUS_FLOATING=1")
		}
	case sortModule:
		src.Name, src.CUDA, src.Kernels = "sort.cu", source+sortSource, sortKernels[T]()
	case samplesModule:
		src.Name, src.CUDA, src.Kernels = "samples.cu", source+samplesSource, sampleKernels[T](f)
	}
	return src
}

// drawAccesses has the kernels whose parameters are macros, for the sanitizer.
var drawAccesses = map[string]string{"bernoulli_kernel": "w---rr---", "poisson_kernel": "w---rr---", "normal_kernel": "w-r---r---"}

// loadModule returns the module of a source and an element type, and loads it at the first call.
// t.mu is held.
func loadModule[T memory.Element](t *toolbox, dev *device.Device, op string, kind moduleKind) (*kernel.Module, error) {
	at := &t.modules[kind][memory.DTypeOf[T]()]
	if m := at.Load(); m != nil {
		return m, nil
	}
	if err := t.prepare(dev); err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	src := sourceOf[T](kind)
	inside.MakeResident(src)
	inside.Declare(src, drawAccesses)
	m, err := kernel.Compile(dev, src)
	if err != nil {
		return nil, fmt.Errorf("%s of %s: %w", op, memory.DTypeOf[T](), err)
	}
	at.Store(m)
	return m, nil
}

// A launcher launches the kernels of a module on a stream.
type launcher struct {
	op     string
	stream *stream.Stream
	policy policy
	module *kernel.Module
}

func launcherOf[T memory.Element](op string, s *stream.Stream, kind moduleKind) (launcher, error) {
	t := tools(s.Device())
	t.mu.Lock()
	defer t.mu.Unlock()
	m, err := loadModule[T](t, s.Device(), op, kind)
	return launcher{op: op, stream: s, policy: t.policy, module: m}, err
}

// each launches a kernel with a thread for each of n elements, or fewer threads that do several.
func (l launcher) each(name string, n int, args ...kernel.Arg) error {
	return l.launch(name, min((n-1)/block+1, int(l.policy.blocks)), block, args...)
}

func (l launcher) launch(name string, blocks, threads int, args ...kernel.Arg) error {
	k, err := l.module.Kernel(name)
	if err != nil {
		return err
	}
	return k.Launch(l.stream, kernel.Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{uint32(threads), 1, 1}}, args...)
}

// count passes a number of elements.
func count(n int) kernel.Arg { return kernel.Scalar(uint64(n)) }

// block is the number of threads of a block, as in torch.
const block = 256

// A policy is the grid of torch's fills on a device.
type policy struct{ blocks uint32 } // maximum number of blocks

// grid returns the number of blocks for n elements, n > 0.
func (p policy) grid(n int) uint32 { return uint32(min((n-1)/block+1, int(p.blocks))) }

// increment returns the advance of the offset: 4 words for each draw of a thread,
// and each draw gives unroll elements.
func (p policy) increment(n, unroll int) uint64 {
	return uint64((n-1)/(block*int(p.grid(n))*unroll)+1) * 4
}

// fits reports whether torch fills n elements at once: the offset of the last
// element must fit into 31 bits. Otherwise torch fills the two halves one after
// the other.
func fits(n, size int) bool { return n <= math.MaxInt32 && (n-1)*size < math.MaxInt32 }

// advance returns the advance of the offset for a fill of n elements, possibly in parts.
func (p policy) advance(n, size, unroll int) uint64 {
	if fits(n, size) {
		return p.increment(n, unroll)
	}
	return p.advance(n/2, size, unroll) + p.advance(n-n/2, size, unroll)
}

// A job is one fill.
type job struct {
	kernel  *kernel.Kernel
	stream  *stream.Stream
	policy  policy
	unroll  int
	place   place
	a, b, c uint64
}

// run performs a fill, where a, b and c are the parameters of the distribution.
func run[T memory.Element](g *Generator, s *stream.Stream, x memory.Slice[T], d dist, a, b, c uint64) error {
	g, err := check(ops[d], g, s, x)
	if err != nil || x.Len() == 0 {
		return err
	}
	t := tools(s.Device())
	k, err := kernelOf[T](t, s.Device(), d)
	if err != nil {
		return err
	}
	j := job{kernel: k, stream: s, policy: t.policy, unroll: d.unroll(formatOf[T]()), a: a, b: b, c: c}
	n, size := x.Len(), x.DType().Size()
	total := j.policy.advance(n, size, j.unroll)
	skip := uint64(0)
	if !fits(n, size) {
		// torch first draws the numbers for the whole fill, and then the numbers
		// for the parts.
		skip = j.policy.increment(n, j.unroll)
	}
	if j.place, err = g.draw(s, skip+total); err != nil {
		return fmt.Errorf("%s: %w", ops[d], err)
	}
	_, err = enqueue(&j, x, j.place.offset+skip)
	return err
}

// enqueue launches the kernel for x, or for its halves, and returns the next
// offset.
func enqueue[T memory.Element](j *job, x memory.Slice[T], offset uint64) (uint64, error) {
	n := x.Len()
	if !fits(n, x.DType().Size()) {
		offset, err := enqueue(j, x.Slice(0, n/2), offset)
		if err != nil {
			return offset, err
		}
		return enqueue(j, x.Slice(n/2, n), offset)
	}
	grid := kernel.Grid{Blocks: [3]uint32{j.policy.grid(n), 1, 1}, Threads: [3]uint32{block, 1, 1}}
	err := j.kernel.Launch(j.stream, grid, kernel.Ptr(x), kernel.Scalar(int32(n)),
		low(j.place.seed), high(j.place.seed), low(offset), high(offset),
		low(j.a), high(j.a), low(j.b), high(j.b), low(j.c), high(j.c), j.place.launch)
	return offset + j.policy.increment(n, j.unroll), err
}

// low and high pass a 64-bit number in halves, as Philox and the stand-ins need
// it.
func low(v uint64) kernel.Arg  { return kernel.Scalar(int32(uint32(v))) }
func high(v uint64) kernel.Arg { return kernel.Scalar(int32(uint32(v >> 32))) }
