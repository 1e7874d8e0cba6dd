package cudadrv

// An Auditor is a driver that needs to know which pieces of its memory an allocator has
// allocated, because it detects accesses to other pieces. Virtual devices are Auditors,
// CUDA is not.
//
// Both calls need no context and take effect in stream order: operations before a
// MemReturn may use the piece, and so may operations after a MemLend. Another stream may
// use a piece only after an event, as for any other use. If the stream is being captured,
// a piece named by either call stays usable from then on, since the graph uses it at every
// launch.
type Auditor interface {
	// MemLend reports that the piece was allocated. Memory without any reported piece may
	// be used freely.
	MemLend(p DevicePtr, bytes uintptr, s Stream) Result
	// MemReturn reports that the piece was freed.
	MemReturn(p DevicePtr, bytes uintptr, s Stream) Result
}
