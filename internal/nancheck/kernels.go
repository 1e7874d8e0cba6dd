package nancheck

import (
	_ "embed"
	"fmt"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/kernel"
)

//go:embed nancheck.cu
var source string

// kernels are the kernels of a device, by the size of an element.
type kernels [9]*kernel.Kernel

var loaded kern.PerDevice[kernels]

// kernelsOf returns the kernels of a device. The first call compiles and loads them.
func kernelsOf(dev *device.Device) (*kernels, error) { return loaded.Of(dev, (*kernels).load) }

func (k *kernels) load(dev *device.Device) error {
	src := &kernel.Source{Name: "nancheck.cu", CUDA: source}
	standIns := map[int]func(*kernel.Call){1: look[uint8], 2: look[uint16], 4: look[uint32], 8: look[uint64]}
	for size, fn := range standIns {
		src.Kernels = append(src.Kernels, kernel.Def{Name: fmt.Sprint("look", size), Go: fn, Params: []kernel.Param{
			kernel.Pointer, kernel.U64, kernel.U64, kernel.U64, kernel.Pointer, kernel.Pointer, kernel.Pointer,
		}})
	}
	kern.MakeResident(src)
	m, err := kernel.Compile(dev, src)
	if err != nil {
		return err
	}
	for size := range standIns {
		if k[size], err = m.Kernel(fmt.Sprint("look", size)); err != nil {
			return err
		}
	}
	return nil
}

// look implements the kernel for virtual devices. It needs no slot, because it runs as a whole.
func look[W word](c *kernel.Call) {
	n, operation := int(kernel.Get[uint64](c, 1)), kernel.Get[uint64](c, 3)
	if i := firstNaN(kernel.Read[W](c, 0, n), kernel.Get[uint64](c, 2)); i >= 0 {
		publish(kern.Shared[uint64](c, 6, 0, 2), operation, uint64(i))
	}
}

// publish writes a result, unless there is one.
func publish(found []uint64, operation, index uint64) {
	if atomic.LoadUint64(&found[0]) == 0 {
		atomic.StoreUint64(&found[1], index)
		atomic.StoreUint64(&found[0], operation)
	}
}

// A word has the bits of an element.
type word interface {
	uint8 | uint16 | uint32 | uint64
}

// firstNaN returns the index of the first NaN, or -1.
func firstNaN[W word](x []W, infinity uint64) int {
	for i, v := range x {
		if magnitude := v & (^W(0) >> 1); uint64(magnitude) > infinity {
			return i
		}
	}
	return -1
}
