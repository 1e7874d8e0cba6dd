package gds

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/handle"
)

// FileConfig are the options of Open, OpenFile and Create; nil means their zero
// values.
type FileConfig struct {
	// Engine is the one to try first. Auto is what CHORUS_GDS_ENGINE says.
	Engine Engine
	// Threads is how many threads one call uses at most. 0 is what
	// CHORUS_GDS_THREADS says.
	Threads int
}

// A File is a file whose bytes go to device memory and come from there
// (torch.cuda.gds.GdsFile).
type File struct {
	owner handle.Owner
	path  string
	plain *os.File // goes by the page cache
	fd    int      // of plain
	write bool     // it may be written
	blind bool     // it may not be read
	new   bool     // it is of Create
	mem   bool     // its file system is memory: the page cache is all there is
	was   identity // when it was opened

	first   Engine // asked for
	threads int    // 0 is the device's share of the cores
	chunk   int64  // of the ring, in bytes; 0 fits it to the threads and devices
	depth   int    // slots of each worker
	sys     system

	direct  directFile
	count   counters
	growing sync.Mutex                     // held while the file is made longer
	why     [engines]atomic.Pointer[error] // an engine does not work

	mu     sync.Mutex
	users  int
	closed bool
	fresh  *fresh // of Create, until Commit
	known  []*registration
}

// system is what the files ask of the operating system. Tests put their own there.
type system struct {
	pread, pwrite mover
	fsync         func(fd int) error
	fallocate     func(fd int, mode uint32, off, bytes int64) error
}

// Open opens a file to read it. It must be a regular one. What is read of it later
// is an error that matches ErrChanged when somebody has changed the file since.
func Open(path string, cfg *FileConfig) (*File, error) {
	return open("open", path, os.O_RDONLY, cfg)
}

// OpenFile opens a file with flags of package os, such as
// os.O_RDWR|os.O_CREATE, to write it in place; who opens it to read only uses Open
// (GdsFile). A crash in the middle of WriteAt leaves a mixture: Create leaves the
// old file or the new one.
func OpenFile(path string, flag int, cfg *FileConfig) (*File, error) {
	return open("open", path, flag, cfg)
}

func open(op, path string, flag int, cfg *FileConfig) (*File, error) {
	var c FileConfig
	if cfg != nil {
		c = *cfg
	}
	f := &File{path: path, write: flag&(os.O_WRONLY|os.O_RDWR) != 0, blind: flag&os.O_WRONLY != 0, depth: defaultDepth,
		sys: system{unix.Pread, unix.Pwrite, unix.Fsync, unix.Fallocate}}
	if flag&os.O_APPEND != 0 {
		return nil, f.fail(op, errors.New("O_APPEND writes at no offset: leave it out"))
	}
	var err error
	if f.first, err = engineOf(c); err != nil {
		return nil, f.fail(op, err)
	}
	if f.threads, err = threadsOf(c); err != nil {
		return nil, f.fail(op, err)
	}
	if err := f.start(flag); err != nil {
		return nil, f.fail(op, err)
	}
	handle.Init(f, &f.owner, handle.About{Kind: "file", On: handle.Name(f.path)})
	return f, nil
}

// start opens the file itself.
func (f *File) start(flag int) error {
	// A pipe would keep the call waiting for its other end.
	plain, err := os.OpenFile(f.path, flag|unix.O_NONBLOCK, 0o666)
	if err != nil {
		return errors.Unwrap(err)
	}
	f.plain, f.fd = plain, int(plain.Fd())
	if err := f.look(); err != nil {
		return errors.Join(err, plain.Close())
	}
	return nil
}

func (f *File) look() error {
	info, err := f.plain.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("it is no regular file but %s", info.Mode())
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(f.fd, &fs); err != nil {
		return fmt.Errorf("statfs: %w", err)
	}
	f.mem = fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC
	f.was, err = f.identity()
	f.rule()
	return err
}

// Path returns the path that the file was opened by.
func (f *File) Path() string { return f.path }

// readHost fills p, ordinary memory, with the bytes at off, by the page cache.
func (f *File) readHost(ctx context.Context, p []byte, off int64) (int, error) {
	if err := f.use("read"); err != nil {
		return 0, err
	}
	defer f.unuse()
	n, err := f.fill(ctx, f.fd, p, off)
	if changed := f.unchanged(); changed != nil {
		return 0, f.fail("read", changed)
	}
	if err != nil {
		err = &Error{Op: "read", Path: f.path, Offset: off, Wanted: int64(len(p)), Got: int64(n), Err: err}
	}
	return n, err
}

// Sync returns when what was written is on the disk, or ctx has ended.
func (f *File) Sync(ctx context.Context) error {
	if err := f.use("sync"); err != nil {
		return err
	}
	defer f.unuse()
	if err := f.flush(ctx); err != nil {
		return f.fail("sync", err)
	}
	return nil
}

// flush waits for the disk, which nothing interrupts: when ctx ends first, a
// goroutine goes on waiting.
func (f *File) flush(ctx context.Context) error {
	if err := f.use("sync"); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		err := f.sys.fsync(f.fd)
		f.unuse() // first: whoever hears of the end may commit the file
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
