package kernel

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/stream"
)

// A Grid is the shape of a launch: blocks, threads in a block, and bytes of
// dynamic shared memory.
type Grid struct {
	Blocks, Threads [3]uint32
	SharedBytes     uint32
}

// Cover returns a grid of at least n threads in one dimension, 256 to a block.
func Cover(n int) Grid {
	blocks := min((max(n, 0)+255)/256, math.MaxUint32) // a launch refuses it
	return Grid{Blocks: [3]uint32{uint32(blocks), 1, 1}, Threads: [3]uint32{256, 1, 1}}
}

// A Kernel is one function of a Module.
type Kernel struct {
	module *Module
	name   string
	h      cudadrv.Function
	params []Param
	source []declared // the type that the source declares for each parameter; nil if unknown
	typed  bool       // the function that replaces it gets the number of bytes of each argument
	attrs  Attributes

	mu     sync.Mutex    // guards raising shared
	shared atomic.Uint32 // bytes of dynamic shared memory that the driver allows now
}

// maxArgs bounds the parameters of a kernel, so that a launch allocates
// nothing.
const maxArgs = 32

// frame holds the argument values of a launch and their addresses, the form that CUDA
// needs. The stand-in of a Func gets the bytes of each argument, too. usesOf finds the frame
// from ptrs.
type frame struct {
	ptrs  [2 * maxArgs]unsafe.Pointer
	vals  [2 * maxArgs]uint64
	bytes [maxArgs]uint64 // of the memory at pointers
}

var frames = sync.Pool{New: func() any {
	f := new(frame)
	for i := range f.vals {
		f.ptrs[i] = unsafe.Pointer(&f.vals[i])
	}
	return f
}}

// Launch enqueues the kernel on s (cuLaunchKernel) and returns at once; the arguments have
// been copied by then. Launch validates the number and types of the arguments, that
// pointers are on the stream's device, and that the device has room for the grid's blocks. Pointers
// to vectors, such as float4, must be aligned to them.
// A kernel may use more than 48 KiB of dynamic shared memory without further preparation.
// A grid without blocks launches nothing.
func (k *Kernel) Launch(s *stream.Stream, g Grid, args ...Arg) error {
	return k.launch(s, g, args, false)
}

// LaunchCooperative is Launch for a kernel whose blocks wait for each other
// (cuLaunchCooperativeKernel): all blocks are on the device at once. If the grid is too
// large for that, nothing is enqueued, and the error says how many blocks fit and matches
// device.ErrorCooperativeLaunchTooLarge.
func (k *Kernel) LaunchCooperative(s *stream.Stream, g Grid, args ...Arg) error {
	if k != nil && !k.module.limits.cooperative {
		return &device.UnsupportedError{Feature: "kernel: cooperative launch", Need: "a device that has it", Have: k.module.dev.String()}
	}
	return k.launch(s, g, args, true)
}

func (k *Kernel) launch(s *stream.Stream, g Grid, args []Arg, together bool) error {
	if err := k.check(s, args); err != nil {
		return err
	}
	if g.Blocks[0] == 0 || g.Blocks[1] == 0 || g.Blocks[2] == 0 {
		return nil
	}
	if err := k.fit(g); err != nil {
		return fmt.Errorf("kernel: launch %s on %s: %w", k.name, k.module.dev, err)
	}
	f := frames.Get().(*frame)
	for i := range args {
		f.vals[i] = args[i].bits // little-endian: a narrower value is the first bytes
		f.bytes[i] = kern.BytesOf(&args[i])
		if b := args[i].bytes; b != nil {
			f.ptrs[i] = unsafe.Pointer(b)
		}
		if k.typed {
			f.vals[len(args)+i] = f.bytes[i]
		}
	}
	err := gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		if together {
			return drv.LaunchCooperativeKernel(k.h, g.Blocks, g.Threads, g.SharedBytes, gpu.StreamOf(s).Raw(), unsafe.Pointer(&f.ptrs))
		}
		return drv.LaunchKernel(k.h, g.Blocks, g.Threads, g.SharedBytes, gpu.StreamOf(s).Raw(), unsafe.Pointer(&f.ptrs))
	})
	for i := range args {
		if args[i].bytes != nil {
			f.ptrs[i] = unsafe.Pointer(&f.vals[i])
		}
	}
	frames.Put(f)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, device.ErrorCooperativeLaunchTooLarge):
		return k.tooLarge(g, err)
	}
	return fmt.Errorf("kernel: launch %s: %w", k.name, err)
}

