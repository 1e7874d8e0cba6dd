package memory

import (
	"fmt"
	"io"
)

// mostStacks is the number of stacks that WalkSnapshot keeps to share them between entries.
const mostStacks = 1024

// WalkSnapshot reads a snapshot like ReadSnapshot, but passes the entries of its traces to
// fn, in their order, instead of keeping them. Histories that are larger than memory can
// thus be read: an entry of JSON leaves nothing behind, and an entry of a pickle leaves about
// fifty bytes. The result has no Traces. If fn returns an error, WalkSnapshot returns it.
//
// The limits are the limits of ReadSnapshot, except that the values of entries do not count.
func WalkSnapshot(r io.Reader, fn func(device int, e TraceEntry) error) (*Snapshot, error) {
	w := &snapshotWalk{fn: fn, reader: newSnapshotReader()}
	v, err := readValue(r, w.entry)
	switch {
	case w.failed != nil:
		return nil, w.failed
	case w.reader.err != nil:
		return nil, readError(w.reader.err)
	case err != nil:
		return nil, readError(err)
	}
	s, err := snapshotOf(v)
	if err != nil {
		return nil, readError(err)
	}
	for device, entries := range s.Traces { // written in a way that no known writer uses
		for _, e := range entries {
			if err := fn(device, e); err != nil {
				return nil, err
			}
		}
	}
	s.Traces = nil
	return s, nil
}

// A snapshotWalk is one call of WalkSnapshot.
type snapshotWalk struct {
	fn     func(device int, e TraceEntry) error
	reader *snapshotReader
	device int
	count  int   // entries of the device so far
	failed error // of fn
}

func (w *snapshotWalk) entry(device int, v any) error {
	if device != w.device {
		w.device, w.count = device, 0
	}
	e := w.reader.entry("entry", v)
	if w.reader.err != nil {
		w.reader.err = fmt.Errorf("trace %d: entry %d: %w", device, w.count, w.reader.err)
		return w.reader.err
	}
	w.count++
	if len(w.reader.frames) > mostStacks {
		clear(w.reader.frames)
	}
	w.failed = w.fn(device, e)
	return w.failed
}
