package gds

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/files"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/safe"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
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

// Open opens a regular file for reading. If another process changes the file,
// later reads return an error that matches ErrChanged.
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
	c := *cmp.Or(cfg, new(FileConfig))
	f := &File{path: path, write: flag&(os.O_WRONLY|os.O_RDWR) != 0, blind: flag&os.O_WRONLY != 0, depth: defaultDepth,
		sys: files.System{Pread: unix.Pread, Pwrite: unix.Pwrite, Fsync: unix.Fsync, Fallocate: unix.Fallocate}}
	f.ref = handle.NewRef[files.File](fileInside{f})
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
	if err := f.start(*handle.Of(&c), flag); err != nil {
		return nil, f.fail(op, err)
	}
	handle.Init(f, &f.owner, handle.About{Kind: "file", On: handle.Name(f.path)})
	return f, nil
}

// start opens the file at its path, which is relative to folder unless that is
// nil.
func (f *File) start(folder *os.Root, flag int) (err error) {
	var plain *os.File
	if folder != nil {
		plain, err = safe.OpenIn(folder, f.path)
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

// flush waits for the disk. Because the wait cannot be interrupted, a goroutine
// continues it if ctx ends first.
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

// An identity distinguishes the states of a file.
type identity struct {
	dev, inode uint64
	size       int64
	changed    unix.Timespec
}

func (f *File) identity() (identity, error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return identity{}, fmt.Errorf("stat: %w", err)
	}
	return identity{uint64(st.Dev), st.Ino, st.Size, st.Mtim}, nil
}

// Size returns the length of the file in bytes.
func (f *File) Size() (int64, error) { return f.size("size") }

func (f *File) size(op string) (int64, error) {
	if err := f.use(op); err != nil {
		return 0, err
	}
	defer f.unuse()
	id, err := f.identity()
	if err != nil {
		return 0, f.fail(op, err)
	}
	return id.size, nil
}

// unchanged returns an error if the file has changed since it was opened. A file that is
// open for writing is not compared.
func (f *File) unchanged() error {
	if f.write {
		return nil
	}
	now, err := f.identity()
	switch {
	case err != nil:
		return err
	case now.size != f.was.size:
		return fmt.Errorf("%w: it had %d bytes and has %d", ErrChanged, f.was.size, now.size)
	case now != f.was:
		return fmt.Errorf("%w: its time of modification is another", ErrChanged)
	}
	return nil
}

// use keeps the descriptors open until unuse.
func (f *File) use(op string) error {
	if f == nil {
		return fmt.Errorf("gds: %s: no file given", op)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return f.fail(op, device.ErrClosed)
	}
	f.users++
	return nil
}

func (f *File) unuse() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.users--; f.users == 0 && f.closed {
		_ = f.release() // bytes written since the last Sync have no guarantee
	}
}

// Close closes the file and returns at once; calls in progress continue. A file of Create
// that was not committed is removed, and the old file stays. Close is idempotent.
func (f *File) Close() error {
	if f == nil {
		return nil
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil
	}
	f.closed = true
	f.owner.Close()
	err := f.fresh.remove()
	if f.users == 0 {
		err = errors.Join(err, f.release())
	}
	if err != nil {
		return f.fail("close", err)
	}
	return nil
}

// release closes the descriptors. f.mu is held.
func (f *File) release() error {
	f.forget()
	return errors.Join(f.direct.close(), f.plain.Close())
}

type (
	ref   = handle.Ref[files.File] // gives package checkpoint access to a File
	piece = files.Piece
	hooks = files.Hooks
	mover = files.Mover

	//lint:ignore U1000 see FileConfig
	within = handle.Ref[files.Within] // lets package checkpoint open files in a folder
)

// fileInside implements files.File for package checkpoint.
type fileInside struct{ f *File }

func (x fileInside) Read(ctx context.Context, s *stream.Stream, pieces []piece, h hooks) error {
	return x.f.readPieces(ctx, s, pieces, h)
}

func (x fileInside) Write(ctx context.Context, s *stream.Stream, pieces []piece, h hooks) error {
	return x.f.writePieces(ctx, s, pieces, h)
}

func (x fileInside) ReadHost(ctx context.Context, p []byte, off int64) (int, error) {
	return x.f.readHost(ctx, p, off)
}

func (x fileInside) WriteHost(fn func(w io.Writer) error) error {
	if err := fn(x.f.plain); err != nil {
		return x.f.fail("write", err)
	}
	return nil
}

func (x fileInside) Begin(start []byte, size int64) error { return x.f.begin(start, size) }

func (x fileInside) Temp() string { return x.f.fresh.temp }

func (x fileInside) Rename(path string) { x.f.path = path }

func (x fileInside) System() *files.System { return &x.f.sys }

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

// ReadAt reads the file's bytes from offset off into dst and returns the number
// of bytes: fewer than dst has, with io.EOF, if the file ends earlier. The
// method AsBytes of memory.Slice converts slices of other types. dst is written
// after the operations that are already enqueued on s, and ReadAt returns when
// the bytes are in dst, so that operations enqueued later see them. After
// another error, an *Error, the contents of dst are undefined, and no transfer
// is pending. ReadAt checks ctx between parts of some MiB.
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

// A Status describes the engines of a file.
type Status struct {
	Path   string
	Engine Engine // the engine of the most bytes so far, or else of the next bytes
	Cached EngineStatus
	Direct EngineStatus
	CuFile EngineStatus

	Continued int64 // system calls that moved fewer bytes than requested, and were continued
	Retried   int64 // system calls that were interrupted, and repeated
}

// An EngineStatus is the traffic of an engine for a file.
type EngineStatus struct {
	Reads, Writes           int64 // calls of the system
	BytesRead, BytesWritten int64
	Reason                  error // why the engine does not serve the file; nil if it could
}

// Status returns the state of the file's engines, why an engine is not used, and the
// traffic so far. It may be called at any time, also after Close.
func (f *File) Status() Status {
	s := Status{Path: f.path, Engine: f.prefers(),
		Cached: f.status(Cached), Direct: f.status(Direct), CuFile: f.status(CuFile),
		Continued: f.count.continued.Load(), Retried: f.count.retried.Load()}
	most := int64(0)
	for e := Cached; e < engines; e++ {
		t := &f.count.by[e]
		if n := t.bytesRead.Load() + t.bytesWritten.Load(); n > most {
			s.Engine, most = e, n
		}
	}
	return s
}

func (f *File) status(e Engine) EngineStatus {
	t := &f.count.by[e]
	x := EngineStatus{Reads: t.reads.Load(), Writes: t.writes.Load(),
		BytesRead: t.bytesRead.Load(), BytesWritten: t.bytesWritten.Load()}
	if why := f.why[e].Load(); why != nil {
		x.Reason = *why
	}
	return x
}

// prefers returns the engine that is tried first.
func (f *File) prefers() Engine {
	for _, e := range []Engine{CuFile, Direct} {
		if !f.refuses(e) {
			return e
		}
	}
	return Cached
}

// counters count the traffic of a file.
type counters struct {
	by                 [engines]traffic
	continued, retried atomic.Int64
}

// traffic counts the traffic of one engine.
type traffic struct{ reads, writes, bytesRead, bytesWritten atomic.Int64 }

func (t *traffic) add(write bool, bytes int64) {
	if write {
		t.writes.Add(1)
		t.bytesWritten.Add(bytes)
	} else {
		t.reads.Add(1)
		t.bytesRead.Add(bytes)
	}
}
