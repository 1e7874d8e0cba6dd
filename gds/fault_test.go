package gds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A watch sees what a call leaves behind.
type watch struct {
	dev             *device.Device
	pinned          int64
	files, routines int
}

func startWatch(t testing.TB, d *device.Device) *watch {
	t.Helper()
	return &watch{d, memory.ReadHostStats(d).ActiveRequests.Current, openFiles(t), runtime.NumGoroutine()}
}

// end fails the test unless all is as it was, but for as many files as are open on
// purpose.
func (w *watch) end(t testing.TB) {
	t.Helper()
	require.Equal(t, w.pinned, memory.ReadHostStats(w.dev).ActiveRequests.Current, "pinned memory")
	require.Equal(t, w.files, openFiles(t), "open files")
	require.True(t, poll.UntilNoLaterThan(time.Minute, func() bool { return runtime.NumGoroutine() <= w.routines }), "goroutines")
	r, err := ringOf(w.dev)
	require.NoError(t, err)
	require.Zero(t, r.used)
	require.Empty(t, r.waiting)
	require.Zero(t, r.waiters.Load())
}

// openFiles counts the descriptors of temporary files.
func openFiles(t testing.TB) (n int) {
	t.Helper()
	const dir = "/proc/self/fd/"
	list, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, x := range list {
		if to, err := os.Readlink(dir + x.Name()); err == nil && strings.HasPrefix(to, os.TempDir()) {
			n++
		}
	}
	return n
}

// A rig is a file of several windows, memory for it and what a fault needs.
type rig struct {
	dev     *device.Device
	s       *stream.Stream
	x       memory.Slice[byte]
	content []byte
	path    string
}

func newRig(t testing.TB, d *device.Device) *rig {
	t.Helper()
	s := newStream(t, d)
	content := randomBytes(20*minSlot + 333)
	x, err := memory.MakeFrom(s, content)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	r := &rig{d, s, x, content, writeFile(t, content)}
	// What is made once for the device is there before anything is counted.
	f := r.open(t, Cached)
	require.NoError(t, f.Load(context.Background(), s, x, 0))
	require.NoError(t, f.Close())
	poison(t, s, x)
	require.NoError(t, s.Sync(context.Background()))
	return r
}

// open opens the file with small slots, few threads and system calls that can be
// changed.
func (r *rig) open(t testing.TB, e Engine) *File {
	t.Helper()
	f, err := Open(r.path, &FileConfig{Engine: e, Threads: 3})
	require.NoError(t, err)
	tune(f, minSlot, 2)
	return f
}

// usable fails the test unless a file can still be read to the memory.
func (r *rig) usable(t testing.TB) {
	t.Helper()
	require.NoError(t, os.WriteFile(r.path, r.content, 0o644))
	f := r.open(t, Auto)
	defer f.Close()
	require.NoError(t, f.Load(context.Background(), r.s, r.x, 0))
	require.True(t, string(r.content) == string(hostBytes(t, r.s, r.x)))
}

