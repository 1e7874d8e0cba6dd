package cudadrv

import "unsafe"

// A Use is a use of memory by an operation: [Ptr, Ptr+Bytes).
type Use struct {
	Ptr   DevicePtr
	Bytes uint64
	Write bool // it writes, and may read
}

// An Operation is work that a library, or a kernel with addresses in its memory, has enqueued.
type Operation struct {
	Name   string
	Stream Stream
	Uses   []Use
	// Meets means that the operation waits for operations of other devices, and they for it.
	Meets bool
}

// A Watcher is a driver that needs to know which memory operations use, although their calls
// do not tell. The sanitizer is a Watcher; CUDA and virtual devices are not.
type Watcher interface {
	Auditor
	// Describe stores the name of a kernel, and the function that lists the memory that a
	// launch uses. It gets the params of LaunchKernel.
	Describe(f Function, name string, uses func(params unsafe.Pointer) []Use)
	// Used reports an operation that was enqueued. The context of the stream need not be bound
	// unless the stream is 0.
	Used(o Operation)
}
