package gds

import (
	"context"
	"fmt"
	"io"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// ReadAt reads the file's bytes from offset off into dst and returns the number of bytes:
// fewer than dst has, with io.EOF, if the file ends earlier. memory.Slice's AsBytes
// converts slices of other types. dst is written after the operations that are already
// enqueued on s, and ReadAt returns when the bytes are in dst, so that operations enqueued
// later see them. After another error, an *Error, the contents of dst are undefined, and
// no transfer is pending. ReadAt checks ctx between parts of some MiB.
func (f *File) ReadAt(ctx context.Context, s *stream.Stream, dst memory.Slice[byte], off int64) (n int, err error) {
	size, err := f.size("read")
	if err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, f.fail("read", fmt.Errorf("offset %d is negative", off))
	}
	n = int(min(int64(dst.Len()), max(0, size-off)))
	if err := f.readPieces(ctx, s, []piece{{Off: off, Mem: dst.Slice(0, n)}}, hooks{}); err != nil {
		return 0, err
	}
	if n < dst.Len() {
		return n, io.EOF
	}
	return n, nil
}

// Load fills dst with the file's bytes from offset off
// (torch.cuda.gds.GdsFile.load_storage). It is ReadAt, except that a file that ends too
// early is an error that matches io.ErrUnexpectedEOF, and nothing is read.
func (f *File) Load(ctx context.Context, s *stream.Stream, dst memory.Slice[byte], off int64) error {
	return f.readPieces(ctx, s, []piece{{Off: off, Mem: dst}}, hooks{})
}

// WriteAt writes src to the file at offset off and returns the number of bytes, which is
// the length of src unless there is an error, an *Error. It waits for the operations that
// are already enqueued on s, and returns when the operating system has the bytes; Sync
// flushes them to the disk. After an error the file may contain any part of the bytes.
func (f *File) WriteAt(ctx context.Context, s *stream.Stream, src memory.Slice[byte], off int64) (n int, err error) {
	if err := f.Save(ctx, s, src, off); err != nil {
		return 0, err
	}
	return src.Len(), nil
}

// Save writes src to the file at off (torch.cuda.gds.GdsFile.save_storage); see
// WriteAt.
func (f *File) Save(ctx context.Context, s *stream.Stream, src memory.Slice[byte], off int64) error {
	return f.writePieces(ctx, s, []piece{{Off: off, Mem: src}}, hooks{})
}