func TestReadFaults(t *testing.T) {
	const at = 9*minSlot + 100 // what goes wrong is there
	here := func(off int64, p []byte) bool { return off <= at && at < off+int64(len(p)) }
	boom := errors.New("enough")
	cases := []struct {
		name  string
		fault func(f *File, stop context.CancelCauseFunc) mover
		is    error
		says  string
	}{
		{"I/O error", func(*File, context.CancelCauseFunc) mover {
			return func(fd int, p []byte, off int64) (int, error) {
				if here(off, p) {
					return 0, unix.EIO
				}
				return unix.Pread(fd, p, off)
			}
		}, unix.EIO, "look at the system's log"},
		{"truncated", func(f *File, _ context.CancelCauseFunc) mover {
			return func(fd int, p []byte, off int64) (int, error) {
				if here(off, p) {
					if err := os.Truncate(f.path, at); err != nil {
						return 0, err
					}
				}
				return unix.Pread(fd, p, off)
			}
		}, io.ErrUnexpectedEOF, "the file ends too early"},
		{"grown", func(f *File, _ context.CancelCauseFunc) mover {
			return func(fd int, p []byte, off int64) (int, error) {
				if here(off, p) {
					if err := os.Truncate(f.path, 30*minSlot); err != nil {
						return 0, err
					}
				}
				return unix.Pread(fd, p, off)
			}
		}, ErrChanged, "it had 1311053 bytes and has 1966080"},
		{"touched", func(f *File, _ context.CancelCauseFunc) mover {
			return func(fd int, p []byte, off int64) (int, error) {
				if here(off, p) {
					if err := os.Chtimes(f.path, time.Unix(1, 0), time.Unix(1, 0)); err != nil {
						return 0, err
					}
				}
				return unix.Pread(fd, p, off)
			}
		}, ErrChanged, "its time of modification is another"},
		{"never ready", func(*File, context.CancelCauseFunc) mover {
			return func(fd int, p []byte, off int64) (int, error) {
				if here(off, p) {
					return -1, unix.EAGAIN
				}
				return unix.Pread(fd, p, off)
			}
		}, unix.EAGAIN, "at byte"},
		{"given up", func(f *File, stop context.CancelCauseFunc) mover {
			return func(fd int, p []byte, off int64) (int, error) {
				stop(boom)
				return unix.Pread(fd, p, off)
			}
		}, boom, "of 1311053 bytes: "},
	}
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := newRig(t, devs[0])
		for _, c := range cases {
			for _, e := range []Engine{Cached, Direct} {
				t.Run(c.name+"/"+e.String(), func(t *testing.T) {
					r.usable(t)
					w := startWatch(t, r.dev)
					ctx, stop := context.WithCancelCause(testgpu.Context(t))
					defer stop(nil)
					f := r.open(t, e)
					defer f.Close()
					f.sys.Pread = c.fault(f, stop)
					err := f.Load(ctx, r.s, r.x, 0)
					require.ErrorIs(t, err, c.is)
					x, ok := errors.AsType[*Error](err)
					require.True(t, ok, "%v", err)
					require.Equal(t, r.path, x.Path)
					require.ErrorContains(t, err, "gds: read "+r.path)
					require.ErrorContains(t, err, c.says)
					if x.Engine != Auto { // it was in one place
						if c.is != io.ErrUnexpectedEOF { // which is so from there on
							require.LessOrEqual(t, x.Offset, int64(at))
						}
						require.Greater(t, x.Offset+x.Wanted, int64(at))
						require.Less(t, x.Got, x.Wanted)
					}
					require.NoError(t, f.Close())
					w.end(t)
					r.usable(t)
				})
			}
		}
	})
}

// After an error the other threads stop, and do not read the rest of the file.
func TestErrorStopsOthers(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]
	s := newStream(t, dev)
	path := filepath.Join(t.TempDir(), "file")
	const windows = 1000
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, os.Truncate(path, windows*minSlot))
	f := openFile(t, path, &FileConfig{Engine: Cached, Threads: 2})
	tune(f, minSlot, 2)
	var calls atomic.Int64
	f.sys.Pread = func(fd int, p []byte, off int64) (int, error) {
		if calls.Add(1) == 1 {
			return 0, unix.EIO
		}
		time.Sleep(10 * time.Millisecond) // so that half of the windows lasts longer than a stall of the other worker
		return unix.Pread(fd, p, off)
	}
	x := makeBytes(t, s, windows*minSlot)
	require.ErrorIs(t, f.Load(testgpu.Context(t), s, x, 0), unix.EIO)
	require.Less(t, calls.Load(), int64(windows/2))
}

// What the system does in small steps and with interruptions arrives as a whole.
func TestShortReads(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := newRig(t, devs[0])
		for _, e := range []Engine{Cached, Direct} {
			f := r.open(t, e)
			var calls atomic.Int64
			f.sys.Pread = func(fd int, p []byte, off int64) (int, error) {
				switch calls.Add(1) % 4 {
				case 0:
					return -1, unix.EINTR
				case 1:
					return 0, unix.EAGAIN
				case 2:
					if len(p) > 3*usualAlign { // and so that it can be direct
						p = p[:len(p)/3&^(usualAlign-1)]
					}
					return unix.Pread(fd, p, off)
				}
				return unix.Pread(fd, p, off)
			}
			poison(t, r.s, r.x)
			require.NoError(t, f.Load(testgpu.Context(t), r.s, r.x, 0))
			require.True(t, string(r.content) == string(hostBytes(t, r.s, r.x)), "%s", e)
			st := f.Status()
			require.Positive(t, st.Continued)
			require.Positive(t, st.Retried)
			require.EqualValues(t, len(r.content), st.Cached.BytesRead+st.Direct.BytesRead)
			require.Equal(t, e == Direct && st.Direct.Reason == nil, st.Direct.Reads > 0)
			require.NoError(t, f.Close())
		}
	})
}

