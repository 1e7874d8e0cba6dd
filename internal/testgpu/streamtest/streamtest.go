// Package streamtest has what tests on streams share: streams that are busy or blocked, bytes and files to transfer, and the
// virtual time of testing/synctest.
package streamtest

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/osthread"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/internal/virtual/nccl"
	"github.com/gochorus/chorus/kernel"
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

var spinSource = kernel.Source{
	Name: "spin.cu",
	// One thread polls the GPU's clock, which counts nanoseconds.
	CUDA: `extern "C" __global__ void spin(unsigned long long ns) {
	unsigned long long start, now;
	asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
	do {
		asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
	} while (now - start < ns);
}`,
	Kernels: []kernel.Def{{
		Name:   "spin",
		Params: []kernel.Param{kernel.U64},
		// Virtual devices use the host's clock.
		Go: func(c *kernel.Call) { time.Sleep(time.Duration(kernel.Get[uint64](c, 0))) },
	}},
}

// A Spinner keeps streams of one device busy for a known time (torch.cuda._sleep), so that a test can observe which operations wait.
type Spinner struct {
	t testing.TB
	k *kernel.Kernel
}

// NewSpinner compiles the kernel for dev and unloads it at the end of the test, after it
// has synchronized the streams that spin.
func NewSpinner(t testing.TB, dev *device.Device) *Spinner {
	t.Helper()
	m, err := kernel.Compile(dev, &spinSource)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	k, err := m.Kernel("spin")
	if err != nil {
		t.Fatal(err)
	}
	return &Spinner{t, k}
}

// On delays operations that are enqueued on s later by d.
func (p *Spinner) On(s *stream.Stream, d time.Duration) {
	p.t.Helper()
	grid := kernel.Grid{Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 1}}
	if err := p.k.Launch(s, grid, kernel.Scalar(uint64(d))); err != nil {
		p.t.Fatal(err)
	}
}

// Hold blocks a stream after the operations enqueued so far, until open is called
// or the test ends.
func Hold(t testing.TB, s *stream.Stream) (open func()) {
	t.Helper()
	gate := make(chan struct{})
	if err := s.Callback(func() { <-gate }); err != nil {
		t.Fatal(err)
	}
	open = sync.OnceFunc(func() { close(gate) })
	t.Cleanup(open)
	return open
}

// EachInVirtualTime is testgpu.Each whose virtual devices run in virtual time. There a wait ends as soon as nothing else happens, so
// a test of a time limit takes no time, and a busy machine does not disturb it. On GPUs the time is real.
func EachInVirtualTime(t *testing.T, n int, fn func(t *testing.T, devs []*device.Device)) {
	t.Helper()
	t.Run("virtual", func(t *testing.T) { RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: n}, fn) })
	t.Run("cuda", func(t *testing.T) { fn(t, testgpu.CUDA(t, n)) })
}

// RunInVirtualTime runs fn with virtual devices in a bubble of testing/synctest. All ranks of fn must be in this process, and the test
// and its parents must not be parallel. What hangs by the fault plan ends after fn and its cleanups.
func RunInVirtualTime(t *testing.T, cfg *device.SystemConfig, fn func(t *testing.T, devs []*device.Device)) {
	t.Helper()
	t.Setenv(env.VirtualNetwork.Name, nccl.InProcess)
	defer collective.FollowTime()()
	defer withoutLaunchers()()
	testhost.Bubble(t, func(t *testing.T) {
		var devs []*device.Device
		t.Cleanup(func() { // the last one: all goroutines must end in the bubble, also those that are only delayed
			gpu.SystemOf(devs[0].System()).Machine.EndHangs()
			time.Sleep(time.Hour)
		})
		devs = testgpu.Virtual(t, cfg)
		fn(t, devs)
	})
}

// withoutLaunchers lets one thread enqueue the operations of all ranks, until the result is called. A
// thread that polls for work, as those of a machine with four processors or more do, would keep virtual time from passing.
func withoutLaunchers() (again func()) {
	old := osthread.Launchers
	osthread.Launchers = new(osthread.Pool)
	osthread.Launchers.Close()
	return func() { osthread.Launchers = old }
}
