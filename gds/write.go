package gds

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/stream"
)

// writePieces writes the pieces to the file. They are on the device of s and in file
// order; the bytes between them stay unchanged in the file. It returns when the operating
// system has the bytes, which Sync or Commit flushes to the disk, or after an error when
// no transfer is pending.
func (f *File) writePieces(ctx context.Context, s *stream.Stream, pieces []piece, h hooks) error {
	const op = "write"
	if err := f.use(op); err != nil {
		return err
	}
	defer f.unuse()
	if !f.write {
		return f.fail(op, fmt.Errorf("it was opened to be read only: open it by OpenFile or Create: %w", unix.EBADF))
	}
	if len(pieces) > 0 {
		if err := f.reserve(pieces[len(pieces)-1].End()); err != nil {
			return err
		}
	}
	return f.transfer(ctx, op, s, pieces, h, true)
}

// reserve allocates the disk blocks of a new file up to an offset, so that a full disk is
// detected before anything is written. On a file system in memory nothing is reserved: its
// memory is allocated by all threads during the writes.
func (f *File) reserve(end int64) error {
	if !f.new || f.mem {
		return nil
	}
	f.growing.Lock()
	defer f.growing.Unlock()
	id, err := f.identity()
	if err != nil {
		return f.fail("write", err)
	}
	more := end - id.size
	if more <= 0 {
		return nil
	}
	err = f.sys.Fallocate(f.fd, 0, id.size, more)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) || errors.Is(err, unix.EFBIG) {
		return &Error{Op: "write", Path: f.path, Offset: id.size, Wanted: more, Err: err}
	}
	return nil // without reservation, a full disk is detected later
}

// write copies windows from the device into slots and writes the slots to the file.
func (w *worker) write() error {
	t := w.t
	for {
		i, err := w.freeSlot(w.store)
		if err != nil {
			return err
		}
		win, ok := t.claim()
		if !ok {
			t.spare()
			return w.all(w.store)
		}
		if err := w.copy(i, win, w.lane.download); err != nil {
			return err
		}
	}
}

// store waits for the copies to a slot and writes it to the file.
func (w *worker) store(i int) error {
	h, t := &w.held[i], w.t
	if landed, err := w.land(i); !landed {
		return err
	}
	for j := h.w.first; j < h.w.last; {
		from, to, next := h.w.rangeOf(t.pieces, j, 0)
		if e, n, err := t.f.writeRun(t.ctx, h.slot.buf, h.w.off, from, to); err != nil {
			return t.at(e, from, to, n, err)
		}
		j = next
	}
	t.tell(h.bytes)
	return nil
}

// writeRun writes the bytes between two offsets from a slot that begins at base. After an
// error n bytes were written.
func (f *File) writeRun(ctx context.Context, buf []byte, base, from, to int64) (e Engine, n int, err error) {
	e = f.writeEngine()
	if e == Direct {
		n, err = f.writeDirect(ctx, buf, base, from, to)
		if err == nil || !refused(e, err) {
			return e, n, err
		}
		f.refuse(e, err)
	}
	m, err := f.put(ctx, Cached, f.fd, buf, base, from+int64(n), to)
	return Cached, n + m, err
}

// writeDirect writes the aligned middle around the page cache and the ends through it. No
// other window writes the blocks of the ends directly.
func (f *File) writeDirect(ctx context.Context, buf []byte, base, from, to int64) (n int, err error) {
	a, b := f.direct.inward(from, to)
	for _, x := range []struct {
		e        Engine
		fd       int
		from, to int64
	}{{Cached, f.fd, from, a}, {Direct, f.direct.fd, a, b}, {Cached, f.fd, b, to}} {
		if x.from == x.to {
			continue
		}
		m, err := f.put(ctx, x.e, x.fd, buf, base, x.from, x.to)
		n += m
		if err != nil {
			return n, err
		}
	}
	return n, nil
}

// put writes bytes of a slot to a descriptor.
func (f *File) put(ctx context.Context, e Engine, fd int, buf []byte, base, from, to int64) (int, error) {
	n, err := f.empty(ctx, fd, buf[from-base:to-base], from)
	f.count.by[e].add(true, int64(n))
	return n, err
}
