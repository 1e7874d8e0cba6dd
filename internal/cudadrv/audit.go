package cudadrv

// An Auditor is a driver that wants to know which pieces of its memory an allocator
// has given out, because it finds the uses of the others. CUDA is none; virtual
// devices are.
//
// Both calls are free and take effect in the order of the stream: what comes before
// a MemReturn may use the piece, and what comes after a MemLend may. A piece that
// another stream used is only in order behind an event, as for any other use. While
// the stream is captured, a piece that either call names stays usable from then on,
// since the graph uses it at every launch.
type Auditor interface {
	// MemLend says that the piece was given out. Memory of which no piece was ever
	// named is everybody's.
	MemLend(p DevicePtr, bytes uintptr, s Stream) Result
	// MemReturn says that the piece was given back.
	MemReturn(p DevicePtr, bytes uintptr, s Stream) Result
}
