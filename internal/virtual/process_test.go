package virtual

import (
	"bytes"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/gochorus/chorus/internal/conformance"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/stretchr/testify/require"
)

// The tests over processes run this test binary again, once for each rank, with
// the name of a scenario.

const (
	envScenario = "CHORUS_TEST_SCENARIO"
	envRank     = "CHORUS_TEST_RANK"
	envSize     = "CHORUS_TEST_SIZE"
	envID       = "CHORUS_TEST_ID"
	envFaults   = "CHORUS_TEST_FAULTS"
	envSeed     = "CHORUS_TEST_SEED" // of inputs
)

func TestMain(m *testing.M) {
	if name := os.Getenv(envScenario); name != "" {
		runScenario(name)
		return
	}
	if name := os.Getenv(envSharing); name != "" {
		sharing[name](newChild())
		return
	}
	if os.Getenv("GORACE") == "" {
		os.Setenv("GORACE", "atexit_sleep_ms=0") // see testgpu.Main
	}
	code := m.Run()
	if left := strayGoroutines(); code == 0 && left != "" {
		fmt.Fprintln(os.Stderr, "goroutines were left behind:\n"+left)
		code = 99
	}
	os.Exit(code)
}

// strayGoroutines returns the stacks of this package's goroutines that do not
// end. Tests that make a stream hang for ever leave one each.
func strayGoroutines() string {
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		buf := make([]byte, 1<<20)
		stacks := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
		var left []string
		for _, s := range stacks[1:] {
			if strings.Contains(s, "internal/virtual.") && !strings.Contains(s, "virtual.forever") {
				left = append(left, s)
			}
		}
		if len(left) == 0 {
			return ""
		}
		if time.Now().After(deadline) {
			return strings.Join(left, "\n\n")
		}
	}
}

// A child is one rank in a process of its own.
type child struct {
	rank, size int
	m          *Machine
	drv        cudadrv.Driver
	api        ncclapi.API
	ctx        cudadrv.Context
	s          cudadrv.Stream
	comm       ncclapi.Comm
}

func (c *child) must(r error, ok bool) {
	if !ok {
		_, file, line, _ := runtime.Caller(1)
		fmt.Fprintf(os.Stderr, "rank %d, %s:%d: %v: %s: %s (seed %#x)\n", c.rank, file, line, r, c.api.GetLastError(c.comm), c.m.Explain(cudadrv.Device(c.rank)), c.m.Seed())
		os.Exit(1)
	}
}

func (c *child) cu(r cudadrv.Result)   { c.must(r, r == 0) }
func (c *child) nccl(r ncclapi.Result) { c.must(r, r == 0) }

func (c *child) do(f func() cudadrv.Result) cudadrv.Result {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if r := c.drv.CtxSetCurrent(c.ctx); r != 0 {
		return r
	}
	return f()
}

func runScenario(name string) {
	c := &child{}
	c.rank, _ = strconv.Atoi(os.Getenv(envRank))
	c.size, _ = strconv.Atoi(os.Getenv(envSize))
	var err error
	if c.m, err = New(&Config{Devices: c.size, Faults: os.Getenv(envFaults)}); err != nil {
		panic(err)
	}
	c.drv, c.api = c.m.Driver(), c.m.NCCL()
	c.cu(c.drv.Init())
	var r cudadrv.Result
	c.ctx, r = c.drv.DevicePrimaryCtxRetain(cudadrv.Device(c.rank))
	c.cu(r)
	c.cu(c.do(func() (r cudadrv.Result) { c.s, r = c.drv.StreamCreateWithPriority(1, 0); return r }))
	var id ncclapi.UniqueID
	if _, err := hex.Decode(id[:], []byte(os.Getenv(envID))); err != nil {
		panic(err)
	}
	c.cu(c.do(func() cudadrv.Result {
		c.nccl(c.api.CommInitRankScalable(&c.comm, int32(c.size), int32(c.rank), []ncclapi.UniqueID{id}, nil))
		return 0
	}))
	scenarios[name](c)
}

