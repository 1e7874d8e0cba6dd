package gds

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/safefile"
)

// FileConfig are the options of Open, OpenFile and Create; nil means their zero
// values.
type FileConfig struct {
	// Engine is the engine to try first. Auto means CHORUS_GDS_ENGINE.
	Engine Engine
	// Threads is the maximum number of threads of one call. 0 means CHORUS_GDS_THREADS.
	Threads int

	within //lint:ignore U1000 package files uses its method
}

// A File is a file for transfers to and from device memory (torch.cuda.gds.GdsFile).
type File struct {
	ref
	owner handle.Owner
	path  string
	plain *os.File // for access through the page cache
	fd    int      // of plain
	write bool     // open for writing
	blind bool     // not open for reading
	new   bool     // from Create
	mem   bool     // on a file system in memory, which has only the page cache
	was   identity // when it was opened

	first   Engine // as configured
	threads int    // 0 means the device's part of the cores
	chunk   int64  // size of a slot in bytes; 0 chooses it by the threads and devices
	depth   int    // slots of each worker
	sys     files.System

	direct  directFile
	count   counters
	growing sync.Mutex                     // held while the file is extended
	why     [engines]atomic.Pointer[error] // why an engine does not work

	mu     sync.Mutex
	users  int
	closed bool
	fresh  *fresh // of Create, until Commit
	known  []*registration
}

// Open opens a file for reading. It must be a regular file. If another process changes the
// file, later reads return an error that matches ErrChanged.
func Open(path string, cfg *FileConfig) (*File, error) {
	return open("open", path, os.O_RDONLY, cfg)
}

// OpenFile opens a file with flags of package os, such as os.O_RDWR|os.O_CREATE, to write
// it in place; to only read a file, use Open (GdsFile). A crash during WriteAt leaves a
// mixture of old and new bytes: Create leaves the complete old file or the complete new
// one.
func OpenFile(path string, flag int, cfg *FileConfig) (*File, error) {
	return open("open", path, flag, cfg)
}

func open(op, path string, flag int, cfg *FileConfig) (*File, error) {
	var c FileConfig
	if cfg != nil {
		c = *cfg
	}
	f := &File{path: path, write: flag&(os.O_WRONLY|os.O_RDWR) != 0, blind: flag&os.O_WRONLY != 0, depth: defaultDepth,
		sys: files.System{Pread: unix.Pread, Pwrite: unix.Pwrite, Fsync: unix.Fsync, Fallocate: unix.Fallocate}}
	f.ref = files.New(inside{f})
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
	if err := f.start(files.Folder(&c), flag); err != nil {
		return nil, f.fail(op, err)
	}
	handle.Init(f, &f.owner, handle.About{Kind: "file", On: handle.Name(f.path)})
	return f, nil
}

// start opens the descriptor. If folder is not nil, the path is relative to it.
func (f *File) start(folder *os.Root, flag int) (err error) {
	var plain *os.File
	if folder != nil {
		plain, err = safefile.OpenIn(folder, f.path)
		f.path = filepath.Join(folder.Name(), f.path)
	} else { // without O_NONBLOCK, opening a pipe would wait for its other end
		plain, err = os.OpenFile(f.path, flag|unix.O_NONBLOCK, 0o666)
	}
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
		return fmt.Errorf("it is not a regular file but %s", info.Mode())
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

// readHost reads the bytes at off into p, ordinary memory, through the page cache.
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

// Sync returns when all written bytes are on the disk, or ctx has ended.
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

// flush waits for the disk. The wait cannot be interrupted: if ctx ends first, a goroutine
// continues it.
func (f *File) flush(ctx context.Context) error {
	if err := f.use("sync"); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() {
		err := f.sys.Fsync(f.fd)
		f.unuse() // first, because the caller may commit the file after the result
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
