package alloc

import "errors"

// ErrNoMemory is the error of a Source that is out of memory; it may be wrapped. Every
// other error ends the allocation at once.
var ErrNoMemory = errors.New("no memory left")

// ErrBusy is the error of Sync for a stream that is captured into a graph; it may be
// wrapped.
var ErrBusy = errors.New("the stream is captured")

// A Source allocates segments: from the driver, or from a user's Allocator. Each Device
// calls the methods from one goroutine at a time.
type Source interface {
	Alloc(s Stream, bytes uint64) (addr uint64, err error)
	// Free is called when no operation of the device uses the segment any more, or, if
	// Async is false, at any time.
	Free(s Stream, addr, bytes uint64) error
	// Async reports whether Free returns without waiting for the device.
	Async() bool
}

// A PageSource allocates pages of physical memory and maps them to addresses, for
// expandable segments (CUDA's virtual memory management).
type PageSource interface {
	PageSize() uint64
	// Reach is the size of an expandable segment's address range in bytes.
	Reach() uint64
	Reserve(bytes uint64) (addr uint64, err error)
	Unreserve(addr, bytes uint64) error
	Create() (page uint64, err error)
	Release(page uint64) error
	Map(addr uint64, page uint64) error
	// Open gives the device and its peers access to mapped addresses.
	Open(addr, bytes uint64) error
	Unmap(addr, bytes uint64) error
}

// A Stream is a stream of the device. Streams are compared by identity.
type Stream interface {
	// Record returns an event after all operations enqueued so far, or nil if the
	// stream is captured into a graph.
	Record() (Event, error)
	// Wait makes later operations wait for the event.
	Wait(Event) error
	// Sync waits on the host, or returns ErrBusy if it cannot wait now.
	Sync() error
	// Number identifies the stream in snapshots.
	Number() uint64
	// Ended reports whether the stream is about to be destroyed: Device.End follows, or
	// was called.
	Ended() bool
	// Retain keeps the stream usable until Release. It returns false if the stream is
	// destroyed.
	Retain() bool
	Release()
}

// An Event is a point in a stream.
type Event interface {
	Passed() (bool, error)
	Sync() error
	Close()
}

// An Auditor is informed of every allocation and free, in the order of the stream.
// Virtual devices have one.
type Auditor interface {
	Lend(s Stream, addr, bytes uint64)
	Return(s Stream, addr, bytes uint64)
}