// A direct read that ends before what is wanted begins has brought nothing.
func TestShortDirectRead(t *testing.T) {
	r := newRig(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0])
	f := r.open(t, Direct)
	defer f.Close()
	if !f.directReady() {
		t.Skipf("the folder of temporary files takes no direct reads: %v", f.Status().Direct.Reason)
	}
	f.sys.Pread = func(fd int, p []byte, off int64) (int, error) {
		if fd == f.direct.fd {
			return 100, nil
		}
		return 0, unix.EIO
	}
	err := f.Load(testgpu.Context(t), r.s, r.x.Slice(0, 10), 3000)
	x, ok := errors.AsType[*Error](err)
	require.True(t, ok, "%v", err)
	require.Equal(t, Error{Op: "read", Path: r.path, Offset: 3000, Wanted: 10, Got: 0, Engine: Direct, Err: unix.EIO}, *x)
}

// An engine that the file system refuses in the middle makes way for the next.
func TestDirectIsRefused(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := newRig(t, devs[0])
		for _, e := range []unix.Errno{unix.EINVAL, unix.EOPNOTSUPP} {
			f := r.open(t, Direct)
			if !f.directReady() {
				t.Skipf("the folder of temporary files takes no direct reads: %v", f.Status().Direct.Reason)
			}
			require.Equal(t, Direct, f.Status().Engine)
			f.sys.Pread = func(fd int, p []byte, off int64) (int, error) {
				if fd == f.direct.fd && off > 5*minSlot {
					return 0, e
				}
				return unix.Pread(fd, p, off)
			}
			poison(t, r.s, r.x)
			require.NoError(t, f.Load(testgpu.Context(t), r.s, r.x, 0))
			require.True(t, string(r.content) == string(hostBytes(t, r.s, r.x)))
			st := f.Status()
			require.ErrorIs(t, st.Direct.Reason, e)
			require.Positive(t, st.Direct.BytesRead)
			require.Positive(t, st.Cached.BytesRead)
			require.EqualValues(t, len(r.content), st.Direct.BytesRead+st.Cached.BytesRead)
			require.NoError(t, f.Close())
		}
	})
}

func TestWriteFaults(t *testing.T) {
	cases := []struct {
		name  string
		fault func(f *File)
		is    error
		says  string
	}{
		{"disk full", func(f *File) {
			f.sys.Pwrite = func(fd int, p []byte, off int64) (int, error) {
				if off >= 7*minSlot {
					return 0, unix.ENOSPC
				}
				return unix.Pwrite(fd, p, off)
			}
		}, unix.ENOSPC, "make room"},
		{"no room on the disk", func(f *File) {
			f.mem = false
			f.sys.Fallocate = func(int, uint32, int64, int64) error { return unix.ENOSPC }
			f.sys.Pwrite = func(int, []byte, int64) (int, error) { panic("nothing is to be written") }
		}, unix.ENOSPC, "at byte 0: 0 of 1311053 bytes"},
		{"nothing is written", func(f *File) {
			f.sys.Pwrite = func(fd int, p []byte, off int64) (int, error) { return 0, nil }
		}, io.ErrShortWrite, "0 of "},
		{"the disk fails at the end", func(f *File) {
			f.sys.Fsync = func(int) error { return unix.EIO }
		}, unix.EIO, "gds: commit "},
	}
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := newRig(t, devs[0])
		for _, c := range cases {
			for _, e := range []Engine{Cached, Direct} {
				t.Run(c.name+"/"+e.String(), func(t *testing.T) {
					ctx := testgpu.Context(t)
					w := startWatch(t, r.dev)
					path := filepath.Join(t.TempDir(), "file")
					require.NoError(t, os.WriteFile(path, []byte("old"), 0o640))
					f, err := Create(path, &FileConfig{Engine: e, Threads: 3})
					require.NoError(t, err)
					tune(f, minSlot, 2)
					c.fault(f)
					err = f.Save(ctx, r.s, r.x, 0)
					if err == nil {
						err = f.Commit(ctx)
					}
					require.ErrorIs(t, err, c.is)
					require.ErrorContains(t, err, c.says)
					require.ErrorContains(t, err, path)
					require.NoError(t, f.Close())
					alone(t, path, "old")
					w.end(t)
				})
			}
		}
	})
}

