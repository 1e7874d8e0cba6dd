// Package spin keeps a stream busy for a known time (torch.cuda._sleep), so that a test
// can observe which operations wait.
package spin

import (
	"sync"
	"testing"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/stream"
)

var source = kernel.Source{
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

// A Spinner spins on one device.
type Spinner struct {
	t testing.TB
	k *kernel.Kernel
}

// New compiles the kernel for dev and unloads it at the end of the test, after it
// has synchronized the streams that spin.
func New(t testing.TB, dev *device.Device) *Spinner {
	t.Helper()
	m, err := kernel.Compile(dev, &source)
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
