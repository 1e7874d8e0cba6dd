package kern

import (
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/memory"
)

// A CallRef has a launch of a kernel on a virtual device. The public type embeds it.
type CallRef struct{ k *machine.KernelCall }

// NewCallRef returns the reference of a launch for the public type.
func NewCallRef(k *machine.KernelCall) CallRef { return CallRef{k} }

func (r *CallRef) call() *machine.KernelCall { return r.k }

// HasCall is implemented by the public type that embeds a CallRef.
type HasCall interface{ call() *machine.KernelCall }

// CallOf returns the launch behind a public one.
func CallOf(x HasCall) *machine.KernelCall { return x.call() }

// Steps is one dimension of a strided layout: N elements, Step elements apart. Step is 0
// or more.
type Steps = machine.Steps

// ReadStrided returns the memory at the pointer that is argument i, from the first element
// of a layout to its last one. The function may read the elements of the layout, and must
// not access the memory between them, because other streams may write it at the same time.
// Each element of the layout is width Ts, and a Step counts Ts. Without dimensions the
// layout has one element.
func ReadStrided[T memory.Element](x HasCall, i, width int, dims []Steps) []T {
	return machine.StridedOf[T](x.call(), x.call().Ptr(i), width, dims, false)
}

// UpdateStrided is ReadStrided for elements that the function may read and write.
func UpdateStrided[T memory.Element](x HasCall, i, width int, dims []Steps) []T {
	return machine.StridedOf[T](x.call(), x.call().Ptr(i), width, dims, true)
}

// Shared returns n words that begin the given number of bytes after the pointer that is
// argument i. Kernels of several devices use that memory at the same time, so accesses must
// be atomic operations, or be ordered by the values that atomic operations read there.
func Shared[T uint32 | uint64](x HasCall, i, bytes, n int) []T {
	return machine.SharedOf[T](x.call(), x.call().Ptr(i)+cudadrv.DevicePtr(bytes), n)
}

// Await polls ready, as a kernel polls memory, and returns true once ready returns true.
// It returns false if the device was lost; the function must then return.
func Await(x HasCall, ready func() bool) bool { return x.call().Await(ready) }
