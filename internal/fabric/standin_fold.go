package fabric

import (
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/kernel"
)

// standInFold returns the function that implements the kernel of a stage in Go, for virtual devices.
func (f *format) standInFold(op flight.Reduction, stage Stage) func(*kernel.Call) {
	return func(c *kernel.Call) {
		x := Fold{
			Base: c.Address(0), Stride: kernel.Get[uint64](c, 1), Own: c.Address(2), Mine: int(kernel.Get[uint32](c, 3)),
			Ranks: int(kernel.Get[uint32](c, 4)), Block: int(kernel.Get[uint32](c, 5)), Dst: c.Address(6), Count: int(kernel.Get[uint64](c, 7)),
			DType: f.dtype, Op: op, Stage: stage, All: int(kernel.Get[uint32](c, 9)),
		}
		in, out := x.sizes()
		ranks := make([][]byte, x.Ranks)
		for r := range ranks {
			ranks[r] = kernel.ReadAddress[uint8](c, x.of(r), x.Count*in)
		}
		f.pieces(&x, kernel.UpdateAddress[uint8](c, x.Dst, x.Count*out), ranks)
	}
}

// standInScale implements the kernel scale.
func (f *format) standInScale(c *kernel.Call) {
	size := f.dtype.Size()
	bytes, bits := int(kernel.Get[uint64](c, 2))*size, kernel.Get[uint64](c, 3)
	if c.Address(4) != 0 {
		bits = 0
		for i, b := range kernel.Read[uint8](c, 4, size) {
			bits |= uint64(b) << (8 * i)
		}
	}
	f.scale(kernel.Update[uint8](c, 1, bytes), kernel.Read[uint8](c, 0, bytes), bits)
}
