// Package alloc is the caching allocator of device memory. It tracks which bytes are in
// use, and which stream may reuse them. It does not call a driver:
// package memory implements [Source], which allocates segments, and [Stream], which
// records events.
//
// The rules are the same as in torch's caching allocator, to the byte: sizes, pools,
// best fit, splitting, coalescing, the order of fallbacks when memory runs out, and the
// statistics. A [Device] has several [Pool]s, and a Pool has one [Arena] per stream. An
// Arena has the free blocks that only its stream may use, in small and large segments.
// Each arena of the default pool has its own lock, so that streams do not wait for each
// other. State that is common to the device is used only when memory is allocated from
// the driver or returned to it.
package alloc
