package gds

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

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
			t.allStarted()
			return w.all(w.awaitCopies)
		}
		if err := t.fetch(win, w.held[i].slot); err != nil {
			return err
		}
		if err := w.copy(i, win, w.copyStream.upload); err != nil {
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

// readRun reads the bytes between two offsets into a slot that begins at base.
// After an error, n is how many it has read.
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
			t.allStarted()
			return w.all(w.store)
		}
		if err := w.copy(i, win, w.copyStream.download); err != nil {
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

// writeRun writes the bytes between two offsets from a slot that begins at
// base. After an error, n is how many it has written.
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

// A fresh file has a temporary name until it is committed.
type fresh struct {
	temp  string
	final string
}

// Create creates a file that replaces the file at path, if there is one, atomically: until
// Commit it has a temporary name in the same directory, and Close removes it.
// After a crash the path has either the complete old file or the complete new one. A crash
// may leave a temporary file, .NAME.XXXXXXXX.tmp, which nothing removes; it can be deleted
// once no process writes it. The new file has the permissions of the old one.
func Create(path string, cfg *FileConfig) (*File, error) {
	const op = "create"
	final, mode, err := target(path)
	if err != nil {
		return nil, &Error{Op: op, Path: path, Offset: -1, Err: err}
	}
	name := filepath.Base(final)
	name = name[:min(len(name), 200)] // leave room for the prefix and suffix
	temp := filepath.Join(filepath.Dir(final), "."+name+"."+rand.Text()[:8]+".tmp")
	f, err := open(op, temp, os.O_RDWR|os.O_CREATE|os.O_EXCL, cfg)
	if err != nil {
		if e, ok := errors.AsType[*Error](err); ok {
			e.Path = path
		}
		return nil, err
	}
	f.path, f.new, f.fresh = path, true, &fresh{temp, final}
	if mode != 0 {
		if err := f.plain.Chmod(mode); err != nil {
			return nil, errors.Join(f.fail(op, errors.Unwrap(err)), f.Close())
		}
	}
	return f, nil
}

// target resolves a path to its file, and returns the file's permissions if it exists.
func target(path string) (final string, mode fs.FileMode, err error) {
	final, err = filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return path, 0, nil
	}
	if err != nil {
		return "", 0, err
	}
	info, err := os.Stat(final)
	if err != nil {
		return "", 0, err
	}
	if !info.Mode().IsRegular() {
		return "", 0, fmt.Errorf("it is not a regular file but %s", info.Mode())
	}
	return final, info.Mode().Perm(), nil
}

// Commit flushes the file to the disk, renames it to its path, and closes it.
// After an error the old file is unchanged and the new one is removed, unless
// the last step failed, flushing the directory: then a crash may leave either
// file. Calls that write the file must have returned. ctx can end Commit until
// the file is renamed.
func (f *File) Commit(ctx context.Context) error {
	const op = "commit"
	x, err := f.takeFresh(op)
	if err != nil {
		return err
	}
	defer f.unuse()
	if err = f.flush(ctx); err == nil {
		err = x.rename(f.sys.Fsync)
	}
	if err != nil {
		err = f.fail(op, errors.Join(err, x.remove()))
	}
	return errors.Join(err, f.Close())
}

// takeFresh takes the new file over, so that Close does not remove it.
func (f *File) takeFresh(op string) (*fresh, error) {
	if err := f.use(op); err != nil {
		return nil, err
	}
	f.mu.Lock()
	x, busy := f.fresh, f.users > 1
	if !busy {
		f.fresh = nil
	}
	f.mu.Unlock()
	switch {
	case busy:
		f.unuse()
		return nil, f.fail(op, errBusy)
	case x == nil:
		f.unuse()
		return nil, f.fail(op, errors.New("the file was not made by Create, or is being committed: Sync it"))
	}
	return x, nil
}

// rename moves the new file to its path, and flushes that to the disk.
func (x *fresh) rename(fsync func(fd int) error) error {
	if err := os.Rename(x.temp, x.final); err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(x.final))
	if err != nil {
		return err
	}
	return errors.Join(os.NewSyscallError("fsync", fsync(int(dir.Fd()))), dir.Close())
}

// remove removes the new file unless it was moved to its path.
func (x *fresh) remove() error {
	if x == nil {
		return nil
	}
	if err := os.Remove(x.temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
