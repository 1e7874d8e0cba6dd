package rng

import (
	_ "embed"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

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
	src := &kernel.Source{Options: []string{"--define-macro=CHORUS_ELEMENT=" + f.c}}
	switch kind {
	case drawsModule:
		src.Name, src.CUDA, src.Kernels = "draws.cu", source+drawsSource, drawKernels[T](f)
		if f.digits > 0 {
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
	kern.MakeResident(src)
	kern.Declare(src, drawAccesses)
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