// processes runs a scenario in size processes and returns what each printed, and
// how it ended. Nothing runs longer than the deadline.
func processes(t testing.TB, scenario string, size int, faults map[int]string) (out []string, errs []error) {
	t.Helper()
	m, err := New(&Config{Devices: 1})
	require.NoError(t, err)
	id, r := m.NCCL().GetUniqueID()
	require.Equal(t, ncclapi.Success, r)
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Minute)
	defer cancel()
	cmds := make([]*exec.Cmd, size)
	stdout, stderr := make([]bytes.Buffer, size), make([]bytes.Buffer, size)
	for rank := range size {
		cmd := exec.CommandContext(ctx, os.Args[0])
		cmd.Env = append(os.Environ(), envScenario+"="+scenario, envRank+"="+strconv.Itoa(rank), envSize+"="+strconv.Itoa(size),
			envID+"="+hex.EncodeToString(id[:]), envFaults+"="+faults[rank])
		cmd.Stdout, cmd.Stderr = &stdout[rank], &stderr[rank]
		require.NoError(t, cmd.Start())
		cmds[rank] = cmd
	}
	for rank, cmd := range cmds {
		errs = append(errs, cmd.Wait())
		out = append(out, stdout[rank].String())
		if s := stderr[rank].String(); s != "" {
			t.Logf("rank %d: %s", rank, s)
		}
	}
	return out, errs
}

var scenarios = map[string]func(*child){
	"conformance": childConformance, "loop": childLoop, "hung": childHung, "bench": childBench,
	"mismatch-count": childMismatch(func(c *child, p cudadrv.DevicePtr, odd bool) ncclapi.Result {
		return c.api.AllReduce(p, p, pickOdd[uintptr](odd, 100, 99), ncclapi.Float32, ncclapi.Sum, c.comm, c.s)
	}),
	"mismatch-type": childMismatch(func(c *child, p cudadrv.DevicePtr, odd bool) ncclapi.Result {
		return c.api.AllReduce(p, p, 100, pickOdd(odd, ncclapi.Float32, ncclapi.Int32), ncclapi.Sum, c.comm, c.s)
	}),
	"mismatch-redop": childMismatch(func(c *child, p cudadrv.DevicePtr, odd bool) ncclapi.Result {
		return c.api.AllReduce(p, p, 100, ncclapi.Float32, pickOdd(odd, ncclapi.Sum, ncclapi.Max), c.comm, c.s)
	}),
	"mismatch-root": childMismatch(func(c *child, p cudadrv.DevicePtr, odd bool) ncclapi.Result {
		return c.api.Bcast(p, 100, ncclapi.Float32, pickOdd[int32](odd, 0, 1), c.comm, c.s)
	}),
	"mismatch-op": childMismatch(func(c *child, p cudadrv.DevicePtr, odd bool) ncclapi.Result {
		if odd {
			return c.api.Bcast(p, 100, ncclapi.Float32, 0, c.comm, c.s)
		}
		return c.api.AllReduce(p, p, 100, ncclapi.Float32, ncclapi.Sum, c.comm, c.s)
	}),
}

func pickOdd[T any](odd bool, usual, other T) T {
	if odd {
		return other
	}
	return usual
}

// childConformance is one rank of conformance's tests over processes.
func childConformance(c *child) {
	r := conformance.Rank{Driver: c.drv, API: c.api, Context: c.ctx, Stream: c.s, Comm: c.comm, Me: c.rank, N: c.size,
		Counts: []int{0, 1, 1001}, Medium: 72 << 10, Large: 1 << 20, Huge: 64 << 20}
	if raceEnabled {
		r.Medium, r.Large, r.Huge = 0, 72<<10, 1<<20
	}
	var err error
	if r.Seed, err = strconv.ParseUint(os.Getenv(envSeed), 0, 64); err != nil {
		panic(err)
	}
	start := time.Now()
	if err := r.Run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Print(time.Since(start).Round(time.Millisecond))
	c.nccl(c.api.CommDestroy(c.comm))
	c.must(errors.New("reports"), len(c.m.Reports()) == 0)
}

