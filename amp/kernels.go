package amp

import (
	_ "embed"
	"fmt"
	"math"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/kernel"
)

//go:embed amp.cu
var source string

// kernels are the kernels of a device.
type kernels struct{ update, put *kernel.Kernel }

var loaded kern.PerDevice[kernels]

// kernelsOf returns the kernels of a device. The first call compiles and loads them.
func kernelsOf(dev *device.Device) (*kernels, error) { return loaded.Of(dev, (*kernels).load) }

func (k *kernels) load(dev *device.Device) error {
	p, f, i := kernel.Pointer, kernel.F32, kernel.I32
	src := &kernel.Source{Name: "amp.cu", CUDA: source, Kernels: []kernel.Def{
		{Name: "update", Params: []kernel.Param{p, p, p, p, i, f, f, i}, Go: standInUpdate},
		{Name: "put", Params: []kernel.Param{p, p, p, f, i}, Go: standInPut},
	}}
	kern.MakeResident(src)
	m, err := kernel.Compile(dev, src)
	if err == nil {
		k.update, err = m.Kernel("update")
	}
	if err == nil {
		k.put, err = m.Kernel("put")
	}
	if err != nil {
		return fmt.Errorf("amp: %w", err)
	}
	return nil
}

var one = kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}

// numbers are the scale, its inverse and the tracker of a launch on a virtual device.
func numbers(c *kernel.Call) (scale, inverse *float32, tracker *int32) {
	return &kernel.Update[float32](c, 0, 1)[0], &kernel.Update[float32](c, 1, 1)[0], &kernel.Update[int32](c, 2, 1)[0]
}

func standInUpdate(c *kernel.Call) {
	scale, inverse, tracker := numbers(c)
	bad := false
	for _, x := range kernel.Read[float32](c, 3, int(kernel.Get[int32](c, 4))) {
		bad = bad || x != 0
	}
	switch more := *scale * kernel.Get[float32](c, 5); {
	case bad:
		*scale *= kernel.Get[float32](c, 6)
		*tracker = 0
	case *tracker+1 != kernel.Get[int32](c, 7):
		*tracker++
	default:
		*tracker = 0
		if !math.IsInf(float64(more), 0) && more == more {
			*scale = more
		}
	}
	*inverse = float32(1 / float64(*scale))
}

func standInPut(c *kernel.Call) {
	scale, inverse, tracker := numbers(c)
	*scale = kernel.Get[float32](c, 3)
	*inverse = float32(1 / float64(*scale))
	if n := kernel.Get[int32](c, 4); n >= 0 {
		*tracker = n
	}
}

// refuse returns the error of an operation that changed nothing.
func refuse(op, format string, args ...any) error {
	return fmt.Errorf("amp: %s: %w", op, fmt.Errorf(format, args...))
}
