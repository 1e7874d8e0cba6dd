// Package memory owns device memory and pinned host memory: the caching allocator,
// typed slices, copies between host and devices and from device to device.
//
//	x, err := memory.Make[float32](s, len(in)) // stream-ordered on s
//	if err != nil {
//		return err // *memory.OutOfMemoryError says how much was free
//	}
//	defer x.Close() // freed after the work below, which is on s
//	if err := x.CopyFrom(s, in); err != nil {
//		return err
//	}
//	return x.CopyTo(s, out) // returns when out is filled
//
// A Slice is a small value, like a Go slice: x.Slice(i, j) shares x's memory. Only the
// slice that Make returned can close it.
//
// Memory belongs to the stream that it was allocated on. The same stream reuses freed
// memory at once and without calling the driver. To use memory on another stream, order
// the two streams by an event and call RecordStream; Close then frees the memory only
// after the other stream has passed it. Package comm does so by itself.
//
// The allocator has torch's rules, options ([SetAllocatorSettings], CHORUS_ALLOC_CONF)
// and statistics ([StatsOf]). [EmptyCache] returns cached memory to the driver,
// [SetFraction] limits the reserved memory, and [TakeSnapshot] and [RecordHistory] show
// which code allocated which block. A [Pool] keeps the memory of one purpose separate.
// An [Allocator] supplies a pool's segments or, with [ChangeAllocator], all memory of a
// device. [AllocRaw] and [FreeRaw] allocate plain addresses, for code that does its own
// bookkeeping.
//
// Pinned host memory ([MakePinned], [PinSlice]) may be closed while copies from or to
// it are in progress. Slice.IPCHandle and [OpenIPC] share device memory with other
// processes of the host.
//
// Concurrency: all functions and methods may be called by several goroutines.
// Goroutines that allocate on different streams do not wait for each other. Slices may
// be copied and used by several goroutines. The streams order the enqueued operations;
// the package adds no synchronization.
package memory
