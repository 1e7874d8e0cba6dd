package gds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
)

// An Engine is the path of bytes between a file and device memory.
type Engine uint8

// The engines. CuFile falls back to Direct, and Direct falls back to Cached.
const (
	Auto   Engine = iota // chosen for each file, and for each part
	Cached               // through the page cache, or from tmpfs, and through pinned memory
	Direct               // around the page cache (O_DIRECT), through pinned memory
	CuFile               // by NVIDIA's cuFile
	engines
)

var engineNames = [engines]string{"auto", "cached", "direct", "cufile"}

// String returns the name of the engine in CHORUS_GDS_ENGINE.
func (e Engine) String() string {
	if e < engines {
		return engineNames[e]
	}
	return fmt.Sprintf("Engine(%d)", uint8(e))
}

// engineOf returns the engine of the configuration, or of the environment.
func engineOf(c FileConfig) (Engine, error) {
	if c.Engine >= engines {
		return Auto, fmt.Errorf("there is no engine %d", uint8(c.Engine))
	}
	if c.Engine != Auto {
		return c.Engine, nil
	}
	name, err := env.GDSEngine.OneOf(engineNames[:]...)
	if err != nil {
		return Auto, err
	}
	for e, n := range engineNames {
		if n == name {
			return Engine(e), nil
		}
	}
	return Auto, nil
}

// threadsOf returns the number of threads of one call, or 0 if it depends on the device.
func threadsOf(c FileConfig) (int, error) {
	n := c.Threads
	fits := func(n int) bool { return n >= 0 && n <= maxThreads }
	want := fmt.Sprintf("1 to %d, or 0 for as many as the machine's cores allow each device", maxThreads)
	if n == 0 {
		return env.GDSThreads.IntWhere(want, fits)
	}
	if !fits(n) {
		return 0, fmt.Errorf("%d threads: want %s", n, want)
	}
	return n, nil
}

const (
	minThreads = 4
	enough     = 16 // so many threads copying from the page cache saturate the bus
	maxThreads = 1024
)

// defaultThreads returns the device's part of the cores.
func defaultThreads(d *device.Device) int {
	return min(max(runtime.NumCPU()/len(d.System().Devices()), minThreads), enough)
}

// refused reports whether an error means that the engine does not work for the file,
// rather than that the file cannot be read.
func refused(e Engine, err error) bool {
	switch e {
	case Direct:
		return errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM)
	}
	return false
}

// directFile is a descriptor of the file with O_DIRECT, opened on first use.
type directFile struct {
	once  sync.Once
	fd    int
	align int64 // of offsets and lengths
	open  bool
}

// usualAlign is accepted by every block device.
const usualAlign = 4096

// directReady reports whether the file can be accessed with O_DIRECT.
func (f *File) directReady() bool {
	if f.refuses(Direct) {
		return false
	}
	f.direct.once.Do(func() {
		if err := f.openDirect(); err != nil {
			f.refuse(Direct, err)
		}
	})
	return !f.refuses(Direct)
}

// keptDescriptors is the number of file descriptors that direct reads, which are not necessary, leave to
// NCCL's connections and to the program.
const keptDescriptors = 64

func (f *File) openDirect() error {
	flags, err := unix.FcntlInt(uintptr(f.fd), unix.F_GETFL, 0)
	if err != nil {
		return fmt.Errorf("get its flags: %w", err)
	}
	flags = flags&unix.O_ACCMODE | unix.O_DIRECT | unix.O_CLOEXEC
	// Through the descriptor, because the path may now name another file.
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", f.fd), flags, 0)
	var limit unix.Rlimit
	switch {
	case errors.Is(err, unix.EMFILE):
		return fmt.Errorf("open it once more with O_DIRECT: %w; %s", err, advice(err))
	case err != nil:
		return fmt.Errorf("the file system does not open it with O_DIRECT: %w", err)
	case unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil && uint64(fd)+keptDescriptors >= limit.Cur:
		// The kernel returns the lowest free number.
		_ = unix.Close(fd)
		return fmt.Errorf("open it once more with O_DIRECT: the last %d file descriptors are left for other uses; %s", keptDescriptors, advice(unix.EMFILE))
	}
	d := &f.direct
	d.fd, d.open, d.align = fd, true, usualAlign
	var st unix.Statx_t
	if unix.Statx(fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st) == nil && st.Mask&unix.STATX_DIOALIGN != 0 {
		if st.Dio_offset_align == 0 {
			return fmt.Errorf("the file system reads it by the page cache, also with O_DIRECT")
		}
		// At least whole pages, so that direct writes and writes through the page cache
		// never share a page.
		d.align = int64(max(st.Dio_offset_align, st.Dio_mem_align, usualAlign))
	}
	if d.align > minSlot || d.align&(d.align-1) != 0 {
		return fmt.Errorf("the file system aligns direct reads to %d bytes", d.align)
	}
	return nil
}

func (d *directFile) close() error {
	if !d.open {
		return nil
	}
	d.open = false
	return os.NewSyscallError("close", unix.Close(d.fd))
}

// outward returns the smallest aligned range that contains the range between two offsets.
func (d *directFile) outward(from, to int64) (int64, int64) {
	return from &^ (d.align - 1), (to + d.align - 1) &^ (d.align - 1)
}

