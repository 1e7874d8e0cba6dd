package memtrace

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/gochorus/chorus/internal/safefile"
	"github.com/gochorus/chorus/memory"
)

const (
	// mostBytes is how large a file may be, uncompressed. What is read of it takes up to
	// 16 times as much memory.
	mostBytes = 512 << 20
	// mostStreams is more than torch has: 32 of each priority on a device, and others' own.
	// Each costs tens of kilobytes.
	mostStreams = 1024
)

// Read reads the traces of a file, which may be compressed by gzip: recorded
// events, the sequences that ReadStats reads, or a snapshot, whose devices have a
// trace each. An event that cannot be is an *EventError, such as one that frees
// what is not allocated; the trace of a snapshot may free what was allocated
// before it began, which is then allocated first.
func Read(r io.Reader) ([]*Trace, error) {
	file, err := content(r)
	if err != nil {
		return nil, err
	}
	if len(file) > 0 && file[0] == 0x80 {
		return readSnapshot(file)
	}
	if len(file) == 0 {
		return nil, errors.New("the file is empty")
	}
	var form struct{ Events, Sequences, Segments json.RawMessage }
	if err := parse(file, &form); err != nil {
		return nil, fmt.Errorf("neither a trace nor a snapshot: %w", err)
	}
	switch {
	case form.Events != nil:
		return readEvents(file)
	case form.Sequences != nil:
		return readSequences(file)
	case form.Segments != nil:
		return readSnapshot(file)
	}
	return nil, errors.New(`neither a trace nor a snapshot: it has no "events", "sequences" or "segments"`)
}

// parse is json.Unmarshal with errors that name JSON's types and not Go's.
func parse(file []byte, to any) error {
	err := json.Unmarshal(file, to)
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		if wrong.Field == "" {
			return fmt.Errorf("it is JSON's %s: want an object", wrong.Value)
		}
		return fmt.Errorf("%q is JSON's %s, at byte %d: want another type", strings.ToLower(wrong.Field), wrong.Value, wrong.Offset)
	}
	if s, ok := errors.AsType[*json.SyntaxError](err); ok && s.Offset >= int64(len(file)) {
		return cutOff(err)
	}
	return err
}

// cutOff says what to do about a file that ends too early.
func cutOff(err error) error {
	return fmt.Errorf("the file ends too early: it was cut off: record or copy it again: %w", err)
}

// content returns the file, uncompressed.
func content(r io.Reader) ([]byte, error) {
	r, err := safefile.Unzip(r)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, cutOff(err)
	}
	if err != nil {
		return nil, err
	}
	file, err := io.ReadAll(io.LimitReader(r, mostBytes+1))
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return nil, cutOff(err)
	case len(file) > mostBytes:
		return nil, fmt.Errorf("the file has more than %d bytes, uncompressed: record a shorter trace", mostBytes)
	}
	return file, err
}

// A recordedEvent is [action, address, size, stream, time in microseconds].
type recordedEvent struct {
	action             memory.TraceAction
	addr, size, stream uint64
}

func (e *recordedEvent) parse(text []byte) error {
	var time float64
	fields := []any{&e.action, &e.addr, &e.size, &e.stream, &time}
	n := len(fields)
	if err := json.Unmarshal(text, &fields); err != nil || len(fields) != n {
		return fmt.Errorf("it is %.80s: want [action, address, size, stream, time], with whole numbers from 0 on", text)
	}
	return nil
}

func readEvents(file []byte) ([]*Trace, error) {
	var f struct {
		Kind          string
		Events        []json.RawMessage
		PeakAllocated int64 `json:"peak_allocated"`
		PeakReserved  int64 `json:"peak_reserved"`
	}
	if err := parse(file, &f); err != nil {
		return nil, err
	}
	if f.PeakAllocated < 0 || f.PeakReserved < 0 {
		return nil, fmt.Errorf("the recorded peaks are %d bytes allocated and %d reserved: want 0, for none, or more", f.PeakAllocated, f.PeakReserved)
	}
	b := newBuilder(cmp.Or(f.Kind, "trace"))
	for i, text := range f.Events {
		var e recordedEvent
		err := e.parse(text)
		if err != nil {
			err = b.fail(i, "%v", err)
		} else {
			err = b.add(i, e.action, e.addr, e.size, e.stream)
		}
		if err != nil {
			return nil, err
		}
	}
	return withCalls([]*Trace{b.finish(Peaks{f.PeakAllocated, f.PeakReserved})})
}

// errNothing refuses what would have no time per call.
var errNothing = errors.New("nothing is allocated or freed in it: record the history while the program allocates")

// withCalls returns the traces that call the allocator at all.
func withCalls(all []*Trace) ([]*Trace, error) {
	all = slices.DeleteFunc(all, func(t *Trace) bool { return len(t.Events) == 0 })
	if len(all) == 0 {
		return nil, errNothing
	}
	for _, t := range all {
		if t.Streams > mostStreams {
			return nil, fmt.Errorf("%s has %d streams: at most %d are replayed", t.Name, t.Streams, mostStreams)
		}
	}
	return all, nil
}

func readSnapshot(file []byte) ([]*Trace, error) {
	s, err := memory.ReadSnapshot(bytes.NewReader(file))
	if err != nil {
		return nil, err
	}
	var traces []*Trace
	for d, entries := range s.Traces {
		if len(entries) == 0 {
			continue
		}
		t, err := OfSnapshot(s, d)
		if err != nil {
			return nil, err
		}
		traces = append(traces, t)
	}
	if len(traces) == 0 {
		return nil, errors.New("the snapshot has no trace: record the history before it is taken")
	}
	return withCalls(traces)
}

// OfSnapshot returns what the snapshot has recorded of a device. The recorded
// peaks are summed up: of allocated bytes, as they were asked for, and of the
// segments.
func OfSnapshot(s *memory.Snapshot, device int) (*Trace, error) {
	b := newBuilder(fmt.Sprintf("device %d", device))
	b.earlier = true
	for i, e := range s.Traces[device] {
		if err := b.add(i, e.Action, e.Address, e.Size, e.Stream); err != nil {
			return nil, err
		}
	}
	reserved := int64(0)
	for _, g := range s.Segments {
		if g.Device != device {
			continue
		}
		reserved += int64(g.TotalSize)
		for _, k := range g.Blocks {
			// What is in use and was not allocated since was so before.
			if _, known := b.live[k.Address]; !known && k.State != memory.BlockInactive && k.RequestedSize > 0 {
				b.before(k.Address, k.RequestedSize, g.Stream)
			}
		}
	}
	b.sum.heldEarlier(reserved - b.sum.now.Reserved)
	return b.finish(Peaks{}), nil
}
