package gds

import (
	"context"
	"io"
	"runtime"

	"golang.org/x/sys/unix"
)

// manyTries is how often in a row a system call may return a temporary error before that
// is an error.
const manyTries = 1000

// fill reads until p is full and returns the number of bytes. A short read is continued;
// at the end of the file the error is io.ErrUnexpectedEOF.
func (f *File) fill(ctx context.Context, fd int, p []byte, off int64) (n int, err error) {
	return f.whole(ctx, f.sys.Pread, fd, p, off, io.ErrUnexpectedEOF)
}

// empty writes all of p.
func (f *File) empty(ctx context.Context, fd int, p []byte, off int64) (n int, err error) {
	return f.whole(ctx, f.sys.Pwrite, fd, p, off, io.ErrShortWrite)
}

// whole calls move until all of p has been moved. none is the error if a call moves no
// bytes.
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

// once calls move until the result is not a temporary error.
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
