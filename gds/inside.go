package gds

import (
	"context"
	"errors"
	"io"

	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/stream"
)

type (
	ref   = files.Ref // gives package checkpoint access to a File
	piece = files.Piece
	hooks = files.Hooks
	mover = files.Mover

	//lint:ignore U1000 see FileConfig
	within = files.Within // lets package checkpoint open files in a folder
)

// inside implements files.File for package checkpoint.
type inside struct{ f *File }

func (x inside) Read(ctx context.Context, s *stream.Stream, pieces []piece, h hooks) error {
	return x.f.readPieces(ctx, s, pieces, h)
}

func (x inside) Write(ctx context.Context, s *stream.Stream, pieces []piece, h hooks) error {
	return x.f.writePieces(ctx, s, pieces, h)
}

func (x inside) ReadHost(ctx context.Context, p []byte, off int64) (int, error) {
	return x.f.readHost(ctx, p, off)
}

func (x inside) WriteHost(fn func(w io.Writer) error) error {
	if err := fn(x.f.plain); err != nil {
		return x.f.fail("write", err)
	}
	return nil
}

func (x inside) Begin(start []byte, size int64) error { return x.f.begin(start, size) }

func (x inside) Temp() string { return x.f.fresh.temp }

func (x inside) Rename(path string) { x.f.path = path }

func (x inside) System() *files.System { return &x.f.sys }

// begin sets the length of a new file, reserves its disk space, and writes its first
// bytes.
func (f *File) begin(start []byte, size int64) error {
	if err := f.reserve(size); err != nil {
		return err
	}
	if _, err := f.plain.WriteAt(start, 0); err != nil {
		return f.fail("write", errors.Unwrap(err))
	}
	if err := f.plain.Truncate(size); err != nil {
		return f.fail("extend", errors.Unwrap(err))
	}
	return nil
}
