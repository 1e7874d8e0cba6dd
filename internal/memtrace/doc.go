// Package memtrace reads recorded traces of an allocator and plays them again:
// events and statistics that were recorded with torch, and the traces of
// snapshots.
package memtrace

import "fmt"

// An Op is what an Event asks of an allocator.
type Op uint8

// The ops.
const (
	Alloc Op = iota
	Free
	EmptyCache
)

// An Event is one call of an allocator.
type Event struct {
	Op     Op
	Block  int // which block: they are numbered from 0 on, each is allocated once and freed at most once
	Bytes  int // of Alloc
	Stream int // of Alloc, numbered from 0 on
	Number int // of the event in the file, from 0 on; -1 is before the first
}

// A Trace is a sequence of events on one device.
type Trace struct {
	Name            string
	Events          []Event
	Blocks, Streams int
	Recorded        Peaks
}

// Peaks are the most bytes that there were.
type Peaks struct {
	Allocated int64 // of blocks that the program had
	Reserved  int64 // of segments of the driver
}

// An EventError says which event of a file is wrong.
type EventError struct {
	Trace  string
	Number int // from 0 on
	Reason string
}

func (e *EventError) Error() string {
	return fmt.Sprintf("%s: event %d: %s", e.Trace, e.Number, e.Reason)
}
