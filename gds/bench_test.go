package gds

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var benchBytes = flag.Int64("bytes", 0, "how large the files of the benchmarks are; 0 is 8 GiB with a GPU and 256 MiB without")

// benchDevices returns the GPUs, or virtual devices where there are none.
func benchDevices(b *testing.B) []*device.Device {
	if sys, err := device.NewSystem(&device.SystemConfig{Backend: "cuda"}); err == nil {
		b.Cleanup(func() { require.NoError(b, sys.Close()) })
		return sys.Devices()
	}
	return testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: 2})
}

func benchSize(d *device.Device) int64 {
	if *benchBytes != 0 {
		return *benchBytes
	}
	if d.System().Backend() == "cuda" {
		return 8 << 30
	}
	return 256 << 20
}

// benchFile makes a file by several threads, as far as there is room.
func benchFile(b *testing.B, dir string, bytes int64) string {
	b.Helper()
	dir, err := os.MkdirTemp(dir, "chorus")
	if err != nil {
		b.Skip(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	var fs unix.Statfs_t
	require.NoError(b, unix.Statfs(dir, &fs))
	if room := int64(fs.Bavail) * int64(fs.Bsize); room < bytes+1<<30 {
		b.Skipf("%s has room for %d bytes", dir, room)
	}
	path := filepath.Join(dir, "file")
	f, err := os.Create(path)
	require.NoError(b, err)
	defer f.Close()
	junk := randomBytes(16 << 20)
	var wg sync.WaitGroup
	for i := range int64(8) {
		wg.Go(func() {
			for at := i * int64(len(junk)); at < bytes; at += 8 * int64(len(junk)) {
				if _, err := f.WriteAt(junk[:min(int64(len(junk)), bytes-at)], at); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.NoError(b, f.Sync())
	return path
}

// forget drops a file from the page cache.
func forget(b testing.TB, path string) {
	f, err := os.Open(path)
	require.NoError(b, err)
	defer f.Close()
	require.NoError(b, f.Sync())
	require.NoError(b, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// BenchmarkPinned is what the bus can do: copies from pinned memory one after the
// other.
func BenchmarkPinned(b *testing.B) {
	d := benchDevices(b)[0]
	for _, dir := range []string{"h2d", "d2h"} {
		b.Run(dir, func(b *testing.B) {
			s, err := stream.New(d, nil)
			require.NoError(b, err)
			defer s.Close()
			const n = 64 << 20
			x, err := memory.Make[byte](s, n)
			require.NoError(b, err)
			defer x.Close()
			h, err := memory.MakePinned[byte](d, n)
			require.NoError(b, err)
			defer h.Close()
			b.SetBytes(16 * n)
			for b.Loop() {
				for range 16 {
					if dir == "h2d" {
						err = x.CopyFromPinned(s, h)
					} else {
						err = x.CopyToPinned(s, h)
					}
					require.NoError(b, err)
				}
				require.NoError(b, s.Sync(context.Background()))
			}
		})
	}
}

// BenchmarkRead reads a file to one device: from memory and from the disk, whose
// page cache is warm or cold, and with other numbers of threads, sizes of chunks
// and of slots than the defaults.
func BenchmarkRead(b *testing.B) {
	d := benchDevices(b)[0]
	for _, place := range []string{"/dev/shm", os.TempDir()} {
		name := map[bool]string{true: "shm", false: "disk"}[place == "/dev/shm"]
		b.Run(name, func(b *testing.B) {
			path := benchFile(b, place, benchSize(d))
			if name == "disk" {
				for _, e := range []Engine{Auto, Cached, Direct} {
					b.Run(fmt.Sprintf("cold/%s", e), func(b *testing.B) { benchRead(b, d, path, e, 0, 0, 0, true) })
				}
			}
			for _, e := range []Engine{Auto, Cached, Direct} {
				b.Run(fmt.Sprintf("warm/%s", e), func(b *testing.B) { benchRead(b, d, path, e, 0, 0, 0, false) })
			}
			for _, threads := range []int{1, 4, 8, 12, 16, 24, 32} {
				b.Run(fmt.Sprintf("threads=%d", threads), func(b *testing.B) { benchRead(b, d, path, Auto, threads, 0, 0, false) })
			}
			for kib := int64(256); kib <= 16<<10; kib *= 2 { // the smaller ones stay in the processor's cache until they are copied
				b.Run(fmt.Sprintf("chunk=%dKiB", kib), func(b *testing.B) { benchRead(b, d, path, Auto, 0, kib<<10, 0, false) })
			}
			for depth := 1; depth <= maxDepth; depth++ {
				b.Run(fmt.Sprintf("depth=%d", depth), func(b *testing.B) { benchRead(b, d, path, Auto, 0, 0, depth, false) })
			}
		})
	}
}

func benchRead(b *testing.B, d *device.Device, path string, e Engine, threads int, chunk int64, depth int, cold bool) {
	f, err := Open(path, &FileConfig{Engine: e, Threads: threads})
	require.NoError(b, err)
	defer f.Close()
	tune(f, chunk, depth)
	s, err := stream.New(d, nil)
	require.NoError(b, err)
	defer s.Close()
	size, err := f.Size()
	require.NoError(b, err)
	x, err := memory.Make[byte](s, int(size))
	require.NoError(b, err)
	defer x.Close()
	ctx := context.Background()
	require.NoError(b, f.Load(ctx, s, x, 0)) // memory is pinned
	if !cold {
		_, err = io.Copy(io.Discard, io.NewSectionReader(f.plain, 0, size)) // by the page cache
		require.NoError(b, err)
	}
	b.SetBytes(size)
	for b.Loop() {
		if cold {
			b.StopTimer()
			forget(b, path)
			b.StartTimer()
		}
		require.NoError(b, f.Load(ctx, s, x, 0))
	}
}

func tune(f *File, chunk int64, depth int) {
	if chunk != 0 {
		f.chunk = chunk
	}
	if depth != 0 {
		f.depth = depth
	}
}

// BenchmarkReadAll reads a file to all devices at the same time, each a part.
func BenchmarkReadAll(b *testing.B) {
	devs := benchDevices(b)
	size := benchSize(devs[0])
	path := benchFile(b, "/dev/shm", size)
	f, err := Open(path, nil)
	require.NoError(b, err)
	defer f.Close()
	part := size / int64(len(devs))
	var xs []memory.Slice[byte]
	var ss []*stream.Stream
	for _, d := range devs {
		s, err := stream.New(d, nil)
		require.NoError(b, err)
		defer s.Close()
		x, err := memory.Make[byte](s, int(part))
		require.NoError(b, err)
		defer x.Close()
		xs, ss = append(xs, x), append(ss, s)
	}
	all := func() {
		var wg sync.WaitGroup
		for i := range devs {
			wg.Go(func() {
				if err := f.Load(context.Background(), ss[i], xs[i], int64(i)*part); err != nil {
					b.Error(err)
				}
			})
		}
		wg.Wait()
	}
	all() // memory is pinned
	b.SetBytes(part * int64(len(devs)))
	for b.Loop() {
		all()
	}
}

// BenchmarkWrite writes a file that takes the place of the one before.
func BenchmarkWrite(b *testing.B) {
	d := benchDevices(b)[0]
	for _, place := range []string{"/dev/shm", os.TempDir()} {
		for _, e := range []Engine{Auto, Cached, Direct} {
			b.Run(fmt.Sprintf("%s/%s", map[bool]string{true: "shm", false: "disk"}[place == "/dev/shm"], e), func(b *testing.B) {
				size := benchSize(d) / 4
				path := benchFile(b, place, size)
				s, err := stream.New(d, nil)
				require.NoError(b, err)
				defer s.Close()
				x, err := memory.Make[byte](s, int(size))
				require.NoError(b, err)
				defer x.Close()
				require.NoError(b, x.Zero(s))
				b.SetBytes(size)
				for b.Loop() {
					f, err := Create(path, &FileConfig{Engine: e})
					require.NoError(b, err)
					require.NoError(b, f.Save(context.Background(), s, x, 0))
					require.NoError(b, f.Commit(context.Background()))
				}
			})
		}
	}
}