// childLoop reduces until a rank is lost, and then gives up the communicator.
func childLoop(c *child) {
	const n = 1 << 18
	p := c.alloc(4 * n)
	c.cu(c.do(func() cudadrv.Result { return c.drv.MemsetD8Async(p, 0, 4*n, c.s) }))
	issued := 0
	for ; issued < 12; issued++ {
		if r := c.api.AllReduce(p, p, n, ncclapi.Float32, ncclapi.Sum, c.comm, c.s); r != 0 {
			break
		}
		if issued == 0 { // from here on the stream is busy, also when the rank is lost
			c.cu(c.do(func() cudadrv.Result { return c.drv.StreamSynchronize(c.s) }))
		}
	}
	c.waitFailure(ncclapi.RemoteError)
	// A rank that heard of the loss before it had issued everything may have
	// nothing to wait for.
	stuck := issued == 12
	if r := c.do(func() cudadrv.Result { return c.drv.StreamQuery(c.s) }); stuck && r != cudadrv.ErrorNotReady {
		panic("the operation ended by itself: " + r.Error())
	}
	fmt.Print(c.api.GetLastError(c.comm))
	start := time.Now()
	c.nccl(c.api.CommAbort(c.comm))
	c.cu(c.do(func() cudadrv.Result { return c.drv.StreamSynchronize(c.s) }))
	if d := time.Since(start); d > 20*time.Second {
		panic("aborting took " + d.String())
	}
	out := make([]float32, n)
	c.get(out, p)
	for _, x := range out {
		if stuck && x == x {
			panic("the output of the aborted operation is not poisoned")
		}
	}
}

// childHung has an operation that hangs at one rank, which aborts.
func childHung(c *child) {
	p := c.alloc(400)
	if r := c.api.AllReduce(p, p, 100, ncclapi.Float32, ncclapi.Sum, c.comm, c.s); r != ncclapi.RemoteError {
		c.nccl(r)
	}
	if os.Getenv(envFaults) == "" {
		c.waitFailure(ncclapi.RemoteError)
		fmt.Print(c.api.GetLastError(c.comm))
	}
	c.nccl(c.api.CommAbort(c.comm))
	c.cu(c.do(func() cudadrv.Result { return c.drv.StreamSynchronize(c.s) }))
}

// childMismatch issues something else at rank 2 than at the others.
func childMismatch(issue func(c *child, p cudadrv.DevicePtr, odd bool) ncclapi.Result) func(*child) {
	return func(c *child) {
		p := c.alloc(4096)
		c.nccl(issue(c, p, c.rank == 2))
		if r := c.do(func() cudadrv.Result { return c.drv.StreamSynchronize(c.s) }); r != cudadrv.ErrorLaunchFailed {
			panic("the stream goes on: " + r.Error())
		}
		c.waitFailure(ncclapi.InvalidUsage)
		text := c.api.GetLastError(c.comm)
		if !strings.Contains(c.m.Explain(cudadrv.Device(c.rank)), text) {
			panic("the device was lost for another reason: " + c.m.Explain(cudadrv.Device(c.rank)))
		}
		fmt.Print(text)
		c.nccl(c.api.CommAbort(c.comm))
	}
}

func (c *child) waitFailure(want ncclapi.Result) {
	for {
		async, r := c.api.CommGetAsyncError(c.comm)
		c.nccl(r)
		if async == want {
			return
		}
		c.must(async, async == ncclapi.Success)
		runtime.Gosched()
	}
}

func (c *child) alloc(n int) (p cudadrv.DevicePtr) {
	c.cu(c.do(func() (r cudadrv.Result) { p, r = c.drv.MemAlloc(uintptr(max(n, 1))); return r }))
	return p
}

func (c *child) put(p cudadrv.DevicePtr, v []float32) {
	if len(v) > 0 {
		c.cu(c.do(func() cudadrv.Result { return c.drv.MemcpyHtoDAsync(p, unsafe.Pointer(&v[0]), uintptr(4*len(v)), c.s) }))
	}
}

