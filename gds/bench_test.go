package gds

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/gds/safetensors"
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

// A setting is how a benchmark reads; what is zero is as it is by default.
type setting struct {
	engine  Engine
	threads int
	chunk   int64
	depth   int
	wait    time.Duration // patience
	cold    bool          // nothing is in the page cache
}

// BenchmarkRead reads a file to one device: from memory and from the disk, whose
// page cache is warm or cold, and with other numbers of threads, sizes of chunks
// and of slots than the defaults.
func BenchmarkRead(b *testing.B) {
	d := benchDevices(b)[:1]
	for _, place := range []string{"/dev/shm", os.TempDir()} {
		name := map[bool]string{true: "shm", false: "disk"}[place == "/dev/shm"]
		b.Run(name, func(b *testing.B) {
			path := benchFile(b, place, benchSize(d[0]))
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
	devs := benchDevices(b)
	benchRead(b, devs, benchFile(b, "/dev/shm", benchSize(devs[0])), setting{})
}

// BenchmarkMatrix is BenchmarkReadAll, to one device and to two, with all that may be
// set for the threads, which have to share the processor's caches.
func BenchmarkMatrix(b *testing.B) {
	devs := benchDevices(b)
	path := benchFile(b, "/dev/shm", benchSize(devs[0]))
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
		setPatience(b, with.wait)
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

// BenchmarkLoad loads a checkpoint in memory to all devices by several plans, in rounds
// of several sizes.
func BenchmarkLoad(b *testing.B) {
	devs := benchDevices(b)
	path := benchCheckpoint(b, benchSize(devs[0]))
	g := localGroup(b, devs)
	for _, p := range []struct {
		name string
		plan Plan
	}{
		{"own", func(t Info) Placement { return Own(int(t.Name[0]) % len(devs)) }},
		{"shard:0", func(Info) Placement { return Shard(0) }},
		{"shard:1", func(Info) Placement { return Shard(1) }},
		{"replicate", nil},
	} {
		for mib := 32; mib <= 256; mib *= 2 {
			b.Run(fmt.Sprintf("plan=%s/round=%dMiB", p.name, mib), func(b *testing.B) {
				benchLoad(b, g, path, &LoadConfig{Plan: p.plan, RoundBytes: mib << 20})
			})
		}
	}
}

// benchCheckpoint makes a checkpoint of tensors of 32 MiB. The names' first letters are
// in turn.
func benchCheckpoint(b *testing.B, bytes int64) string {
	var infos []safetensors.Tensor
	for i := range int(bytes >> 25) {
		infos = append(infos, safetensors.Tensor{Name: fmt.Sprintf("%c.%d", 'a'+i%16, i), DType: safetensors.BF16, Shape: []int{4096, 4096}})
	}
	h, start, err := safetensors.NewHeader(infos, nil)
	require.NoError(b, err)
	path := benchFile(b, "/dev/shm", h.Size)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	require.NoError(b, err)
	_, err = f.WriteAt(start, 0)
	require.NoError(b, errors.Join(err, f.Close()))
	return path
}

func benchLoad(b *testing.B, g *comm.Group, path string, cfg *LoadConfig) {
	c, err := OpenSafetensors(path)
	require.NoError(b, err)
	defer c.Close()
	load := func() []*Weights {
		all, err := c.Load(context.Background(), g, cfg)
		require.NoError(b, err)
		return all
	}
	require.NoError(b, closeWeights(load())) // memory is pinned
	b.SetBytes(c.Bytes())
	for b.Loop() {
		all := load()
		b.StopTimer()
		require.NoError(b, closeWeights(all))
		b.StartTimer()
	}
	all := load()
	for i, w := range all {
		names := w.Names()
		for _, name := range []string{names[0], names[len(names)/2], names[len(names)-1]} {
			require.NoError(b, c.verify(context.Background(), w, g.Stream(i), name))
		}
	}
	require.NoError(b, closeWeights(all))
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
