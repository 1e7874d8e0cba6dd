// Package nancheck looks for elements that are not a number in the inputs of collectives, by a
// kernel on the operation's stream (TORCH_NCCL_NAN_CHECK). The host reads the result from pinned
// memory and waits for nothing.
package nancheck

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

const (
	threads   = 256 // of a block
	maxBlocks = 1024
	slots     = 64 // checks that may run at the same time
)

// A Checker checks the operations of one rank.
type Checker struct {
	k     *kernels
	own   *stream.Stream         // orders the memory
	words memory.Slice[uint64]   // whether found is claimed, and the slots
	found *memory.Pinned[uint64] // the operation, 0 if there is none, and the index

	mu   sync.RWMutex // held while found may be closed
	data []uint64     // of found, and after Close a copy
}

// New returns a Checker, and loads the kernels.
func New(dev *device.Device) (c *Checker, err error) {
	c = &Checker{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("nccl: check for NaN on %s: %w", dev, err), c.Close())
			c = nil
		}
	}()
	if c.k, err = kernelsOf(dev); err != nil {
		return c, err
	}
	if c.own, err = stream.New(dev, nil); err != nil {
		return c, err
	}
	if c.words, err = memory.Make[uint64](c.own, 1+2*slots); err != nil {
		return c, err
	}
	if err = c.words.Zero(c.own); err != nil {
		return c, err
	}
	if c.found, err = memory.MakePinned[uint64](dev, 2); err != nil {
		return c, err
	}
	clear(c.found.Data())
	c.data = c.found.Data()
	return c, c.own.Sync(context.Background())
}

// Checks reports whether elements of a type can be NaN.
func Checks(t memory.DType) bool { return infinities[t] != 0 }

// infinities has the bits of infinity, or of the largest number of a type without infinity.
var infinities = [256]uint64{
	memory.Float8E4M3: 0x7e, memory.Float8E5M2: 0x7c, memory.Float16: 0x7c00, memory.BFloat16: 0x7f80,
	memory.Float32: 0x7f800000, memory.Float64: 0x7ff0000000000000,
}

// Check enqueues, on s, the check of n elements of a type for which Checks returns true. The
// operation is a number, at least 1, that Found returns.
func (c *Checker) Check(s *stream.Stream, at uint64, n int, t memory.DType, operation uint64) error {
	if n == 0 {
		return nil
	}
	if err := c.words.RecordStream(s); err != nil {
		return err
	}
	if err := c.found.RecordStream(s); err != nil {
		return err
	}
	k := c.k[t.Size()]
	slot := 1 + 2*int(operation%slots)
	grid := kernel.Grid{Blocks: [3]uint32{uint32(min((n-1)/threads+1, maxBlocks)), 1, 1}, Threads: [3]uint32{threads, 1, 1}}
	return k.Launch(s, grid, kernel.Address(at), kernel.Scalar(uint64(n)), kernel.Scalar(infinities[t]), kernel.Scalar(operation),
		kernel.Ptr(c.words.Slice(0, 1)), kernel.Ptr(c.words.Slice(slot, slot+2)), kernel.PinnedPtr(c.found))
}

// Found returns the first operation with a NaN so far, and the index of its first NaN. After the
// operation's stream has passed the check, the result is final. It may be called at any time; Close
// keeps the result.
func (c *Checker) Found() (operation uint64, index int, found bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if operation = atomic.LoadUint64(&c.data[0]); operation == 0 {
		return 0, 0, false
	}
	return operation, int(atomic.LoadUint64(&c.data[1])), true
}

// Close frees the memory once the streams have passed the checks.
func (c *Checker) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	last := make([]uint64, 2)
	for i := range c.data {
		last[i] = atomic.LoadUint64(&c.data[i])
	}
	c.data = last
	return errors.Join(c.words.Close(), c.found.Close(), c.own.Close())
}

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
