// Package testgpu runs the same tests on virtual devices and, if there are GPUs, on
// CUDA.
package testgpu

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
)

// Each runs fn as subtest virtual and, if there are n GPUs, as subtest cuda. With
// CHORUS_REQUIRE_GPU=k, a test that needs at most k GPUs fails instead of being
// skipped.
func Each(t *testing.T, n int, fn func(t *testing.T, devs []*device.Device)) {
	t.Helper()
	t.Run("virtual", func(t *testing.T) { fn(t, Virtual(t, &device.SystemConfig{VirtualDevices: n})) })
	t.Run("cuda", func(t *testing.T) { fn(t, CUDA(t, n)) })
}

// Chorus's own tests are about the virtual devices' own checks, unless they ask for the sanitizer.
func init() {
	if !env.Sanitizer.IsSet() {
		_ = os.Setenv(env.Sanitizer.Name, "0")
	}
}

// Virtual creates virtual devices for one test. The test fails if the devices
// report a mistake.
func Virtual(t testing.TB, cfg *device.SystemConfig) []*device.Device {
	t.Helper()
	s := System(t, cfg)
	t.Cleanup(func() {
		for _, r := range s.Reports() {
			t.Errorf("virtual devices (seed %d): %s", gpu.SystemOf(s).Machine.Seed(), r)
		}
	})
	return s.Devices()
}

// System creates virtual devices for a test that expects reports.
func System(t testing.TB, cfg *device.SystemConfig) *device.System {
	t.Helper()
	c := *cfg
	c.Backend = "virtual"
	s, err := device.NewSystem(&c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the virtual devices' seed was %d: CHORUS_VIRTUAL_SEED=%[1]d repeats their delays", gpu.SystemOf(s).Machine.Seed())
		}
	})
	return s
}

var cuda = sync.OnceValues(func() (*device.System, error) {
	return device.NewSystem(&device.SystemConfig{Backend: "cuda"})
})

// CUDA returns the first n GPUs, or skips the test.
func CUDA(t testing.TB, n int) []*device.Device {
	t.Helper()
	required, err := env.RequireGPU.Int()
	if err != nil {
		t.Fatal(err)
	}
	s, err := cuda()
	have := 0
	if err == nil {
		have = len(s.Devices())
	}
	if have >= n {
		return s.Devices()[:n]
	}
	if required >= n {
		t.Fatalf("%s=%d, but this test needs %d GPUs and there are %d: %v", env.RequireGPU.Name, required, n, have, err)
	}
	t.Skipf("needs %d GPUs, there are %d", n, have)
	return nil
}

// Ranks returns a GPU for each of n ranks of Chorus kernels, or skips the test. With
// CHORUS_SHARE_GPUS=yes the ranks share the GPUs if there are too few.
func Ranks(t testing.TB, n int) []*device.Device {
	t.Helper()
	if env.ShareGPUs.Value() != "yes" {
		return CUDA(t, n)
	}
	return share(CUDA(t, 1)[0].System().Devices(), n)
}

// VirtualRanks returns a virtual device for each of n ranks of Chorus kernels. With
// CHORUS_SHARE_GPUS=yes all ranks share one.
func VirtualRanks(t testing.TB, n int) []*device.Device {
	t.Helper()
	if env.ShareGPUs.Value() != "yes" {
		return Virtual(t, &device.SystemConfig{VirtualDevices: n})
	}
	return share(Virtual(t, &device.SystemConfig{VirtualDevices: 1}), n)
}

// share returns n of some devices, in turns.
func share(devs []*device.Device, n int) []*device.Device {
	list := make([]*device.Device, n)
	for i := range list {
		list[i] = devs[i%len(devs)]
	}
	return list
}

// Context returns a context that ends before the timeout of the test.
func Context(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	t.Cleanup(cancel)
	return ctx
}

// Main runs the tests of a package. It fails with exit code 99 if objects became
// unreachable without Close.
func Main(m *testing.M) {
	if os.Getenv("GORACE") == "" {
		// With the race detector, each exiting process sleeps for one second.
		// Processes started by tests need not.
		os.Setenv("GORACE", "atexit_sleep_ms=0")
	}
	var mu sync.Mutex
	var leaks []string
	handle.Trace.Store(true)
	handle.OnLeak = func(l handle.Leak) {
		mu.Lock()
		defer mu.Unlock()
		leaks = append(leaks, fmt.Sprintf("%s: not closed; created by\n%s", l, l.Stack))
	}
	code := m.Run()
	for range 3 { // a cleanup may make other objects unreachable
		runtime.GC()
		flushCleanups()
	}
	mu.Lock()
	defer mu.Unlock()
	for _, l := range leaks {
		fmt.Fprintln(os.Stderr, "LEAK:", l)
	}
	if code == 0 && len(leaks) > 0 {
		code = 99
	}
	os.Exit(code)
}

// flushCleanups returns when all cleanups queued so far have run.
func flushCleanups() {
	done := make(chan struct{})
	marker := new([16]byte)
	runtime.AddCleanup(marker, func(c chan struct{}) { close(c) }, done)
	marker = nil
	_ = marker
	runtime.GC()
	select {
	case <-done:
	case <-time.After(5 * time.Second):
	}
}
