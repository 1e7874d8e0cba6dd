package optim

import (
	_ "embed"
	"errors"
	"fmt"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

//go:embed optim.cu
var source string

// kernels are the kernels of a device.
type kernels struct {
	adam, sgd, put64, put32, store           *kernel.Kernel
	norm, coefficient, scale, clamp, unscale *kernel.Kernel
}

var loaded inside.PerDevice[kernels]

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
		{&k.store, kernel.Def{Name: "store_addresses", Params: []kernel.Param{p, kernel.Struct(8 * mostAddresses), kernel.U32, kernel.U32, kernel.U32}, Go: standInStore}},
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
	inside.MakeResident(src)
	inside.Declare(src, map[string]string{"adam": "rrrwwrrr--", "sgd": "rrrwwrrr--"})
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

// The elements of a block. A smaller chunk keeps all multiprocessors of a GPU busy with a small
// model. Norms always have the largest chunk, because their rounding depends on it.
const (
	mostChunk  = 16384
	leastChunk = 1024
)

// chunkOf returns the elements of a block for a device that works on n elements.
func chunkOf(dev *device.Device, n int) (int, error) {
	p, err := dev.Properties()
	if err != nil {
		return 0, err
	}
	chunk := mostChunk
	for chunk > leastChunk && n/chunk < 4*p.Multiprocessors {
		chunk /= 2
	}
	return chunk, nil
}

// These constants must agree with optim.cu.
const (
	threads = 256
	lanes   = 4 // elements that a thread loads at once
)

// An entry is a parameter as the kernels see it; a missing part is 0.
type entry struct {
	value, grad, first, second, most, copied, n uint64
	group, types                                uint32
}

// A list is a gradient as the kernels see it.
type list struct {
	at, n        uint64
	dtype, first uint32 // the first of its blocks
}

// A place is the work of one block: a chunk of an entry or of a list.
type place struct {
	row, size uint32
	begin     uint64
}

// A table is rows and the work of the blocks, in device memory.
type table[R entry | list] struct {
	rows   []R
	blocks []place
	memory memory.Slice[uint8] // the rows, and then the blocks
}

// add adds a row of n elements, which has a block even if it has no elements.
func (t *table[R]) add(row R, n, chunk int) {
	for at := 0; at == 0 || at < n; at += chunk {
		t.blocks = append(t.blocks, place{uint32(len(t.rows)), uint32(chunk), uint64(at)})
	}
	t.rows = append(t.rows, row)
}

// upload writes the table to device memory.
func (t *table[R]) upload(s *stream.Stream) (err error) {
	t.memory, err = memory.MakeFrom(s, append(bytesOf(t.rows), bytesOf(t.blocks)...))
	return err
}

// bytesOf returns a copy of the memory of xs.
func bytesOf[T any](xs []T) []byte {
	if len(xs) == 0 {
		return nil
	}
	return append([]byte{}, unsafe.Slice((*byte)(unsafe.Pointer(&xs[0])), len(xs)*int(unsafe.Sizeof(xs[0])))...)
}

// parts returns the device memory of the rows and of the blocks.
func (t *table[R]) parts() (rows, blocks memory.Slice[uint8]) {
	var r R
	n := len(t.rows) * int(unsafe.Sizeof(r))
	return t.memory.Slice(0, n), t.memory.Slice(n, t.memory.Len())
}

func (t *table[R]) close() error { return t.memory.Close() }

// closeAll closes tensors.
func closeAll(ts []tensor.Tensor) error {
	errs := make([]error, len(ts))
	for i, t := range ts {
		errs[i] = t.Close()
	}
	return errors.Join(errs...)
}
