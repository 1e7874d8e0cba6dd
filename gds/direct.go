package gds

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

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
