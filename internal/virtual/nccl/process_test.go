package nccl

import (
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/virtual/machine"
	"github.com/gochorus/chorus/internal/virtual/virtualtest"
)

// The tests over processes run this test binary again, once for each rank, with
// the name of a scenario.

const (
	envScenario = "CHORUS_TEST_SCENARIO"
	envRank     = "CHORUS_TEST_RANK"
	envSize     = "CHORUS_TEST_SIZE"
	envID       = "CHORUS_TEST_ID"
	envFaults   = "CHORUS_TEST_FAULTS"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(envScenario); name != "" {
		runScenario(name)
		return
	}
	virtualtest.Main(m)
}

// A child is one rank in a process of its own.
type child struct {
	*virtualtest.Child
	rank, size int
	m          *machine.Machine
	api        ncclapi.API
	comm       ncclapi.Comm
}

func (c *child) nccl(r ncclapi.Result) { c.Must(r, r == 0, 1) }

func runScenario(name string) {
	c := &child{}
	c.rank, _ = strconv.Atoi(os.Getenv(envRank))
	c.size, _ = strconv.Atoi(os.Getenv(envSize))
	var err error
	if c.m, err = machine.New(&machine.Config{Devices: c.size, Faults: os.Getenv(envFaults)}); err != nil {
		panic(err)
	}
	c.api = New(c.m, Config{})
	dev := cudadrv.Device(c.rank)
	c.Child = virtualtest.NewChild(c.m.Driver(), dev, func() string {
		return fmt.Sprintf("rank %d: %s: %s (seed %#x)", c.rank, c.api.GetLastError(c.comm), c.m.Explain(dev), c.m.Seed())
	})
	var id ncclapi.UniqueID
	if _, err := hex.Decode(id[:], []byte(os.Getenv(envID))); err != nil {
		panic(err)
	}
	c.CU(c.Do(func() cudadrv.Result {
		c.nccl(c.api.CommInitRankScalable(&c.comm, int32(c.size), int32(c.rank), []ncclapi.UniqueID{id}, nil))
		return 0
	}))
	scenarios[name](c)
}

// processes runs a scenario in size processes and returns what each printed, and
// how it ended.
func processes(t testing.TB, scenario string, size int, faults map[int]string) (out []string, errs []error) {
	t.Helper()
	m, err := machine.New(&machine.Config{Devices: 1})
	require.NoError(t, err)
	id, r := New(m, Config{}).GetUniqueID()
	require.Equal(t, ncclapi.Success, r)
	return virtualtest.Processes(t, size, func(rank int) []string {
		return []string{envScenario + "=" + scenario, envRank + "=" + strconv.Itoa(rank), envSize + "=" + strconv.Itoa(size),
			envID + "=" + hex.EncodeToString(id[:]), envFaults + "=" + faults[rank]}
	})
}

var scenarios = map[string]func(*child){
	"loop": childLoop, "hung": childHung, "bench": childBench, "orders-differ": childOrders(true), "orders-equal": childOrders(false),
	"mismatch-count": childMismatch(ncclapi.FuncAllReduce, func(x *ncclapi.Call) { x.Count = 99 }),
	"mismatch-type":  childMismatch(ncclapi.FuncAllReduce, func(x *ncclapi.Call) { x.Type = ncclapi.Int32 }),
	"mismatch-redop": childMismatch(ncclapi.FuncAllReduce, func(x *ncclapi.Call) { x.Op = ncclapi.Max }),
	"mismatch-root":  childMismatch(ncclapi.FuncBroadcast, func(x *ncclapi.Call) { x.Root = 1 }),
	"mismatch-op":    childMismatch(ncclapi.FuncAllReduce, func(x *ncclapi.Call) { x.Func = ncclapi.FuncBroadcast }),
}

// childLoop reduces until a rank is lost, and then gives up the communicator.
func childLoop(c *child) {
	const n = 1 << 18
	p := c.Alloc(4 * n)
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.MemsetD8Async(p, 0, 4*n, c.Stream) }))
	issued := 0
	for ; issued < 12; issued++ {
		if r := c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: n, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comm, Stream: c.Stream}); r != 0 {
			break
		}
		if issued == 0 { // from here on the stream is busy, also when the rank is lost
			c.CU(c.Do(func() cudadrv.Result { return c.Drv.StreamSynchronize(c.Stream) }))
		}
	}
	c.waitFailure(ncclapi.RemoteError)
	// A rank that heard of the loss before it had issued everything may have
	// nothing to wait for.
	stuck := issued == 12
	if r := c.Do(func() cudadrv.Result { return c.Drv.StreamQuery(c.Stream) }); stuck && r != cudadrv.ErrorNotReady {
		panic("the operation ended by itself: " + r.Error())
	}
	fmt.Print(c.api.GetLastError(c.comm))
	start := time.Now()
	c.nccl(c.api.CommAbort(c.comm))
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.StreamSynchronize(c.Stream) }))
	if d := time.Since(start); d > 20*time.Second {
		panic("aborting took " + d.String())
	}
	out := make([]float32, n)
	c.Get(out, p)
	for _, x := range out {
		if stuck && x == x {
			panic("the output of the aborted operation is not poisoned")
		}
	}
}

// childHung has an operation that hangs at one rank, which aborts.
func childHung(c *child) {
	p := c.Alloc(400)
	if r := c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: p, Count: 100, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comm, Stream: c.Stream}); r != ncclapi.RemoteError {
		c.nccl(r)
	}
	if os.Getenv(envFaults) == "" {
		c.waitFailure(ncclapi.RemoteError)
		fmt.Print(c.api.GetLastError(c.comm))
	}
	c.nccl(c.api.CommAbort(c.comm))
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.StreamSynchronize(c.Stream) }))
}

// childMismatch issues a call, which rank 2 changes.
func childMismatch(f ncclapi.Func, change func(*ncclapi.Call)) func(*child) {
	return func(c *child) {
		p := c.Alloc(4096)
		x := ncclapi.Call{Func: f, Send: p, Recv: p, Count: 100, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comm, Stream: c.Stream}
		if c.rank == 2 {
			change(&x)
		}
		// The ranks compare their first operations before they connect, so the call fails.
		if r := c.api.Collective(x); r != ncclapi.InvalidUsage {
			panic("the operation was not refused: " + r.Meaning())
		}
		c.waitFailure(ncclapi.InvalidUsage)
		fmt.Print(c.api.GetLastError(c.comm))
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
		c.Must(async, async == ncclapi.Success, 0)
		runtime.Gosched()
	}
}

// childBench measures the all-reduce of 64 MiB.
func childBench(c *child) {
	const n, rounds = 16 << 20, 5
	p, q := c.Alloc(4*n), c.Alloc(4*n)
	c.Put(p, make([]float32, n))
	var start time.Time
	for i := range rounds + 1 {
		if i == 1 {
			c.CU(c.Do(func() cudadrv.Result { return c.Drv.StreamSynchronize(c.Stream) }))
			start = time.Now()
		}
		c.nccl(c.api.Collective(ncclapi.Call{Func: ncclapi.FuncAllReduce, Send: p, Recv: q, Count: n, Type: ncclapi.Float32, Op: ncclapi.Sum, Comm: c.comm, Stream: c.Stream}))
	}
	c.CU(c.Do(func() cudadrv.Result { return c.Drv.StreamSynchronize(c.Stream) }))
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
				require.Regexp(t, "^the ranks do not issue the same operations: .*rank [013] issued "+regexp.QuoteMeta(want[0])+" as operation 0", text)
				require.Contains(t, text, "rank 2 issued "+want[1]+" as operation 0")
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
