package kernel

import (
	"fmt"
	"math"
	"sync"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/virtual"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A Param is the type of a kernel's parameter.
type Param uint8

// The parameter types, as in C: a pointer to device memory, and numbers.
const (
	Pointer = Param(virtual.PtrParam)
	I32     = Param(virtual.Int32Param)
	I64     = Param(virtual.Int64Param)
	U32     = Param(virtual.Uint32Param)
	U64     = Param(virtual.Uint64Param)
	F32     = Param(virtual.Float32Param)
	F64     = Param(virtual.Float64Param)
)

// String returns the C type.
func (p Param) String() string {
	switch p {
	case Pointer:
		return "pointer"
	case I32:
		return "int"
	case I64:
		return "long long"
	case U32:
		return "unsigned"
	case U64:
		return "unsigned long long"
	case F32:
		return "float"
	case F64:
		return "double"
	}
	return fmt.Sprintf("Param(%d)", uint8(p))
}

// An Arg is the value of one parameter.
type Arg struct {
	kind Param
	bits uint64
	dev  *device.Device // of a pointer
	err  error
}

// Ptr passes the address of x.
func Ptr[T memory.Element](x memory.Slice[T]) Arg {
	return Arg{kind: Pointer, bits: uint64(x.Raw()), dev: x.Device(), err: x.Check("kernel: launch", nil)}
}

// Null passes a null pointer, as Ptr of the zero Slice does.
func Null() Arg { return Arg{kind: Pointer} }

// Int32 passes an int.
func Int32(v int32) Arg { return Arg{kind: I32, bits: uint64(uint32(v))} }

// Int64 passes a long long.
func Int64(v int64) Arg { return Arg{kind: I64, bits: uint64(v)} }

// Uint32 passes an unsigned.
func Uint32(v uint32) Arg { return Arg{kind: U32, bits: uint64(v)} }

// Uint64 passes an unsigned long long.
func Uint64(v uint64) Arg { return Arg{kind: U64, bits: v} }

// Float32 passes a float.
func Float32(v float32) Arg { return Arg{kind: F32, bits: uint64(math.Float32bits(v))} }

// Float64 passes a double.
func Float64(v float64) Arg { return Arg{kind: F64, bits: math.Float64bits(v)} }

// A Grid is the shape of a launch: blocks, threads in a block, and bytes of
// dynamic shared memory.
type Grid struct {
	Blocks, Threads [3]uint32
	SharedBytes     uint32
}

// Cover returns a grid of at least n threads in one dimension, 256 to a block.
func Cover(n int) Grid {
	return Grid{Blocks: [3]uint32{uint32((n + 255) / 256), 1, 1}, Threads: [3]uint32{256, 1, 1}}
}

// A Kernel is one function of a Module.
type Kernel struct {
	module *Module
	name   string
	h      cudadrv.Function
	params []Param
}

// maxArgs bounds the parameters of a kernel, so that a launch allocates
// nothing.
const maxArgs = 32

// frame holds the values of a launch and their addresses, as CUDA wants them.
type frame struct {
	vals [maxArgs]uint64
	ptrs [maxArgs]unsafe.Pointer
}

var frames = sync.Pool{New: func() any {
	f := new(frame)
	for i := range f.vals {
		f.ptrs[i] = unsafe.Pointer(&f.vals[i])
	}
	return f
}}

// Launch enqueues the kernel on s (cuLaunchKernel) and returns at once; the
// arguments have been read by then. The number and types of the arguments are
// checked, and that pointers are of the stream's device. A grid without blocks
// launches nothing.
func (k *Kernel) Launch(s *stream.Stream, g Grid, args ...Arg) error {
	if err := k.check(s, args); err != nil {
		return err
	}
	if g.Blocks[0] == 0 || g.Blocks[1] == 0 || g.Blocks[2] == 0 {
		return nil
	}
	f := frames.Get().(*frame)
	for i, a := range args {
		f.vals[i] = a.bits // little-endian: a narrower value is its first bytes
	}
	err := k.module.dev.Do("cuLaunchKernel", func(drv cudadrv.Driver) cudadrv.Result {
		return drv.LaunchKernel(k.h, g.Blocks, g.Threads, g.SharedBytes, s.Raw(), unsafe.Pointer(&f.ptrs))
	})
	frames.Put(f)
	if err != nil {
		return fmt.Errorf("kernel: launch %s: %w", k.name, err)
	}
	return nil
}

func (k *Kernel) check(s *stream.Stream, args []Arg) error {
	if k.module.owner.Closed() {
		return fmt.Errorf("kernel: launch %s: module: %w", k.name, device.ErrClosed)
	}
	if err := s.Check("kernel: launch", k.module.dev); err != nil {
		return err
	}
	if len(args) != len(k.params) || len(args) > maxArgs {
		return fmt.Errorf("kernel: launch %s: %d arguments: want %d (at most %d)", k.name, len(args), len(k.params), maxArgs)
	}
	for i := range args {
		a := &args[i]
		switch {
		case a.err != nil:
			return fmt.Errorf("kernel: launch %s: argument %d: %w", k.name, i, a.err)
		case a.kind != k.params[i]:
			return fmt.Errorf("kernel: launch %s: argument %d is a %s: want a %s", k.name, i, a.kind, k.params[i])
		case a.dev != nil && a.dev != k.module.dev:
			return fmt.Errorf("kernel: launch %s on %s: argument %d is memory of %s", k.name, k.module.dev, i, a.dev)
		}
	}
	return nil
}