func (k *Kernel) check(s *stream.Stream, args []Arg) error {
	if k == nil {
		return errors.New("kernel: launch: no kernel given")
	}
	if k.module.owner.Closed() {
		return fmt.Errorf("kernel: launch %s: module: %w", k.name, device.ErrClosed)
	}
	if err := gpu.CheckStream("kernel: launch", s, gpu.DeviceOf(k.module.dev)); err != nil {
		return err
	}
	if len(args) != len(k.params) {
		return fmt.Errorf("kernel: launch %s: %d arguments: want %d: %v", k.name, len(args), len(k.params), k.params)
	}
	for i := range args {
		a := &args[i]
		switch {
		case a.err != nil:
			return fmt.Errorf("kernel: launch %s: argument %d: %w", k.name, i, a.err)
		case a.kind != k.params[i]:
			return fmt.Errorf("kernel: launch %s: argument %d is %s: want %s", k.name, i, withArticle(a.kind), withArticle(k.params[i]))
		case k.source != nil && !k.source[i].takes(a.elem):
			return fmt.Errorf("kernel: launch %s: argument %d is memory of %s, but the source declares %q", k.name, i, a.elem, k.source[i].text)
		case k.source != nil && k.source[i].align > 0 && a.bits%uint64(k.source[i].align) != 0:
			return fmt.Errorf("kernel: launch %s: argument %d is at %#x, but the source declares %q: want a multiple of %d bytes",
				k.name, i, a.bits, k.source[i].text, k.source[i].align)
		case kern.DeviceOf(a) != nil && kern.DeviceOf(a) != k.module.dev:
			return fmt.Errorf("kernel: launch %s on %s: argument %d is memory of %s", k.name, k.module.dev, i, kern.DeviceOf(a))
		}
	}
	return nil
}

// The limits of CUDA on every device, in x, y and z.
var (
	maxBlocks  = [3]uint32{math.MaxInt32, math.MaxUint16, math.MaxUint16}
	maxThreads = [3]uint32{1024, 1024, 64}
)

// fit validates that a block of the grid fits on the device.
func (k *Kernel) fit(g Grid) error {
	threads := uint64(1)
	for i, axis := range [3]string{"x", "y", "z"} {
		switch {
		case g.Blocks[i] > maxBlocks[i]:
			return fmt.Errorf("%d blocks in %s: at most %d", g.Blocks[i], axis, maxBlocks[i])
		case g.Threads[i] == 0:
			return fmt.Errorf("no threads in %s: want 1 or more", axis)
		case g.Threads[i] > maxThreads[i]:
			return fmt.Errorf("%d threads of a block in %s: at most %d", g.Threads[i], axis, maxThreads[i])
		}
		threads *= uint64(g.Threads[i])
	}
	if threads > uint64(k.attrs.MaxThreads) {
		return fmt.Errorf("%d threads of a block: at most %d of this kernel, which uses %d registers a thread",
			threads, k.attrs.MaxThreads, k.attrs.Registers)
	}
	if g.SharedBytes > k.shared.Load() {
		return k.allowShared(g.SharedBytes)
	}
	return nil
}

// allowShared permits blocks the device's maximum of dynamic shared memory, once per
// kernel. It has no cost for launches that use less.
func (k *Kernel) allowShared(bytes uint32) error {
	most := k.attrs.MaxDynamicSharedBytes
	if int64(bytes) > int64(most) {
		return fmt.Errorf("%d bytes of dynamic shared memory: a block has at most %d beside the %d that the kernel declares",
			bytes, most, k.attrs.SharedBytes)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if bytes <= k.shared.Load() {
		return nil
	}
	err := gpu.DeviceOf(k.module.dev).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.FuncSetAttribute(k.h, cudadrv.FuncMaxDynamicSharedBytes, int32(most))
	})
	if err == nil {
		k.shared.Store(uint32(most))
	}
	return err
}
