// Package files gives package checkpoint access to the internals of a gds.File.
//
// gds.File embeds the bridge that [Of] follows.
package files

import (
	"context"
	"io"
	"os"

	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// GapBytes is the largest gap between two pieces that is read rather than skipped.
const GapBytes = 32 << 10

// A Piece is a run of bytes of a file and its place in device memory.
type Piece struct {
	Off int64              // in the file, in bytes
	Mem memory.Slice[byte] // its length is the piece's
}

// End returns the offset after the piece.
func (p Piece) End() int64 { return p.Off + int64(p.Mem.Len()) }

// Hooks connect a transfer with its caller. Any thread of the transfer calls the functions
// that are not nil.
type Hooks struct {
	Moved      func(bytes int) // bytes of pieces have arrived
	AllStarted func()          // a thread has no work left to start: the next transfer may begin
	Devices    int             // number of devices that move bytes at the same time; 0 means one
}

// A Mover reads or writes bytes at an offset of a descriptor.
type Mover = func(fd int, p []byte, off int64) (int, error)

// A System is the calls of the operating system that a file uses. Tests replace them.
type System struct {
	Pread, Pwrite Mover
	Fsync         func(fd int) error
	Fallocate     func(fd int, mode uint32, off, bytes int64) error
}

// A File is the internals of a gds.File.
type File interface {
	// Read fills pieces, which are on the device of s and in the file's order.
	Read(ctx context.Context, s *stream.Stream, pieces []Piece, h Hooks) error
	// Write writes pieces, which are on the device of s and in the file's order.
	Write(ctx context.Context, s *stream.Stream, pieces []Piece, h Hooks) error
	// ReadHost reads the bytes at off into p, ordinary memory, through the page cache.
	ReadHost(ctx context.Context, p []byte, off int64) (int, error)
	// WriteHost lets fn write the bytes of a new file through the page cache.
	WriteHost(fn func(w io.Writer) error) error
	// Begin sets the length of a new file, reserves its disk space, and writes its first
	// bytes.
	Begin(start []byte, size int64) error
	// Temp returns the name that a new file has until it is committed.
	Temp() string
	// Rename sets the path that errors name.
	Rename(path string)
	// System returns the calls of the system, which a test may replace.
	System() *System
}

// Of returns the internals of a file, which must not be nil.
func Of(x handle.Has[File]) File { return *handle.Of(x) }

// A Within is the folder of a gds.FileConfig, which opens files by their names in the folder without following
// links out of it. It is nil without such a folder.
type Within = *os.Root
