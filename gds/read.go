package gds

import (
	"context"
	"fmt"
	"io"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/stream"
)

// readPieces reads the file's bytes into the pieces, which are on the device of s and in
// file order. It returns when all bytes are in device memory, or after an error when no
// transfer is pending.
func (f *File) readPieces(ctx context.Context, s *stream.Stream, pieces []piece, h hooks) error {
	const op = "read"
	if err := f.use(op); err != nil {
		return err
	}
	defer f.unuse()
	if f.blind {
		return f.fail(op, fmt.Errorf("it was opened to be written only: open it with os.O_RDWR: %w", unix.EBADF))
	}
	if err := f.unchanged(); err != nil {
		return f.fail(op, err)
	}
	if err := f.inside(op, pieces); err != nil {
		return err
	}
	if err := f.transfer(ctx, op, s, pieces, h, false); err != nil {
		return err
	}
	if err := f.unchanged(); err != nil {
		return f.fail(op, err)
	}
	return nil
}

// inside returns an error if the file ends before the pieces do.
func (f *File) inside(op string, pieces []piece) error {
	id, err := f.identity()
	if err != nil {
		return f.fail(op, err)
	}
	for _, p := range pieces {
		if p.Mem.Len() > 0 && p.End() > id.size {
			return &Error{Op: op, Path: f.path, Offset: p.Off, Wanted: int64(p.Mem.Len()), Got: max(0, id.size-p.Off), Err: io.ErrUnexpectedEOF}
		}
	}
	return nil
}

// read reads windows into slots and copies them to the device.
func (w *worker) read() error {
	t := w.t
	for {
		i, err := w.freeSlot(w.awaitCopies)
		if err != nil {
			return err
		}
		win, ok := t.claim()
		if !ok {
			t.spare()
			return w.all(w.awaitCopies)
		}
		if err := t.fetch(win, w.held[i].slot); err != nil {
			return err
		}
		if err := w.copy(i, win, w.lane.upload); err != nil {
			return err
		}
	}
}

// fetch reads the pieces of a window into a slot, each at its place in the window.
func (t *transfer) fetch(win window, x *slot) error {
	for i := win.first; i < win.last; {
		from, to, next := win.rangeOf(t.pieces, i, gapBytes)
		if e, n, err := t.f.readRun(t.ctx, x.buf, win.off, from, to); err != nil {
			return t.at(e, from, to, n, err)
		}
		i = next
	}
	return nil
}

// awaitCopies waits for the copies from a slot.
func (w *worker) awaitCopies(i int) error {
	landed, err := w.land(i)
	if landed {
		w.t.tell(w.held[i].bytes)
	}
	return err
}

// readRun reads the bytes between two offsets into a slot that begins at base. After an
// error n bytes were read.
func (f *File) readRun(ctx context.Context, buf []byte, base, from, to int64) (e Engine, n int, err error) {
	for {
		e = f.readEngine(from, to)
		if e == Direct {
			n, err = f.readDirect(ctx, buf, base, from, to)
		} else {
			n, err = f.fill(ctx, f.fd, buf[from-base:to-base], from)
		}
		f.count.by[e].add(false, int64(n))
		if err == nil || !refused(e, err) {
			return e, n, err
		}
		f.refuse(e, err)
	}
}
