// Package memory owns device memory and pinned host memory: the caching allocator,
// typed slices, copies between host and devices and from device to device.
//
//	x, err := memory.Make[float32](s, len(in)) // allocated in the order of s
//	if err != nil {
//		return err // *memory.OutOfMemoryError says how much was free
//	}
//	defer x.Close() // freed in the order of s, after the work below
//	if err := x.CopyFrom(s, in); err != nil {
//		return err
//	}
//	return x.CopyTo(s, out) // returns when out is filled
//
// A Slice is a small value, like a Go slice: x.Slice(i, j) shares x's memory.
// Only the slice that Make returned closes it.
//
// Memory belongs to the stream it was allocated on, and what is freed is used again
// by the same stream, at once and without the driver. To use it on another stream,
// order the two by an event, and call RecordStream so that Close frees it only when
// the other stream is past it. Package comm does so by itself.
//
// The allocator has torch's rules, options (SetAllocatorSettings, CHORUS_ALLOC_CONF)
// and statistics (StatsOf). EmptyCache gives back what is cached, SetFraction limits
// what is taken, TakeSnapshot and RecordHistory show what is where and why. A Pool
// keeps memory of one purpose apart; an Allocator is where a pool's segments come
// from, or, with ChangeAllocator, all memory of a device. AllocRaw and FreeRaw give
// out addresses, for code that keeps its own books.
//
// Pinned host memory (MakePinned, PinSlice) may be closed while copies from or to
// it are on their way. Slice.IPCHandle and OpenIPC share device memory with other
// processes of the host.
//
// Concurrency: everything may be called by several goroutines, and those that use
// different streams do not wait for each other in an allocation. Slices may be
// copied and used by several; what they enqueue is ordered by the streams, not by
// the package.
package memory
