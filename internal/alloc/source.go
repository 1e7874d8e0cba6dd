package alloc

import "errors"

// ErrNoMemory is what a Source returns, wrapped or not, when there is no memory
// left; every other error ends the allocation at once.
var ErrNoMemory = errors.New("no memory left")

// ErrBusy is what Sync returns, wrapped or not, of a stream that is captured into a
// graph.
var ErrBusy = errors.New("the stream is captured")

// A Source gives out segments: plain memory of the driver, or what a caller of a
// pool provides. Its methods are called by one goroutine at a time for each
// Device.
type Source interface {
	Alloc(s Stream, bytes uint64) (addr uint64, err error)
	// Free is called when no work on the device uses the segment any more, or
	// when Async is false.
	Free(s Stream, addr, bytes uint64) error
	// Async says that Free does not wait for the device by itself.
	Async() bool
}

// A PageSource gives out pages of memory that are mapped to addresses apart from
// being made, for expandable segments (CUDA's virtual memory management).
type PageSource interface {
	PageSize() uint64
	// Reach is how many bytes of addresses an expandable segment has.
	Reach() uint64
	Reserve(bytes uint64) (addr uint64, err error)
	Unreserve(addr, bytes uint64) error
	Create() (page uint64, err error)
	Release(page uint64) error
	Map(addr uint64, page uint64) error
	// Open lets the device, and those that may, use mapped addresses.
	Open(addr, bytes uint64) error
	Unmap(addr, bytes uint64) error
}

// A Stream is a queue of work of the device. It is compared by identity.
type Stream interface {
	// Record returns an event behind everything that is enqueued so far, or nil
	// where it cannot now, because the stream is captured into a graph.
	Record() (Event, error)
	// Wait lets what is enqueued from now on wait for the event.
	Wait(Event) error
	// Sync waits on the host, or returns ErrBusy where it cannot now.
	Sync() error
	// Number names the stream in snapshots.
	Number() uint64
	// Ended says that the stream is to be destroyed: Device.End follows, or was called.
	Ended() bool
	// Retain keeps the stream usable until Release, or reports that it is gone.
	Retain() bool
	Release()
}

// An Event is a point in a stream.
type Event interface {
	Passed() (bool, error)
	Sync() error
	Close()
}

// An Auditor is told about every piece of memory that is given out and comes
// back, in the order of the stream. Virtual devices have one.
type Auditor interface {
	Lend(s Stream, addr, bytes uint64)
	Return(s Stream, addr, bytes uint64)
}
