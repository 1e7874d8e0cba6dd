// Package memtrace reads and replays recorded traces of an allocator: events and
// statistics recorded with torch, and the traces in snapshots.
package memtrace

import "fmt"

// An Op is the kind of an allocator call.
type Op uint8

// The kinds of calls.
const (
	Alloc Op = iota
	Free
	EmptyCache
)

// An Event is one call of an allocator.
type Event struct {
	Op     Op
	Block  int // number of the block, from 0; the number of a freed block is used again
	Bytes  int // size, for Alloc
	Stream int // number of the stream, from 0, for Alloc
	Number int // index of the event in the file; -1 means before the first event
}

// A Trace is a sequence of events on one device.
type Trace struct {
	Name     string
	Ops      int // number of events
	Blocks   int // numbers of blocks
	Streams  int
	Recorded Peaks

	prologue []Event
	events   section
}

// Each calls fn with consecutive parts of the events, which fn must not keep.
func (t *Trace) Each(fn func([]Event) error) error {
	if len(t.prologue) > 0 {
		if err := fn(t.prologue); err != nil {
			return err
		}
	}
	return t.events.each(fn)
}

// Peaks are the highest numbers of bytes.
type Peaks struct {
	Allocated int64 // in blocks allocated by the program
	Reserved  int64 // in segments of the driver
}

// An EventError reports an invalid event of a file.
type EventError struct {
	Trace  string
	Number int // index of the event
	Reason string
}

func (e *EventError) Error() string {
	return fmt.Sprintf("%s: event %d: %s", e.Trace, e.Number, e.Reason)
}
