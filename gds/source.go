package gds

import (
	"context"
	"io"
	"runtime"

	"golang.org/x/sys/unix"
)

// manyTries is how often in a row the system may say that it cannot do anything
// now, before that is an error.
const manyTries = 1000

// fill reads until p is full and returns how many bytes there are. A short read is
// continued; the end of the file is io.ErrUnexpectedEOF.
func (f *File) fill(ctx context.Context, fd int, p []byte, off int64) (n int, err error) {
	return f.whole(ctx, f.sys.pread, fd, p, off, io.ErrUnexpectedEOF)
}

// empty writes all of p.
func (f *File) empty(ctx context.Context, fd int, p []byte, off int64) (n int, err error) {
	return f.whole(ctx, f.sys.pwrite, fd, p, off, io.ErrShortWrite)
}

// whole calls move until all of p has been moved. none is the error of a call that
// moves nothing.
func (f *File) whole(ctx context.Context, move mover, fd int, p []byte, off int64, none error) (n int, err error) {
	for n < len(p) {
		m, err := f.once(ctx, move, fd, p[n:], off+int64(n))
		if err == nil && m == 0 {
			err = none
		}
		if err != nil {
			return n, err
		}
		if n += m; n < len(p) {
			f.count.continued.Add(1)
		}
	}
	return n, nil
}

// A mover is pread or pwrite.
type mover = func(fd int, p []byte, off int64) (int, error)

// once calls move until it is not told to try again.
func (f *File) once(ctx context.Context, move mover, fd int, p []byte, off int64) (n int, err error) {
	for tries := 0; ; tries++ {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		n, err = move(fd, p, off)
		if err != unix.EINTR && err != unix.EAGAIN || tries >= manyTries {
			return max(n, 0), err
		}
		f.count.retried.Add(1)
		runtime.Gosched()
	}
}
