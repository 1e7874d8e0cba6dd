package sanitizer_test

import (
	"flag"
	"math/rand/v2"
	"regexp"
	"runtime"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/sanitizer"
	"github.com/gochorus/chorus/internal/virtual/machine"
)

var (
	programs = flag.Int("programs", 1500, "random programs that both engines run")
	seed     = flag.Uint64("seed", 0, "seed of the programs; 0 is random")
)

// A bench is a program that runs on virtual devices with the sanitizer above them. Each
// operation completes before the next call, without the host waiting for it, so that both
// engines see the same order of calls.
type bench struct {
	t       *testing.T
	r       *rand.Rand
	m       *gpu.VirtualMachine
	san     *sanitizer.Sanitizer
	drv     cudadrv.Driver
	ctx     [2]cudadrv.Context
	streams []cudadrv.Stream
	of      []int // the device of each stream
	events  []cudadrv.Event
	at      []int // the device of each event
	blocks  []cudadrv.DevicePtr
	execs   []cudadrv.GraphExec
	pinned  unsafe.Pointer
	pool    []cudadrv.DevicePtr // memory of cuMemAllocAsync that is not freed
	inGraph bool                // the last step launched a graph
	log     []string
}

const blockBytes = 4096

func newBench(t *testing.T, s uint64) *bench {
	m, err := gpu.NewVirtual(&gpu.VirtualConfig{Config: machine.Config{Devices: 2, Seed: s | 1}})
	require.NoError(t, err)
	b := &bench{t: t, r: rand.New(rand.NewPCG(s, 1)), m: m, san: sanitizer.New(m.Driver())}
	b.drv = b.san.Driver()
	b.must(b.drv.Init())
	for i := range b.ctx {
		var r cudadrv.Result
		b.ctx[i], r = b.drv.DevicePrimaryCtxRetain(cudadrv.Device(i))
		b.must(r)
	}
	for i := range 4 {
		d := i / 3 // three streams of device 0, one of device 1
		b.call(d, func() cudadrv.Result {
			s, r := b.drv.StreamCreateWithPriority(cudadrv.StreamNonBlocking, 0)
			b.streams, b.of = append(b.streams, s), append(b.of, d)
			return r
		})
		b.call(d, func() cudadrv.Result {
			e, r := b.drv.EventCreate(cudadrv.EventDisableTiming)
			b.events, b.at = append(b.events, e), append(b.at, d)
			return r
		})
	}
	for i := range 3 {
		b.call(i/2, func() cudadrv.Result {
			p, r := b.drv.MemAlloc(blockBytes)
			b.blocks = append(b.blocks, p)
			return r
		})
	}
	b.call(0, func() (r cudadrv.Result) {
		b.pinned, r = b.drv.MemHostAlloc(blockBytes, 0)
		return r
	})
	return b
}

func (b *bench) must(r cudadrv.Result) {
	require.True(b.t, r == cudadrv.Success || len(b.m.Reports()) > 0, "%v after %v", r, b.log)
}

// call issues one call with the context of a device bound.
func (b *bench) call(dev int, f func() cudadrv.Result) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	b.must(b.drv.CtxSetCurrent(b.ctx[dev]))
	b.must(f())
}

// settle waits until a stream is idle, without telling the engines.
func (b *bench) settle(i int) {
	done := make(chan struct{})
	f := dl.OnceClosure(func() { close(done) })
	b.call(b.of[i], func() cudadrv.Result { return b.drv.LaunchHostFunc(b.streams[i], f) })
	for len(b.m.Reports()) == 0 {
		select {
		case <-done:
			return
		default:
			runtime.Gosched()
		}
	}
}

// on issues a call for a stream and lets its operations complete.
func (b *bench) on(i int, f func(s cudadrv.Stream) cudadrv.Result) {
	b.call(b.of[i], func() cudadrv.Result { return f(b.streams[i]) })
	b.settle(i)
}

// part returns a random part of memory that a stream may use.
func (b *bench) part(i int) (cudadrv.DevicePtr, uintptr) {
	k := b.r.IntN(2)
	if b.of[i] == 1 {
		k = 2
	}
	lo := b.r.IntN(8) * 256
	return b.blocks[k] + cudadrv.DevicePtr(lo), uintptr(1+b.r.IntN(8)) * 128
}

// use enqueues a random use of memory.
func (b *bench) use(i int, s cudadrv.Stream) cudadrv.Result {
	p, n := b.part(i)
	q, m := b.part(i)
	n = min(n, m)
	switch b.r.IntN(5) {
	case 0, 1:
		if p < q+cudadrv.DevicePtr(n) && q < p+cudadrv.DevicePtr(n) {
			q = p // CUDA does not define other overlapping copies
		}
		return b.drv.MemcpyDtoDAsync(p, q, n, s)
	case 2:
		return b.drv.MemcpyDtoHAsync(unsafe.Add(b.pinned, b.r.IntN(4)*512), p, n, s)
	case 3:
		return b.drv.MemcpyHtoDAsync(p, unsafe.Add(b.pinned, b.r.IntN(4)*512), n, s)
	}
	return b.drv.MemsetD8Async(p, 1, n, s)
}

