package kernel

import (
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/kern"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
)

// A Call is one launch of a kernel on a virtual device, the argument of the kernel's Go
// function.
type Call struct {
	call
	spans []span // the memory that arguments refer to
}

type call = kern.CallRef

// Grid returns the grid of the launch.
func (c *Call) Grid() Grid {
	blocks, threads, shared := kern.CallOf(c).Shape()
	return Grid{Blocks: blocks, Threads: threads, SharedBytes: shared}
}

// Address returns argument i, a Pointer, as a number. It is 0 for a null pointer.
func (c *Call) Address(i int) uint64 { return uint64(kern.CallOf(c).Ptr(i)) }

// Bytes returns argument i, a Struct. It must not be written.
func (c *Call) Bytes(i int) []byte { return kern.CallOf(c).Struct(i) }

// Get returns argument i, a number. T is the Go type of the parameter, such as int32 for
// I32.
func Get[T memory.Element](c *Call, i int) (v T) {
	bits := kern.CallOf(c).Bits(i, scalarParam[T]().virtual())
	return *(*T)(unsafe.Pointer(&bits)) // little-endian: a narrower value is the first bytes
}

// Read returns n elements at the pointer that is argument i. The function must not write
// them. Request only elements that the kernel reads: others may be written by another
// kernel at the same time.
func Read[T memory.Element](c *Call, i, n int) []T { return ReadAddress[T](c, c.Address(i), n) }

// Update returns n elements at the pointer that is argument i, which the function may read
// and write. If the launch has passed a slice, the elements must be in it, and the source must not declare
// a pointer to const.
func Update[T memory.Element](c *Call, i, n int) []T { return UpdateAddress[T](c, c.Address(i), n) }

// ReadAddress is Read at an address: of a struct, or behind an Address.
func ReadAddress[T memory.Element](c *Call, p uint64, n int) []T {
	return machine.ReadOf[T](kern.CallOf(c), cudadrv.DevicePtr(p), n)
}

// UpdateAddress is Update at an address.
func UpdateAddress[T memory.Element](c *Call, p uint64, n int) []T {
	c.checkWrite(p, n*int(unsafe.Sizeof(*new(T))))
	return machine.WriteOf[T](kern.CallOf(c), cudadrv.DevicePtr(p), n)
}
