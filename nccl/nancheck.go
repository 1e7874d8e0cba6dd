package nccl

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

const (
	nanThreads   = 256 // of a block
	maxNaNBlocks = 1024
	nanSlots     = 64 // checks that may run at the same time
)

// A nanChecker looks for elements that are not a number in the inputs of the operations of one rank, by a kernel on
// the stream of the operation (TORCH_NCCL_NAN_CHECK). The host reads the result from pinned memory and waits for nothing.
type nanChecker struct {
	k     *nanKernels
	own   *stream.Stream         // orders the memory
	words memory.Slice[uint64]   // whether found is claimed, and the slots
	found *memory.Pinned[uint64] // the operation, 0 if there is none, and the index

	mu   sync.RWMutex // held while found may be closed
	data []uint64     // of found, and after Close a copy
}

// newNaNChecker returns a nanChecker, and loads the kernels.
func newNaNChecker(dev *device.Device) (c *nanChecker, err error) {
	c = &nanChecker{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("nccl: check for NaN on %s: %w", dev, err), c.Close())
			c = nil
		}
	}()
	if c.k, err = nanKernelsOf(dev); err != nil {
		return c, err
	}
	if c.own, err = stream.New(dev, nil); err != nil {
		return c, err
	}
	if c.words, err = memory.Make[uint64](c.own, 1+2*nanSlots); err != nil {
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

// canBeNaN reports whether elements of a type can be NaN.
func canBeNaN(t memory.DType) bool { return infinities[t] != 0 }

// infinities has the bits of infinity, or of the largest number of a type without infinity.
var infinities = [256]uint64{
	memory.Float8E4M3: 0x7e, memory.Float8E5M2: 0x7c, memory.Float16: 0x7c00, memory.BFloat16: 0x7f80,
	memory.Float32: 0x7f800000, memory.Float64: 0x7ff0000000000000,
}

// Check enqueues, on s, the check of n elements of a type for which canBeNaN returns true. The
// operation is a number, at least 1, that Found returns.
func (c *nanChecker) Check(s *stream.Stream, at uint64, n int, t memory.DType, operation uint64) error {
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
	slot := 1 + 2*int(operation%nanSlots)
	grid := kernel.Grid{Blocks: [3]uint32{uint32(min((n-1)/nanThreads+1, maxNaNBlocks)), 1, 1}, Threads: [3]uint32{nanThreads, 1, 1}}
	return k.Launch(s, grid, kernel.Address(at), kernel.Scalar(uint64(n)), kernel.Scalar(infinities[t]), kernel.Scalar(operation),
		kernel.Ptr(c.words.Slice(0, 1)), kernel.Ptr(c.words.Slice(slot, slot+2)), kernel.PinnedPtr(c.found))
}

// Found returns the first operation with a NaN so far, and the index of its first NaN. After the
// operation's stream has passed the check, the result is final. It may be called at any time; Close
// keeps the result.
func (c *nanChecker) Found() (operation uint64, index int, found bool) {
	c.mu.RLock()
	defer c.mu.RUnlock()
	if operation = atomic.LoadUint64(&c.data[0]); operation == 0 {
		return 0, 0, false
	}
	return operation, int(atomic.LoadUint64(&c.data[1])), true
}

// Close frees the memory once the streams have passed the checks.
func (c *nanChecker) Close() error {
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
var nanSource string

// nanKernels are the kernels of a device, by the size of an element.
type nanKernels [9]*kernel.Kernel

var loadedNaNKernels inside.PerDevice[nanKernels]

// nanKernelsOf returns the kernels of a device, which the first call compiles
// and loads.
func nanKernelsOf(dev *device.Device) (*nanKernels, error) {
	return loadedNaNKernels.Of(dev, (*nanKernels).load)
}

func (k *nanKernels) load(dev *device.Device) error {
	src := &kernel.Source{Name: "nancheck.cu", CUDA: nanSource}
	standIns := map[int]func(*kernel.Call){1: lookForNaN[uint8], 2: lookForNaN[uint16], 4: lookForNaN[uint32], 8: lookForNaN[uint64]}
	for size, fn := range standIns {
		src.Kernels = append(src.Kernels, kernel.Def{Name: fmt.Sprint("look", size), Go: fn, Params: []kernel.Param{
			kernel.Pointer, kernel.U64, kernel.U64, kernel.U64, kernel.Pointer, kernel.Pointer, kernel.Pointer,
		}})
	}
	inside.MakeResident(src)
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

// lookForNaN implements the kernel for virtual devices. It needs no slot, because it runs as a whole.
func lookForNaN[W nanWord](c *kernel.Call) {
	n, operation := int(kernel.Get[uint64](c, 1)), kernel.Get[uint64](c, 3)
	if i := firstNaN(kernel.Read[W](c, 0, n), kernel.Get[uint64](c, 2)); i >= 0 {
		publishNaN(inside.Shared[uint64](c, 6, 0, 2), operation, uint64(i))
	}
}

// publishNaN writes a result, unless there is one.
func publishNaN(found []uint64, operation, index uint64) {
	if atomic.LoadUint64(&found[0]) == 0 {
		atomic.StoreUint64(&found[1], index)
		atomic.StoreUint64(&found[0], operation)
	}
}

// A nanWord has the bits of an element.
type nanWord interface {
	uint8 | uint16 | uint32 | uint64
}

// firstNaN returns the index of the first NaN, or -1.
func firstNaN[W nanWord](x []W, infinity uint64) int {
	for i, v := range x {
		if magnitude := v & (^W(0) >> 1); uint64(magnitude) > infinity {
			return i
		}
	}
	return -1
}

// nanCheck reports whether a configuration asks for checks.
func (c *Config) nanCheck() (bool, error) {
	word, err := env.NCCLNaNCheck.OneOf("0", "1")
	return c != nil && c.NaNCheck || word == "1", err
}

// openNaNCheck opens the checker of a communicator, if the configuration asks for one.
func (c *Communicator) openNaNCheck() (err error) {
	if c.checksNaN {
		c.nan, err = newNaNChecker(c.dev)
	}
	return err
}

// checkInput enqueues the check of the operation's input, if the communicator
// checks inputs and this one can contain a NaN. It omits dispatches and
// combines, because tokens without an expert may have any contents.
func (o *operation) checkInput() error {
	if c := o.comm; c.nan != nil && canBeNaN(o.DType) && o.Src.Ptr != 0 && !o.Kind.OfExperts() {
		return c.nan.Check(o.Stream, uint64(o.Src.Ptr), o.Src.Len, o.DType, o.Record)
	}
	return nil
}

// checkInputs is checkInput for the operations of a group. If it fails, nothing stays recorded.
func (b *Batch) checkInputs() error {
	for i := range b.ops {
		if err := b.ops[i].checkInput(); err != nil {
			for j := len(b.ops) - 1; j >= 0; j-- {
				b.ops[j].unrecord()
			}
			return err
		}
	}
	return nil
}

// foundNaN returns the error of the first operation with a NaN so far, or nil.
func (c *Communicator) foundNaN() error {
	if c.nan == nil {
		return nil
	}
	record, index, found := c.nan.Found()
	if !found {
		return nil
	}
	e := &NaNError{Rank: c.rank, Size: c.size, Device: c.dev.String(), Record: record, Operation: "an operation that the flight recorder no longer has", Index: index}
	if x := c.rec.Entry(record); x.ID == record {
		e.Operation = x.Operation().String()
	}
	return e
}

// A NaNError reports an operation whose input has an element that is not a number
// (Config.NaNCheck). The communicator has failed with it. Unlike torch, which stops the kernel with
// a trap and loses the device, Chorus lets the operation run; its outputs are undefined on all
// ranks.
type NaNError struct {
	Rank, Size int
	Device     string
	Record     uint64 // number of the operation on the communicator, from 1
	Operation  string // such as "ncclAllReduce(8 x float32, sum) as collective 7"
	Index      int    // of the first such element of the rank's input
}

func (e *NaNError) Error() string {
	return fmt.Sprintf("nccl: %s on rank %d of %d (%s), its operation %d: element %d of the input is not a number (NaN): the outputs are undefined on all ranks",
		e.Operation, e.Rank, e.Size, e.Device, e.Record, e.Index)
}
