package gds

import (
	"context"
	"fmt"
	"io"

	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// ReadAt reads the file's bytes from off on into dst and returns how many there
// were: fewer than dst has, with io.EOF, where the file ends before. memory.Slice's
// AsBytes makes bytes of any elements. dst is written after what is on s by now,
// and ReadAt returns when the bytes are there, so that what is enqueued later
// finds them. After another error, an *Error, dst has undefined contents, and
// nothing is in flight. A ctx that ends is obeyed between parts of some MiB.
func (f *File) ReadAt(ctx context.Context, s *stream.Stream, dst memory.Slice[byte], off int64) (n int, err error) {
	size, err := f.size("read")
	if err != nil {
		return 0, err
	}
	if off < 0 {
		return 0, f.fail("read", fmt.Errorf("offset %d is negative", off))
	}
	n = int(min(int64(dst.Len()), max(0, size-off)))
	if err := f.readPieces(ctx, s, []piece{{off, dst.Slice(0, n)}}, hooks{}); err != nil {
		return 0, err
	}
	if n < dst.Len() {
		return n, io.EOF
	}
	return n, nil
}

// Load fills dst with the file's bytes from off on
// (torch.cuda.gds.GdsFile.load_storage). It is ReadAt where a file that ends
// before is an error that matches io.ErrUnexpectedEOF, and then nothing is read.
func (f *File) Load(ctx context.Context, s *stream.Stream, dst memory.Slice[byte], off int64) error {
	return f.readPieces(ctx, s, []piece{{off, dst}}, hooks{})
}

// WriteAt writes src to the file at off and returns how many bytes it has written,
// which are all unless there is an error, an *Error. It writes what s has brought to
// src by now, and returns when the operating system has the bytes: Sync brings them
// to the disk. After an error any part of them may be in the file.
func (f *File) WriteAt(ctx context.Context, s *stream.Stream, src memory.Slice[byte], off int64) (n int, err error) {
	if err := f.Save(ctx, s, src, off); err != nil {
		return 0, err
	}
	return src.Len(), nil
}

// Save writes src to the file at off (torch.cuda.gds.GdsFile.save_storage); see
// WriteAt.
func (f *File) Save(ctx context.Context, s *stream.Stream, src memory.Slice[byte], off int64) error {
	return f.writePieces(ctx, s, []piece{{off, src}}, hooks{})
}
