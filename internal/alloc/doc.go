// Package alloc is the caching allocator of device memory: which bytes belong to
// whom, and in the order of which stream they may be used again. It knows no
// driver: it takes segments from a Source and asks a Stream for events, both of
// which package memory implements.
//
// The rules are those of torch's caching allocator, to the byte: sizes, pools,
// best fit, splitting, coalescing, the ladder when memory runs out, and the
// statistics. A Device has Pools, a Pool has one Arena for each stream, and an
// Arena has the free blocks that only its stream may use, in two sorts of
// segments, small and large. An arena of the default pool has a lock of its own,
// so that streams do not wait for each other; what is common to the device is
// touched only when memory is taken from the driver or given back.
package alloc
