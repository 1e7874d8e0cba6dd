package optim

import (
	_ "embed"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/kernel"
)

//go:embed optim.cu
var source string

// kernels are the kernels of a device.
type kernels struct {
	adam, sgd, put64, put32                  *kernel.Kernel
	norm, coefficient, scale, clamp, unscale *kernel.Kernel
}

var loaded kern.PerDevice[kernels]

// kernelsOf returns the kernels of a device. The first call compiles and loads them, for which the driver may
// wait for all work of the device, so optimisers and gradients call it when they are created.
func kernelsOf(dev *device.Device) (*kernels, error) { return loaded.Of(dev, (*kernels).load) }

// work is the parameters of the optimisers' kernels.
var work = []kernel.Param{
	kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.Pointer, // entries, blocks, groups, steps, done
	kernel.Pointer, kernel.Pointer, kernel.Pointer, kernel.U32, kernel.U32, // scale, inf, coef, count, flags
}

func (k *kernels) load(dev *device.Device) error {
	p, f := kernel.Pointer, kernel.F32
	defs := []struct {
		to **kernel.Kernel
		kernel.Def
	}{
		{&k.adam, kernel.Def{Name: "adam", Params: work, Go: standInAdam}},
		{&k.sgd, kernel.Def{Name: "sgd", Params: work, Go: standInSGD}},
		{&k.put64, kernel.Def{Name: "put64", Params: []kernel.Param{p, kernel.F64}, Go: func(c *kernel.Call) { kernel.Update[float64](c, 0, 1)[0] = kernel.Get[float64](c, 1) }}},
		{&k.put32, kernel.Def{Name: "put32", Params: []kernel.Param{p, f}, Go: func(c *kernel.Call) { kernel.Update[float32](c, 0, 1)[0] = kernel.Get[float32](c, 1) }}},
		{&k.norm, kernel.Def{Name: "sum_powers", Params: []kernel.Param{p, p, p, p, p, kernel.U32, kernel.F64}, Go: standInNorm}},
		{&k.coefficient, kernel.Def{Name: "clip_factor", Params: []kernel.Param{p, p, p, kernel.F64, f, kernel.U32}, Go: standInCoefficient}},
		{&k.scale, kernel.Def{Name: "multiply", Params: []kernel.Param{p, p, p}, Go: standInScale}},
		{&k.clamp, kernel.Def{Name: "limit_size", Params: []kernel.Param{p, p, f}, Go: standInClamp}},
		{&k.unscale, kernel.Def{Name: "unscale", Params: []kernel.Param{p, p, p, p}, Go: standInUnscale}},
	}
	src := &kernel.Source{Name: "optim.cu", CUDA: source}
	for _, d := range defs {
		src.Kernels = append(src.Kernels, d.Def)
	}
	kern.MakeResident(src)
	kern.Declare(src, map[string]string{"adam": "rrrwwrrr--", "sgd": "rrrwwrrr--"})
	m, err := kernel.Compile(dev, src)
	if err != nil {
		return fmt.Errorf("optim: %w", err)
	}
	for _, d := range defs {
		if *d.to, err = m.Kernel(d.Name); err != nil {
			return fmt.Errorf("optim: %w", err)
		}
	}
	return nil
}

// grid returns one block for each place.
func grid(blocks int) kernel.Grid {
	return kernel.Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{threads, 1, 1}}
}

var one = kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}
