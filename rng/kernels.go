package rng

import (
	_ "embed"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kept"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/ptx"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
)

//go:embed rng.cu
var source string

// packed is rng.cu compiled for each distribution and element type; make ptx
// writes it.
//
//go:embed rng.ptx.zst
var packed []byte

var archive = ptx.Open(packed)

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

var toolboxKey kept.Key

func tools(dev *device.Device) *toolbox {
	return gpu.DeviceOf(dev).Local(&toolboxKey, func() any { return new(toolbox) }).(*toolbox)
}

// macros returns the compiler options that select a kernel in rng.cu.
func macros(d dist, f *format) []string {
	return []string{"--define-macro=CHORUS_DIST=" + templates[d], "--define-macro=CHORUS_TYPE=" + f.c}
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
	kern.Embed(src, archive)
	kern.MakeResident(src)
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

// prepare reads the grid of the device. t.mu is held.
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
