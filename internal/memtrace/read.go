package memtrace

import (
	"bufio"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"

	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
)

const (
	// mostBytes limits the uncompressed size of a file, and thus the time to read it.
	mostBytes      = 2 << 30
	mostValueBytes = 4 << 20 // of an event
	// mostStreams is more than torch uses: 32 of each priority on a device, and
	// streams of other libraries. Each stream takes tens of kilobytes.
	mostStreams = 1024
	// mostTraces limits the traces of a file: one for each device or sequence.
	mostTraces = 4096
)

// A Recording has the traces of a file. Their events are not in memory, except a few.
type Recording struct {
	Traces []*Trace
	spool  spool
}

// Close frees the events of the traces.
func (r *Recording) Close() error {
	if r == nil {
		return nil
	}
	return r.spool.Close()
}

// Read reads the traces of a file, which may be compressed with gzip: recorded
// events, sequences as in ReadStats, or a snapshot with one trace for each
// device. An invalid event, such as a free of a block that is not allocated, is
// an *EventError. The trace of a snapshot may free blocks that were allocated
// before it started; they are then allocated first.
//
// Read takes memory for the blocks that are allocated at the same time, and not for the
// events. The caller closes the Recording.
func Read(r io.ReadSeeker) (*Recording, error) { return read(r, mostBytes) }

func read(r io.ReadSeeker, most int64) (*Recording, error) {
	form, err := formOf(r, most)
	if err != nil {
		return nil, err
	}
	if err := checkSize(r, most); err != nil {
		return nil, err
	}
	if _, err := r.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	rec := &Recording{}
	if err := rec.read(form, r, most); err != nil {
		return nil, errors.Join(err, rec.Close())
	}
	return rec, nil
}

func (rec *Recording) read(form string, r io.Reader, most int64) error {
	if form == snapshotForm {
		return rec.readSnapshot(r)
	}
	r, err := plain(r, most)
	if err != nil {
		return err
	}
	if form == "events" {
		return rec.readEvents(safe.NewJSON(r, mostValueBytes))
	}
	return rec.readSequences(safe.NewJSON(r, mostValueBytes))
}

const snapshotForm = "segments"

// formOf returns "events", "sequences" or snapshotForm.
func formOf(file io.Reader, most int64) (form string, err error) {
	r, err := plain(file, most)
	if err != nil {
		return "", err
	}
	b := bufio.NewReader(r)
	switch start, err := b.Peek(1); {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "", safe.Truncated(err)
	case err == io.EOF:
		return "", errors.New("the file is empty")
	case err != nil:
		return "", err
	case start[0] == 0x80:
		return snapshotForm, nil
	}
	found := errors.New("found")
	f := safe.NewJSON(b, mostValueBytes)
	err = f.Object(func(key string) error {
		switch key {
		case "events", "sequences", snapshotForm:
			form = key
			return found
		case "device_traces":
			form = snapshotForm
			return found
		}
		return f.Skip()
	})
	switch {
	case form != "":
		return form, nil
	case err != nil:
		return "", fmt.Errorf("the file is neither a trace nor a snapshot: %w", err)
	}
	return "", errors.New(`the file is neither a trace nor a snapshot: it has no "events", "sequences" or "segments"`)
}

// checkSize returns an error if the file expands to too many bytes. Values of a pickle take
// more memory than their bytes, so that this must be known before they are read.
func checkSize(file io.ReadSeeker, most int64) error {
	if _, err := file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	r, err := plain(file, most)
	if err == nil {
		_, err = io.Copy(io.Discard, r)
	}
	if errors.Is(err, io.ErrUnexpectedEOF) {
		return safe.Truncated(err)
	}
	return err
}

// plain returns a reader of the uncompressed content of a file, which fails after most bytes.
func plain(r io.Reader, most int64) (io.Reader, error) {
	r, err := safe.Unzip(r)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return nil, safe.Truncated(err)
	}
	return &limited{r, most, most}, err
}

// A limited fails after a number of bytes.
type limited struct {
	r          io.Reader
	left, most int64
}