// alone fails the test unless the file has the content and nothing else is in its
// folder.
func alone(t testing.TB, path, content string) {
	t.Helper()
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.True(t, content == string(got), "the old file has changed")
	list, err := os.ReadDir(filepath.Dir(path))
	require.NoError(t, err)
	require.Len(t, list, 1)
}

// Faults of the driver, on virtual devices: every call that a read or a write makes
// fails once.
func TestDriverFaults(t *testing.T) {
	for _, fault := range []string{
		"cuMemcpyHtoDAsync#4=CUDA_ERROR_INVALID_VALUE", "cuMemcpyDtoHAsync#4=CUDA_ERROR_INVALID_VALUE", "cuEventRecord#3=CUDA_ERROR_INVALID_VALUE", "cuEventSynchronize#2=CUDA_ERROR_INVALID_VALUE",
		"cuEventQuery#9=CUDA_ERROR_INVALID_VALUE", "cuStreamCreateWithPriority#3=CUDA_ERROR_OUT_OF_MEMORY", "cuEventCreate#7=CUDA_ERROR_OUT_OF_MEMORY", "cuMemHostAlloc#*=CUDA_ERROR_OUT_OF_MEMORY", "cuEventQuery#1=CUDA_ERROR_INVALID_VALUE", "cuStreamSynchronize#1=CUDA_ERROR_INVALID_VALUE",
	} {
		t.Run(fault, func(t *testing.T) {
			if strings.HasPrefix(fault, "cuEventSynchronize") {
				setPollTime(t, 0)
			}
			dev := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: fault}).Devices()[0]
			failed := 0
			ctx := testgpu.Context(t)
			s, err := stream.New(dev, nil)
			require.NoError(t, err)
			x, err := memory.Make[byte](s, 20*minSlot)
			require.NoError(t, err)
			defer func() { require.NoError(t, errors.Join(x.Close(), s.Close())) }()
			dir := t.TempDir()
			path := filepath.Join(dir, "file")
			require.NoError(t, os.WriteFile(path, randomBytes(20*minSlot), 0o644))
			files := openFiles(t)
			for range 2 {
				f, err := OpenFile(path, os.O_RDWR, &FileConfig{Threads: 3})
				require.NoError(t, err)
				tune(f, minSlot, 2)
				for _, call := range []func() error{
					func() error { return f.Load(ctx, s, x, 0) },
					func() error { return f.Save(ctx, s, x, 0) },
				} {
					if err := call(); err != nil {
						failed++
						require.ErrorContains(t, err, path)
						_, ok := errors.AsType[*Error](err)
						require.True(t, ok, "%v", err)
					}
				}
				require.NoError(t, f.Close())
			}
			require.Positive(t, failed, "the call was not made, or its error lost")
			if !strings.Contains(fault, "#*") {
				require.Equal(t, 1, failed, "what fails once fails one call")
			}
			require.Equal(t, files, openFiles(t))
			require.Zero(t, memory.ReadHostStats(dev).ActiveRequests.Current)
			r, err := ringOf(dev)
			require.NoError(t, err)
			require.Zero(t, r.used)
		})
	}
}

// unpinned is a fault plan that gives no pinned memory from one call on to another.
func unpinned(from, to int) string {
	var faults []string
	for i := from; i < to; i++ {
		faults = append(faults, fmt.Sprintf("cuMemHostAlloc#%d=CUDA_ERROR_OUT_OF_MEMORY", i))
	}
	return strings.Join(faults, ",")
}

// Where there is little pinned memory, those who have some do the work, and nobody
// asks for more again and again.
func TestLittlePinnedMemory(t *testing.T) {
	dev := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: unpinned(2, 20)}).Devices()[0]
	s := newStream(t, dev)
	content := randomBytes(20*minSlot + 333)
	x, err := memory.Make[byte](s, len(content)) // nothing is copied yet, which may take pinned memory
	require.NoError(t, err)
	defer x.Close()
	r := &rig{dev, s, x, content, writeFile(t, content)}
	f := r.open(t, Cached)
	defer f.Close()
	require.NoError(t, f.Load(context.Background(), s, x, 0))
	require.EqualValues(t, 1, memory.ReadHostStats(dev).Allocations.Peak)
	require.True(t, string(content) == string(hostBytes(t, s, x)))
}

