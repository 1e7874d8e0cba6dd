// Package testgpu runs the same tests on virtual devices and, if there are GPUs, on
// CUDA. It also generates the archives of Chorus kernels (internal/cudacc) and checks that they match their sources.
// For tests that compare kernels with Go functions, it runs kernels on the host.
package testgpu

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/testhost"
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

// Virtual creates virtual devices for one test, which fails if the devices
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

// VirtualRanks returns a virtual device for each of n ranks of Chorus kernels,
// or one that all ranks share with CHORUS_SHARE_GPUS=yes.
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

// Main runs the tests of a package, and fails with exit code 99 if objects
// became unreachable without Close.
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

// AllowStalls lets the jobs of this test binary lose a silent process after 20 s, unless the environment says otherwise: a busy machine
// may stop a process for longer than the default.
func AllowStalls() {
	if os.Getenv(env.LostAfter.Name) == "" {
		os.Setenv(env.LostAfter.Name, "20s")
	}
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

// Allocs is testing.AllocsPerRun, but the least of ten rounds: other goroutines, such as those
// of virtual devices, allocate too, and a call that allocates does so in every round.
func Allocs(runs int, f func()) float64 {
	least := math.Inf(1)
	for round := 0; round < 10 && least > 0; round++ {
		least = min(least, testing.AllocsPerRun(runs, f))
	}
	return least
}

// SameBits reports whether two slices of numbers have the same bits. It is fast for long
// slices: the race detector checks each slice as one range.
func SameBits[T any](a, b []T) bool { return bytes.Equal(bytesOf(a), bytesOf(b)) }

func bytesOf[T any](x []T) []byte {
	var z T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(x))), len(x)*int(unsafe.Sizeof(z)))
}

var (
	thorough   = flag.Bool("thorough", false, "run every case and all rounds of tests that run some of them by default")
	sampleSeed = flag.Uint64("sampleseed", 0, "`seed` of the sampled cases; 0: random")
)

// Rounds returns n, or all with -thorough.
func Rounds(n, all int) int {
	if *thorough {
		return all
	}
	return n
}

// Sample returns a function that reports whether the test should run its next
// case: every case with -thorough, otherwise about one in n. The test logs the
// seed; -sampleseed repeats the choice.
func Sample(t testing.TB, n int) func() bool {
	if *thorough || n <= 1 {
		return func() bool { return true }
	}
	seed := drawnSeed()
	t.Logf("sample seed %d: about one case in %d", seed, n)
	rng := rand.New(rand.NewPCG(seed, 0))
	return func() bool { return rng.IntN(n) == 0 }
}

// Draw returns a function that selects one case of each part of a list of cases, by their index: the
// first part has sizes[0] cases, and so on. With -thorough it selects every case. The test logs the
// seed; -sampleseed repeats the choice.
func Draw(t testing.TB, sizes ...int) func(i int) bool {
	if *thorough {
		return func(int) bool { return true }
	}
	seed := drawnSeed()
	t.Logf("sample seed %d: one case of each part", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	chosen, first := map[int]bool{}, 0
	for _, n := range sizes {
		chosen[first+rng.IntN(n)] = true
		first += n
	}
	return func(i int) bool { return chosen[i] }
}

// SampleRaced is Sample if the race detector watches the test; otherwise every
// case runs.
func SampleRaced(t testing.TB, n int) func() bool {
	return Sample(t, testhost.Rounds(n, 1))
}

// TurnsRaced returns a function that selects one of n variants for the case with a number:
// the next case has the next variant. Without the race detector, and with -thorough, each
// case has all variants. The test logs the seed of the first choice; -sampleseed repeats it.
func TurnsRaced(t testing.TB, n int) func(number, variant int) bool {
	if *thorough || !testhost.On {
		return func(int, int) bool { return true }
	}
	seed := drawnSeed()
	t.Logf("sample seed %d: one of %d variants for each case", seed, n)
	first := rand.New(rand.NewPCG(seed, 0)).IntN(n)
	return func(number, variant int) bool { return (first+number)%n == variant }
}

func drawnSeed() uint64 {
	if *sampleSeed != 0 {
		return *sampleSeed
	}
	return rand.Uint64()
}

// A Exchange is a comm.Rendezvous for ranks that are goroutines of one process.
type Exchange struct {
	mu     *sync.Mutex
	values map[string][]byte
	posted *sync.Cond
	ctx    context.Context
	rank   int
	size   int
}

// Exchanges returns the exchanges of size ranks.
func Exchanges(ctx context.Context, size int) []*Exchange {
	mu := &sync.Mutex{}
	values, posted := map[string][]byte{}, sync.NewCond(mu)
	context.AfterFunc(ctx, posted.Broadcast)
	bs := make([]*Exchange, size)
	for i := range bs {
		bs[i] = &Exchange{mu, values, posted, ctx, i, size}
	}
	return bs
}

// Rank returns the rank.
func (b *Exchange) Rank() int { return b.rank }

// Size returns the number of ranks.
func (b *Exchange) Size() int { return b.size }

// Context returns the context of all ranks.
func (b *Exchange) Context() context.Context { return b.ctx }

// Set publishes a value, once for each key.
func (b *Exchange) Set(_ context.Context, key string, value []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.values[key] != nil {
		return fmt.Errorf("%s is set twice: earlier readers have a stale value", key)
	}
	b.values[key] = value
	b.posted.Broadcast()
	return nil
}

// Get waits for a value.
func (b *Exchange) Get(ctx context.Context, key string) ([]byte, error) {
	defer context.AfterFunc(ctx, b.posted.Broadcast)()
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.values[key] == nil {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		b.posted.Wait()
	}
	return b.values[key], nil
}

// Add adds to a number and returns the sum.
func (b *Exchange) Add(_ context.Context, key string, delta int64) (int64, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	n, _ := strconv.ParseInt(string(b.values[key]), 10, 64) // no value is 0
	b.values[key] = strconv.AppendInt(nil, n+delta, 10)
	b.posted.Broadcast()
	return n + delta, nil
}

// Delete deletes a key and reports whether it had a value.
func (b *Exchange) Delete(_ context.Context, key string) (bool, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, had := b.values[key]
	delete(b.values, key)
	return had, nil
}

// Has reports whether a key has a value.
func (b *Exchange) Has(key string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.values[key] != nil
}
