package kernel

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/virtual"
	"github.com/gochorus/chorus/memory"
)

// A Call is one launch, as the Go function that stands in for a kernel on
// virtual devices sees it.
type Call struct{ k *virtual.KernelCall }

// Blocks returns the number of blocks of the grid.
func (c *Call) Blocks() [3]uint32 { return c.k.Grid() }

// Threads returns the number of threads of a block.
func (c *Call) Threads() [3]uint32 { return c.k.Block() }

// IsNull reports whether argument i, a Pointer, is null.
func (c *Call) IsNull(i int) bool { return c.k.Ptr(i) == 0 }

// Address returns argument i, a Pointer, as a number to compare with others.
func (c *Call) Address(i int) uint64 { return uint64(c.k.Ptr(i)) }

// Int32 returns argument i, an I32.
func (c *Call) Int32(i int) int32 { return c.k.Int32(i) }

// Int64 returns argument i, an I64.
func (c *Call) Int64(i int) int64 { return c.k.Int64(i) }

// Uint32 returns argument i, a U32.
func (c *Call) Uint32(i int) uint32 { return c.k.Uint32(i) }

// Uint64 returns argument i, a U64.
func (c *Call) Uint64(i int) uint64 { return c.k.Uint64(i) }

// Float32 returns argument i, an F32.
func (c *Call) Float32(i int) float32 { return c.k.Float32(i) }

// Float64 returns argument i, an F64.
func (c *Call) Float64(i int) float64 { return c.k.Float64(i) }

// Int8 returns argument i, an I8.
func (c *Call) Int8(i int) int8 { return c.k.Int8(i) }

// Uint8 returns argument i, a U8.
func (c *Call) Uint8(i int) uint8 { return c.k.Uint8(i) }

// Int16 returns argument i, an I16.
func (c *Call) Int16(i int) int16 { return c.k.Int16(i) }

// Uint16 returns argument i, a U16.
func (c *Call) Uint16(i int) uint16 { return c.k.Uint16(i) }

// Bool returns argument i, a B8.
func (c *Call) Bool(i int) bool { return c.k.Bool(i) }

// Float16 returns argument i, an F16.
func (c *Call) Float16(i int) memory.Float16 { return memory.Float16(c.k.Float16(i)) }

// BFloat16 returns argument i, a BF16.
func (c *Call) BFloat16(i int) memory.BFloat16 { return memory.BFloat16(c.k.BFloat16(i)) }

// Bytes returns argument i, a Struct. It must not be written.
func (c *Call) Bytes(i int) []byte { return c.k.Struct(i) }

// Read returns n elements at the pointer that is argument i. It must not be
// written.
func Read[T memory.Element](c *Call, i, n int) []T { return ReadAt[T](c, i, 0, n) }

// ReadAt is Read of the elements from the at-th on. What a kernel leaves alone is
// not to be asked for: others may write it meanwhile.
func ReadAt[T memory.Element](c *Call, i, at, n int) []T {
	return virtual.ReadOf[T](c.k, address[T](c, i, at), n)
}

// Update returns n elements at the pointer that is argument i, to be read and
// written.
func Update[T memory.Element](c *Call, i, n int) []T { return UpdateAt[T](c, i, 0, n) }

// UpdateAt is Update of the elements from the at-th on.
func UpdateAt[T memory.Element](c *Call, i, at, n int) []T {
	return virtual.WriteOf[T](c.k, address[T](c, i, at), n)
}

// Steps is one dimension of a strided layout: N elements, Step elements from one to the
// next. Step is 0 or more.
type Steps = virtual.Steps

// ReadStrided returns the memory at the pointer that is argument i from the first element
// of a layout to its last one. The kernel reads the elements of the layout and must leave
// the elements between them alone: other streams may write those meanwhile. Each element
// of the layout is width Ts, and a Step counts Ts. Without dimensions the layout has one
// element.
func ReadStrided[T memory.Element](c *Call, i, width int, dims ...Steps) []T {
	return virtual.StridedOf[T](c.k, c.k.Ptr(i), width, dims, false)
}

// UpdateStrided is ReadStrided of elements to be read and written.
func UpdateStrided[T memory.Element](c *Call, i, width int, dims ...Steps) []T {
	return virtual.StridedOf[T](c.k, c.k.Ptr(i), width, dims, true)
}

// ReadAddress is Read at an address that a struct has, as Bytes returns it.
func ReadAddress[T memory.Element](c *Call, p uint64, n int) []T {
	return virtual.ReadOf[T](c.k, cudadrv.DevicePtr(p), n)
}

// UpdateAddress is Update at an address that a struct has.
func UpdateAddress[T memory.Element](c *Call, p uint64, n int) []T {
	return virtual.WriteOf[T](c.k, cudadrv.DevicePtr(p), n)
}

// Shared returns n words that begin bytes behind the pointer that is argument i, in
// memory that kernels of several devices use at the same time: to be read and written
// by atomic operations alone. Nothing but what is read there orders these uses.
func Shared[T uint32 | uint64](c *Call, i, bytes, n int) []T {
	return virtual.SharedOf[T](c.k, c.k.Ptr(i)+cudadrv.DevicePtr(bytes), n)
}

// Await asks ready again and again, as a kernel polls memory, and returns true once
// that does. It returns false when the device has been lost before: the function then
// returns.
func (c *Call) Await(ready func() bool) bool { return c.k.Await(ready) }

func address[T memory.Element](c *Call, i, at int) cudadrv.DevicePtr {
	var z T
	return c.k.Ptr(i) + cudadrv.DevicePtr(at)*cudadrv.DevicePtr(unsafe.Sizeof(z))
}
