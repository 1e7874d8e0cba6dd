package memtrace

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
)

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

// write appends an event. The previous event of the trace has the number before.
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

// each calls fn with consecutive parts of the events. fn must not keep them.
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