// So it is where one call begins while another one has all the memory that there is.
func TestLittlePinnedMemoryForTwo(t *testing.T) {
	// The host's cache may give its one block back to the driver just when it comes free,
	// to ask for another; the fault plan then gives nobody any more. That is rare.
	var err error
	for range 4 {
		if err = littleForTwo(t); err == nil {
			return
		}
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
	}
	require.NoError(t, err)
}

// littleForTwo returns what the second call says.
func littleForTwo(t *testing.T) error {
	dev := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: unpinned(2, 200)}).Devices()[0]
	s, content := newStream(t, dev), randomBytes(20*minSlot)
	x, err := memory.Make[byte](s, len(content))
	require.NoError(t, err)
	defer x.Close()
	path := writeFile(t, content)
	var files [2]*File
	for i := range files {
		files[i] = openFile(t, path, &FileConfig{Engine: Cached, Threads: 3})
		tune(files[i], minSlot, 2)
	}
	again := make(chan error, 1)
	ask := sync.OnceFunc(func() {
		go func() {
			again <- files[1].Load(testgpu.Context(t), newStream(t, dev), x.Slice(len(content)/2, len(content)), int64(len(content)/2))
		}()
	})
	files[0].sys.Pread = func(fd int, p []byte, off int64) (int, error) {
		ask()
		return unix.Pread(fd, p, off)
	}
	require.NoError(t, files[0].Load(testgpu.Context(t), s, x.Slice(0, len(content)/2), 0))
	if err := <-again; err != nil {
		return err
	}
	require.EqualValues(t, 1, memory.ReadHostStats(dev).Allocations.Peak)
	require.True(t, string(content) == string(hostBytes(t, s, x)))
	return nil
}

// Who had to wait for its turn, and then gets no memory, says so.
func TestNoPinnedMemoryAfterWaiting(t *testing.T) {
	dev := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1, Faults: unpinned(2, 12)}).Devices()[0]
	ctx, s := testgpu.Context(t), newStream(t, dev)
	ring := smallRing(t, dev, 2*minSlot)
	all, err := ring.acquire(ctx, nil, dev, 2*minSlot)
	require.NoError(t, err)
	f := openFile(t, writeFile(t, randomBytes(10*minSlot)), &FileConfig{Threads: 2})
	tune(f, minSlot, 1)
	x := makeBytes(t, s, 10*minSlot)
	done := make(chan error, 1)
	go func() { done <- f.Load(ctx, s, x, 0) }()
	require.NoError(t, poll.Until(ctx, func() (bool, error) { return ring.waiters.Load() == 2, nil }))
	require.NoError(t, ring.release(all))
	err = <-done
	require.ErrorIs(t, err, device.ErrorOutOfMemory)
	require.ErrorContains(t, err, "CHORUS_GDS_PINNED")
	// The fault plan has some more for those who ask again.
	require.NoError(t, poll.Until(ctx, func() (bool, error) {
		err := f.Load(ctx, s, x, 0)
		if errors.Is(err, device.ErrorOutOfMemory) {
			return false, nil
		}
		return err == nil, err
	}))
}

// A call that is given up while its stream has not come so far returns at once.
func TestGiveUpBehindAStream(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := newRig(t, devs[0])
		for _, do := range []func(f *File, ctx context.Context) error{
			func(f *File, ctx context.Context) error { return f.Load(ctx, r.s, r.x, 0) },
			func(f *File, ctx context.Context) error { return f.Save(ctx, r.s, r.x, 0) },
		} {
			w := startWatch(t, r.dev)
			f, err := OpenFile(r.path, os.O_RDWR, nil)
			require.NoError(t, err)
			open := streamtest.Hold(t, r.s)
			ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
			require.ErrorIs(t, do(f, ctx), context.DeadlineExceeded)
			cancel()
			require.NoError(t, f.Close())
			open()
			require.NoError(t, r.s.Sync(testgpu.Context(t)))
			w.end(t)
		}
		r.usable(t)
	})
}
