package gds

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var benchBytes = flag.Int64("bytes", 0, "how large the files of the benchmarks are; 0 is 8 GiB with a GPU and 256 MiB without")

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
	d := streamtest.BenchDevices(b)[0]
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

// A setting is how a benchmark reads; what is zero is as it is by default.
type setting struct {
	engine  Engine
	threads int
	chunk   int64
	depth   int
	wait    time.Duration // pollTime
	cold    bool          // nothing is in the page cache
}

// BenchmarkRead reads a file to one device: from memory and from the disk, whose
// page cache is warm or cold, and with other numbers of threads, sizes of chunks
// and of slots than the defaults.
func BenchmarkRead(b *testing.B) {
	d := streamtest.BenchDevices(b)[:1]
	for _, place := range []string{"/dev/shm", os.TempDir()} {
		name := map[bool]string{true: "shm", false: "disk"}[place == "/dev/shm"]
		b.Run(name, func(b *testing.B) {
			path := streamtest.BenchFile(b, place, streamtest.BenchBytes(d[0], *benchBytes))
			if name == "disk" {
				for _, e := range []Engine{Auto, Cached, Direct} {
					b.Run(fmt.Sprintf("cold/%s", e), func(b *testing.B) { benchRead(b, d, path, setting{engine: e, cold: true}) })
				}
			}
			for _, e := range []Engine{Auto, Cached, Direct} {
				b.Run(fmt.Sprintf("warm/%s", e), func(b *testing.B) { benchRead(b, d, path, setting{engine: e}) })
			}
			for _, threads := range []int{1, 4, 8, 12, 16, 24, 32} {
				b.Run(fmt.Sprintf("threads=%d", threads), func(b *testing.B) { benchRead(b, d, path, setting{threads: threads}) })
			}
			for kib := int64(256); kib <= 16<<10; kib *= 2 { // the smaller ones stay in the processor's cache until they are copied
				b.Run(fmt.Sprintf("chunk=%dKiB", kib), func(b *testing.B) { benchRead(b, d, path, setting{chunk: kib << 10}) })
			}
			for depth := 1; depth <= maxDepth; depth++ {
				b.Run(fmt.Sprintf("depth=%d", depth), func(b *testing.B) { benchRead(b, d, path, setting{depth: depth}) })
			}
			for us := time.Duration(50); us <= 1600; us *= 2 {
				b.Run(fmt.Sprintf("wait=%dus", us), func(b *testing.B) { benchRead(b, d, path, setting{wait: us * time.Microsecond}) })
			}
		})
	}
}

// BenchmarkReadAll reads a file in memory to all devices at the same time, each a part.
func BenchmarkReadAll(b *testing.B) {
	devs := streamtest.BenchDevices(b)
	benchRead(b, devs, streamtest.BenchFile(b, "/dev/shm", streamtest.BenchBytes(devs[0], *benchBytes)), setting{})
}

// BenchmarkMatrix is BenchmarkReadAll, to one device and to two, with all that may be
// set for the threads, which have to share the processor's caches.
func BenchmarkMatrix(b *testing.B) {
	devs := streamtest.BenchDevices(b)
	path := streamtest.BenchFile(b, "/dev/shm", streamtest.BenchBytes(devs[0], *benchBytes))
	for _, m := range []struct{ gpus, minThreads, maxDepth int }{{1, 8, 4}, {2, 12, 3}} {
		if m.gpus > len(devs) {
			continue
		}
		for kib := int64(512); kib <= 4096; kib *= 2 {
			for depth := 2; depth <= m.maxDepth; depth++ {
				for _, wait := range []string{"block", "spin"} {
					for threads := m.minThreads; threads <= 16; threads += 4 {
						name := fmt.Sprintf("gpus=%d/chunk=%dKiB/depth=%d/wait=%s/threads=%d", m.gpus, kib, depth, wait, threads)
						b.Run(name, func(b *testing.B) {
							with := setting{threads: threads, chunk: kib << 10, depth: depth, wait: time.Nanosecond}
							if wait == "spin" {
								with.wait = time.Second
							}
							benchRead(b, devs[:m.gpus], path, with)
						})
					}
				}
			}
		}
	}
}

// benchRead reads a file to devices at the same time, each a part.
func benchRead(b *testing.B, devs []*device.Device, path string, with setting) {
	f, err := Open(path, &FileConfig{Engine: with.engine, Threads: with.threads})
	require.NoError(b, err)
	defer f.Close()
	tune(f, with.chunk, with.depth)
	if with.wait != 0 {
		setPollTime(b, with.wait)
	}
	size, err := f.Size()
	require.NoError(b, err)
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
	if !with.cold && !f.mem {
		_, err = io.Copy(io.Discard, io.NewSectionReader(f.plain, 0, size)) // by the page cache
		require.NoError(b, err)
	}
	b.SetBytes(part * int64(len(devs)))
	for b.Loop() {
		if with.cold {
			b.StopTimer()
			forget(b, path)
			b.StartTimer()
		}
		all()
	}
	for i := range devs {
		sample(b, f, ss[i], xs[i], int64(i)*part)
	}
}

// sample compares some of what was read with the file.
func sample(b *testing.B, f *File, s *stream.Stream, x memory.Slice[byte], off int64) {
	const n = 64 << 10
	want, got := make([]byte, n), make([]byte, n)
	for i := range 9 {
		at := (x.Len() - n) / 8 * i
		_, err := f.plain.ReadAt(want, off+int64(at))
		require.NoError(b, err)
		require.NoError(b, x.Slice(at, at+n).CopyTo(s, got))
		require.True(b, bytes.Equal(want, got), "what was read to byte %d is not what the file has", at)
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

// BenchmarkWrite writes a file that takes the place of the one before.
func BenchmarkWrite(b *testing.B) {
	d := streamtest.BenchDevices(b)[0]
	for _, place := range []string{"/dev/shm", os.TempDir()} {
		for _, e := range []Engine{Auto, Cached, Direct} {
			b.Run(fmt.Sprintf("%s/%s", map[bool]string{true: "shm", false: "disk"}[place == "/dev/shm"], e), func(b *testing.B) {
				size := streamtest.BenchBytes(d, *benchBytes) / 4
				path := streamtest.BenchFile(b, place, size)
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