// step performs a random step and returns its name.
func (b *bench) step() string {
	i, e := b.r.IntN(len(b.streams)), b.r.IntN(len(b.events))
	b.inGraph = false
	switch k := b.r.IntN(22); {
	case k < 5:
		b.on(i, func(s cudadrv.Stream) cudadrv.Result { return b.use(i, s) })
		return "use"
	case k < 10 && b.at[e] == b.of[i]:
		b.on(i, func(s cudadrv.Stream) cudadrv.Result { return b.drv.EventRecord(b.events[e], s) })
		return "record"
	case k < 15:
		b.on(i, func(s cudadrv.Stream) cudadrv.Result { return b.drv.StreamWaitEvent(s, b.events[e], 0) })
		return "wait"
	case k == 15:
		b.call(b.of[i], func() cudadrv.Result { return b.drv.StreamSynchronize(b.streams[i]) })
		return "stream sync"
	case k == 16:
		b.call(b.of[i], func() cudadrv.Result { return b.drv.CtxSynchronize() })
		return "device sync"
	case k == 17:
		b.call(b.at[e], func() cudadrv.Result { return b.drv.EventSynchronize(b.events[e]) })
		return "event sync"
	case k == 18:
		b.call(b.at[e], func() cudadrv.Result { return b.drv.EventQuery(b.events[e]) })
		return "event query"
	case k == 19:
		b.capture(i)
		return "capture"
	case k == 20 && len(b.execs) > 0:
		b.inGraph = true
		x := b.execs[b.r.IntN(len(b.execs))]
		b.on(i, func(s cudadrv.Stream) cudadrv.Result { return b.drv.GraphLaunch(x, s) })
		return "graph launch"
	}
	b.pooled(i)
	return "pool"
}

// pooled allocates stream-ordered memory, or frees it.
func (b *bench) pooled(i int) {
	if i = i % 3; len(b.pool) == 0 {
		b.on(i, func(s cudadrv.Stream) cudadrv.Result {
			p, r := b.drv.MemAllocAsync(blockBytes, s)
			b.pool = append(b.pool, p)
			return r
		})
		return
	}
	p := b.pool[0]
	if b.r.IntN(2) == 0 {
		b.on(i, func(s cudadrv.Stream) cudadrv.Result { return b.drv.MemsetD8Async(p, 0, 64, s) })
		return
	}
	b.pool = b.pool[1:]
	b.on(i, func(s cudadrv.Stream) cudadrv.Result { return b.drv.MemFreeAsync(p, s) })
}

// capture returns a graph of a fork and a join of two streams, with or without the event between.
func (b *bench) capture(i int) {
	if i = i % 3; len(b.execs) > 2 {
		return
	}
	other := (i + 1) % 3
	var g cudadrv.Graph
	fork, join := b.events[i], b.events[other]
	s, o := b.streams[i], b.streams[other]
	for _, f := range []func() cudadrv.Result{
		func() cudadrv.Result { return b.drv.StreamBeginCapture(s, cudadrv.CaptureRelaxed) },
		func() cudadrv.Result { return b.use(i, s) },
		func() cudadrv.Result { return b.drv.EventRecord(fork, s) },
		func() cudadrv.Result { return b.drv.StreamWaitEvent(o, fork, 0) },
		func() cudadrv.Result { return b.use(other, o) },
		func() cudadrv.Result { return b.drv.EventRecord(join, o) },
		func() cudadrv.Result {
			if b.r.IntN(3) == 0 {
				return b.use(i, s) // beside the other branch
			}
			return cudadrv.Success
		},
		func() cudadrv.Result { return b.drv.StreamWaitEvent(s, join, 0) },
		func() cudadrv.Result { return b.use(i, s) },
		func() (r cudadrv.Result) { g, r = b.drv.StreamEndCapture(s); return r },
		func() cudadrv.Result {
			x, r := b.drv.GraphInstantiateWithFlags(g, 0)
			b.execs = append(b.execs, x)
			return r
		},
	} {
		b.call(0, f)
	}
	for _, k := range []int{i, other} { // events of a capture are of no use for the host
		b.on(k, func(s cudadrv.Stream) cudadrv.Result { return b.drv.EventRecord(b.events[k], s) })
	}
}

// pair matches the two uses of a report, and their bytes.
var pair = regexp.MustCompile(`race: (\S+) on (stream \S+) \(?.*?(reads|writes) bytes (\d+) to (\d+) of .* which (\S+) on (stream \S+) `)

// reported is the number of groups of pair for the second use, which is the one that is reported.
const reported = 5

func pairOf(t *testing.T, report string) []string {
	m := pair.FindStringSubmatch(report)
	require.NotNil(t, m, report)
	return m[1:]
}

// Both engines report the same pair of uses at the same step of random programs, or none.
func TestBothEnginesReportTheSame(t *testing.T) {
	first := *seed
	if first == 0 {
		first = rand.Uint64()
	}
	t.Logf("seed %d", first)
	found := map[string]int{}
	for n := range *programs {
		b := newBench(t, first+uint64(n))
		for range 40 {
			b.log = append(b.log, b.step())
			device, san := b.m.Reports(), b.san.Reports()
			require.Equal(t, len(device) > 0, len(san) > 0, "seed %d: %v: virtual devices: %q; sanitizer: %q", first+uint64(n), b.log, device, san)
			if len(device) == 0 {
				continue
			}
			last := b.log[len(b.log)-1]
			found[last]++
			if !b.inGraph && pair.MatchString(device[0]) { // the nodes of a graph run in any order
				want, got := pairOf(t, device[0]), pairOf(t, san[0])
				if slices.Contains(b.log, "graph launch") { // several nodes may have made the first use
					want, got = want[:reported], got[:reported]
				}
				require.Equal(t, want, got, "seed %d: %v: virtual devices: %q; sanitizer: %q", first+uint64(n), b.log, device, san)
			}
			break
		}
		found["programs"]++
	}
	t.Log(found)
	for _, step := range []string{"use", "graph launch", "pool"} {
		require.NotZero(t, found[step], "no program has a report of %s", step)
	}
	require.Less(t, found["use"]+found["graph launch"]+found["pool"], found["programs"], "programs without reports")
}