func (l *limited) Read(b []byte) (int, error) {
	n, err := l.r.Read(b)
	if l.left -= int64(n); l.left < 0 {
		return 0, fmt.Errorf("the file has more than %d bytes, uncompressed: record a shorter trace", l.most)
	}
	return n, err
}

// A recordedEvent is [action, address, size, stream, time in microseconds].
type recordedEvent struct {
	action             string
	addr, size, stream uint64
}

func (e *recordedEvent) parse(text []byte) error {
	var time float64
	fields := []any{&e.action, &e.addr, &e.size, &e.stream, &time}
	n := len(fields)
	if err := json.Unmarshal(text, &fields); err != nil || len(fields) != n {
		return fmt.Errorf("the event is %.80s: want [action, address, size, stream, time], with whole numbers of at least 0", text)
	}
	return nil
}

func (rec *Recording) readEvents(f *safe.JSONReader) error {
	var peaks Peaks
	name, lists := "", 0
	b := newBuilder("trace", &rec.spool)
	err := f.Object(func(key string) error {
		switch key {
		case "kind":
			err := f.Value(key, &name)
			b.name = cmp.Or(name, "trace")
			return err
		case "peak_allocated":
			return f.Value(key, &peaks.Allocated)
		case "peak_reserved":
			return f.Value(key, &peaks.Reserved)
		case "events":
			if lists++; lists > 1 {
				return errors.New(`the file has "events" twice`)
			}
			return f.List(key, b.recorded)
		}
		return f.Skip()
	})
	if err != nil {
		return err
	}
	if peaks.Allocated < 0 || peaks.Reserved < 0 {
		return fmt.Errorf("the recorded peaks are %d bytes allocated and %d reserved: want 0 (unknown) or more", peaks.Allocated, peaks.Reserved)
	}
	return rec.keep(b.finish(peaks))
}

// recorded adds the event with number n from its JSON.
func (b *builder) recorded(n int, text []byte) error {
	var e recordedEvent
	if err := e.parse(text); err != nil {
		return b.fail(n, "%v", err)
	}
	return b.add(n, e.action, e.addr, e.size, e.stream)
}

// errNothing rejects a trace without calls: it has no time per call.
var errNothing = errors.New("the trace has no allocations: record the history while the program allocates")

// keep sets the traces of the recording to those that contain calls.
func (rec *Recording) keep(all ...*Trace) error {
	rec.Traces = slices.DeleteFunc(all, func(t *Trace) bool { return t.Ops == 0 })
	if len(rec.Traces) == 0 {
		return errNothing
	}
	return nil
}

func (rec *Recording) readSnapshot(r io.Reader) error {
	var builders []*builder
	next, number := 0, 0 // the device after the last one, and the entries of that
	s, err := memory.WalkSnapshot(r, func(device int, e memory.TraceEntry) error {
		if device >= next {
			if len(builders) == mostTraces {
				return fmt.Errorf("the snapshot has traces of more than %d devices", mostTraces)
			}
			b := newBuilder(fmt.Sprintf("device %d", device), &rec.spool)
			b.earlier, b.device = true, device
			builders = append(builders, b)
			next, number = device+1, 0
		}
		number++
		return builders[len(builders)-1].add(number-1, e.Action, e.Address, e.Size, e.Stream)
	})
	if err != nil {
		return err
	}
	if len(builders) == 0 {
		return errors.New("the snapshot has no trace: record the history before taking it")
	}
	var traces []*Trace
	for _, b := range builders {
		if err := b.heldEarlier(s.Segments); err != nil {
			return err
		}
		traces = append(traces, b.finish(Peaks{}))
	}
	return rec.keep(traces...)
}

// heldEarlier adds the blocks and segments of a snapshot that were allocated before the
// trace.
func (b *builder) heldEarlier(segments []memory.Segment) error {
	reserved := int64(0)
	for _, g := range segments {
		if g.Device != b.device {
			continue
		}
		reserved += int64(g.TotalSize)
		for _, k := range g.Blocks {
			// A block that is in use without a recorded allocation was allocated before the trace.
			if _, known := b.live[k.Address]; !known && k.State != "inactive" && k.RequestedSize > 0 {
				if err := b.before(-1, k.Address, k.RequestedSize, g.Stream); err != nil {
					return err
				}
			}
		}
	}
	b.sum.heldEarlier(reserved - b.sum.now.Reserved)
	return nil
}