func (c *child) get(v []float32, p cudadrv.DevicePtr) {
	if len(v) > 0 {
		c.cu(c.do(func() cudadrv.Result { return c.drv.MemcpyDtoHAsync(unsafe.Pointer(&v[0]), p, uintptr(4*len(v)), c.s) }))
	}
}

// childBench measures the all-reduce of 64 MiB.
func childBench(c *child) {
	const n, rounds = 16 << 20, 5
	p, q := c.alloc(4*n), c.alloc(4*n)
	c.put(p, make([]float32, n))
	var start time.Time
	for i := range rounds + 1 {
		if i == 1 {
			c.cu(c.do(func() cudadrv.Result { return c.drv.StreamSynchronize(c.s) }))
			start = time.Now()
		}
		c.nccl(c.api.AllReduce(p, q, n, ncclapi.Float32, ncclapi.Sum, c.comm, c.s))
	}
	c.cu(c.do(func() cudadrv.Result { return c.drv.StreamSynchronize(c.s) }))
	d := time.Since(start)
	fmt.Printf("%.3f GB/s", float64(4*n)*rounds/d.Seconds()/1e9)
	c.nccl(c.api.CommDestroy(c.comm))
}

func succeeded(t testing.TB, errs []error) {
	t.Helper()
	for rank, err := range errs {
		require.NoError(t, err, "rank %d", rank)
	}
}

// TestProcessesConformance runs every operation in all types, reductions and
// sizes, in one set of processes for each number of ranks.
func TestProcessesConformance(t *testing.T) {
	for _, size := range []int{2, 4, 8} {
		t.Run(fmt.Sprintf("ranks=%d", size), func(t *testing.T) {
			seed := fmt.Sprintf("%#x", rand.Uint64())
			t.Setenv(envSeed, seed)
			out, errs := processes(t, "conformance", size, nil)
			t.Logf("seed %s, time at each rank: %v", seed, out)
			succeeded(t, errs)
		})
	}
}

func TestProcessKilled(t *testing.T) {
	out, errs := processes(t, "loop", 4, map[int]string{1: "lose@ncclAllReduce#8"})
	for rank, err := range errs {
		if rank == 1 {
			exit := new(exec.ExitError)
			require.ErrorAs(t, err, &exit)
			require.Equal(t, syscall.SIGKILL, exit.Sys().(syscall.WaitStatus).Signal())
			continue
		}
		require.NoError(t, err)
		require.Contains(t, out[rank], "rank 1 was lost")
	}
}

func TestProcessHangsAndAborts(t *testing.T) {
	out, errs := processes(t, "hung", 3, map[int]string{1: "hang@ncclAllReduce#1"})
	succeeded(t, errs)
	require.Equal(t, "rank 1 aborted", out[0])
	require.Equal(t, "rank 1 aborted", out[2])
}

func TestProcessesDisagree(t *testing.T) {
	for kind, want := range map[string][2]string{
		"count": {"all_reduce(100 x float32, sum)", "all_reduce(99 x float32, sum)"},
		"type":  {"all_reduce(100 x float32, sum)", "all_reduce(100 x int32, sum)"},
		"redop": {"all_reduce(100 x float32, sum)", "all_reduce(100 x float32, max)"},
		"root":  {"broadcast(100 x float32, root 0)", "broadcast(100 x float32, root 1)"},
		"op":    {"all_reduce(100 x float32, sum)", "broadcast(100 x float32, root 0)"},
	} {
		t.Run(kind, func(t *testing.T) {
			out, errs := processes(t, "mismatch-"+kind, 4, nil)
			succeeded(t, errs)
			for _, text := range out {
				require.Equal(t, "the ranks do not issue the same operations: rank 0 issued "+want[0]+
					" as operation 0, rank 2 issued "+want[1]+" as operation 0", text)
			}
		})
	}
}

// BenchmarkProcesses reduces 64 MiB over 4 processes; the children measure.
func BenchmarkProcesses(b *testing.B) {
	for range b.N {
		out, errs := processes(b, "bench", 4, nil)
		succeeded(b, errs)
		b.Logf("all-reduce of 64 MiB over 4 processes: %v", out)
	}
}