// inward returns the largest aligned range between two offsets. It may be empty, at from
// or at to.
func (d *directFile) inward(from, to int64) (int64, int64) {
	a, b := (from+d.align-1)&^(d.align-1), to&^(d.align-1)
	if a >= b {
		return to, to
	}
	return a, b
}

// readDirect reads the aligned range around the wanted bytes. The slot begins at base,
// which is aligned, and its end is aligned. At the end of the file the read is shorter;
// other short reads are continued through the page cache, which accepts any offset.
func (f *File) readDirect(ctx context.Context, buf []byte, base, from, to int64) (n int, err error) {
	a, b := f.direct.outward(from, to)
	m, err := f.once(ctx, f.sys.Pread, f.direct.fd, buf[a-base:b-base], a)
	have := min(a+int64(m), to)
	if err != nil || have == to {
		return max(0, int(have-from)), err
	}
	f.count.continued.Add(1)
	n, err = f.fill(ctx, f.fd, buf[have-base:to-base], have)
	return max(0, int(have-from)+n), err
}

// The reasons that rule gives.
var (
	errInMemory   = errors.New("the file system keeps files in memory: the page cache has all their bytes")
	errNoNvidiaFS = errors.New("nvidia-fs is not loaded, so that cuFile would copy through host memory as the other engines do: CHORUS_GDS_ENGINE=cufile tries it")
)

// rule refuses the engines that are not used for the file.
func (f *File) rule() {
	asked := fmt.Errorf("engine %s was asked for", f.first)
	switch f.first {
	case Cached:
		f.refuse(Direct, asked)
		f.refuse(CuFile, asked)
	case Direct:
		f.refuse(CuFile, asked)
	case Auto:
		if f.mem {
			f.refuse(Direct, errInMemory)
			f.refuse(CuFile, errInMemory)
		} else if _, err := os.Stat("/proc/driver/nvidia-fs"); err != nil {
			f.refuse(CuFile, errNoNvidiaFS)
		}
	}
}

// readEngine chooses the engine for a range of bytes that cuFile does not read.
func (f *File) readEngine(from, to int64) Engine {
	if !f.directReady() || f.first == Auto && f.resident(from, to) {
		return Cached
	}
	return Direct
}

// writeEngine chooses the engine for writes that cuFile does not do. It prefers Direct,
// because bytes in the page cache would have to be written to the disk later.
func (f *File) writeEngine() Engine {
	if !f.directReady() {
		return Cached
	}
	return Direct
}

// resident reports whether at least half of the bytes are in the page cache. If the system
// does not report that, Direct is refused.
func (f *File) resident(from, to int64) bool {
	var st unix.Cachestat_t
	if err := unix.Cachestat(uint(f.fd), &unix.CachestatRange{Off: uint64(from), Len: uint64(to - from)}, &st, 0); err != nil {
		f.refuse(Direct, fmt.Errorf("the system does not report the pages in its page cache: %w", os.NewSyscallError("cachestat", err)))
		return true
	}
	return st.Cache*uint64(os.Getpagesize())*2 >= uint64(to-from)
}

// refuse records why an engine does not work for the file, unless a reason is
// known already.
func (f *File) refuse(e Engine, why error) { f.why[e].CompareAndSwap(nil, &why) }

func (f *File) refuses(e Engine) bool { return f.why[e].Load() != nil }

// ErrChanged is returned, wrapped, by a read of a file that has changed since it was
// opened: another process has written it or changed its length.
var ErrChanged = errors.New("the file has changed since it was opened")

// An Error reports a failed operation on a file. It wraps the cause: an errno,
// io.ErrUnexpectedEOF, ErrChanged, the cause of a context, or an error of the device.
type Error struct {
	Op     string // such as "read"
	Path   string
	Offset int64  // position of the failure in the file; -1 if the error concerns the whole file
	Wanted int64  // bytes, from Offset on
	Got    int64  // bytes done
	Engine Engine // Auto if no engine was involved
	Err    error
}

func (e *Error) Error() string {
	if e.Offset < 0 {
		return fmt.Sprintf("gds: %s %s%s", e.Op, e.Path, e.story())
	}
	return fmt.Sprintf("gds: %s %s at byte %d%s", e.Op, e.Path, e.Offset, e.story())
}

// story returns the part of the message after the position.
func (e *Error) story() string {
	var b strings.Builder
	if e.Offset >= 0 {
		fmt.Fprintf(&b, ": %d of %d bytes", e.Got, e.Wanted)
	}
	if e.Engine != Auto {
		fmt.Fprintf(&b, " by engine %s", e.Engine)
	}
	fmt.Fprintf(&b, ": %v", e.Err)
	if a := advice(e.Err); a != "" {
		b.WriteString(": " + a)
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// advice returns a remedy for a cause, or "".
func advice(err error) string {
	switch {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "the file ends too early: get it again, and do not shorten it while it is read"
	case errors.Is(err, ErrChanged):
		return "open it again when no program writes it"
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return "make room in the file system and write it again"
	case errors.Is(err, syscall.EFBIG):
		return "the file system or the process's limit (ulimit -f) does not allow a file of this size"
	case errors.Is(err, syscall.EMFILE):
		return "raise the process's limit of open files (ulimit -n)"
	case errors.Is(err, syscall.EIO):
		return "the device or the network below the file system failed: look at the system's log"
	}
	return ""
}

// fail returns an Error for the whole file.
func (f *File) fail(op string, err error) error {
	return &Error{Op: op, Path: f.path, Offset: -1, Err: err}
}