const (
	// spoolMemory is the number of bytes of events that stay in memory. The others are in
	// a temporary file without a name.
	spoolMemory = 256 << 10
	// partEvents is the number of events that are decoded at once.
	partEvents = 1 << 15
)

// A spool stores the events of traces in a few bytes each.
type spool struct {
	head []byte
	file *os.File // the bytes after spoolMemory, or nil
	w    *bufio.Writer
	n    int64  // length in bytes
	buf  []byte // one event
}

// write appends an event, encoding its number by the distance to before, the
// number of the trace's previous event.
func (s *spool) write(e *Event, before int) error {
	b := append(s.buf[:0], byte(e.Op))
	b = binary.AppendUvarint(b, uint64(e.Number-before))
	if e.Op != EmptyCache {
		b = binary.AppendUvarint(b, uint64(e.Block))
	}
	if e.Op == Alloc {
		b = binary.AppendUvarint(b, uint64(e.Bytes))
		b = binary.AppendUvarint(b, uint64(e.Stream))
	}
	s.buf = b
	s.n += int64(len(b))
	if s.file == nil && len(s.head)+len(b) <= spoolMemory {
		s.head = append(s.head, b...)
		return nil
	}
	if s.file == nil {
		if err := s.spill(); err != nil {
			return err
		}
	}
	_, err := s.w.Write(b)
	return err
}

// spill opens the temporary file.
func (s *spool) spill() error {
	f, err := os.CreateTemp("", "chorus-trace-*") // only this user can read it
	if err != nil {
		return fmt.Errorf("a file for the events: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return errors.Join(err, f.Close())
	}
	s.file, s.w = f, bufio.NewWriter(f)
	return nil
}

// ReadAt reads bytes of the spool after the last write.
func (s *spool) ReadAt(b []byte, at int64) (n int, err error) {
	if at < int64(len(s.head)) {
		n = copy(b, s.head[at:])
		at += int64(n)
	}
	if n == len(b) || s.file == nil {
		return n, nil
	}
	if err := s.w.Flush(); err != nil {
		return n, err
	}
	k, err := s.file.ReadAt(b[n:], at-int64(len(s.head)))
	return n + k, err
}

// Close frees the temporary file.
func (s *spool) Close() error {
	if s == nil || s.file == nil {
		return nil
	}
	return s.file.Close()
}

// A section holds events that a spool has.
type section struct {
	spool    *spool
	from, to int64 // in bytes
	count    int
}

// each calls fn with consecutive parts of the events, which fn must not keep.
func (x *section) each(fn func([]Event) error) error {
	if x.count == 0 {
		return nil
	}
	r := bufio.NewReader(io.NewSectionReader(x.spool, x.from, x.to-x.from))
	part := make([]Event, 0, min(partEvents, x.count))
	last := -1
	for left := x.count; left > 0; {
		part = part[:min(left, cap(part))]
		for i := range part {
			if err := readEvent(r, &part[i], last); err != nil {
				return fmt.Errorf("read the stored events: %w", err)
			}
			last = part[i].Number
		}
		left -= len(part)
		if err := fn(part); err != nil {
			return err
		}
	}
	return nil
}

// readEvent is the inverse of spool.write.
func readEvent(r *bufio.Reader, e *Event, before int) error {
	op, err := r.ReadByte()
	if int(op) >= len(fields) {
		return fmt.Errorf("an event of the kind %d", op)
	}
	*e = Event{Op: Op(op), Number: before}
	for _, to := range []*int{&e.Number, &e.Block, &e.Bytes, &e.Stream}[:fields[e.Op]] {
		var n uint64
		if err == nil {
			n, err = binary.ReadUvarint(r)
		}
		*to += int(n)
	}
	return err
}

// fields is the number of numbers that are stored for an event.
var fields = [...]int{Alloc: 4, Free: 2, EmptyCache: 1}
