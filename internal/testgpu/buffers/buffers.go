// Package buffers makes streams, bytes and files for tests and benchmarks of transfers.
package buffers

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// NewStream returns a stream that the end of the test closes.
func NewStream(t testing.TB, d *device.Device) *stream.Stream {
	t.Helper()
	s, err := stream.New(d, nil)
	check(t, err)
	t.Cleanup(func() { check(t, s.Close()) })
	return s
}

// Host returns the contents of device memory.
func Host(t testing.TB, s *stream.Stream, x memory.Slice[byte]) []byte {
	t.Helper()
	out := make([]byte, x.Len())
	check(t, x.CopyTo(s, out))
	return out
}

// Random returns bytes that do not repeat.
func Random(n int) []byte {
	r := rand.NewChaCha8([32]byte{7})
	b := make([]byte, n)
	_, _ = r.Read(b) // never fails
	return b
}

// BenchDevices returns the GPUs, or virtual devices if there are none.
func BenchDevices(b *testing.B) []*device.Device {
	if sys, err := device.NewSystem(&device.SystemConfig{Backend: "cuda"}); err == nil {
		b.Cleanup(func() { check(b, sys.Close()) })
		return sys.Devices()
	}
	return testgpu.Virtual(b, &device.SystemConfig{VirtualDevices: 2})
}

// BenchBytes returns n or, if n is 0, the default size of a benchmark's files.
func BenchBytes(d *device.Device, n int64) int64 {
	switch {
	case n != 0:
		return n
	case d.System().Backend() == "cuda":
		return 8 << 30
	}
	return 256 << 20
}

// BenchFile creates a file in a new folder of dir. It skips the benchmark if the file system
// has too little space.
func BenchFile(b *testing.B, dir string, bytes int64) string {
	b.Helper()
	dir, err := os.MkdirTemp(dir, "chorus")
	if err != nil {
		b.Skip(err)
	}
	b.Cleanup(func() { os.RemoveAll(dir) })
	var fs syscall.Statfs_t
	check(b, syscall.Statfs(dir, &fs))
	if space := int64(fs.Bavail) * int64(fs.Bsize); space < bytes+1<<30 {
		b.Skipf("%s has space for %d bytes", dir, space)
	}
	path := filepath.Join(dir, "file")
	f, err := os.Create(path)
	check(b, err)
	defer f.Close()
	data := Random(16 << 20)
	var wg sync.WaitGroup
	for i := range int64(8) {
		wg.Go(func() {
			for at := i * int64(len(data)); at < bytes; at += 8 * int64(len(data)) {
				if _, err := f.WriteAt(data[:min(int64(len(data)), bytes-at)], at); err != nil {
					b.Error(err)
				}
			}
		})
	}
	wg.Wait()
	check(b, f.Sync())
	return path
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
