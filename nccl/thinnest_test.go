package nccl

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/handle"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

var thinnest = flag.String("thinnest", "", "internal/bench/testdata/nccl.c as a shared `library`, for BenchmarkBesideThinnest")

// What an operation costs beside the thinnest loop over NCCL in C, and in Go, on the same
// threads, communicators, streams and buffers: processes and hosts differ by more than that.
// Of so many rounds, in which the three take turns, each figure is the median.
//
//	gcc -O2 -shared -fPIC internal/bench/testdata/nccl.c -lnccl -lcudart -o libthinnest.so
//	go test -run '^$' -bench BesideThinnest -benchtime 15x ./nccl -thinnest $PWD/libthinnest.so
func BenchmarkBesideThinnest(b *testing.B) {
	besideThinnest(b, func(p *pairing, k, n int) []contender {
		return []contender{
			{"C", func(r *paired) (runner, error) {
				return runner{run: func(ops int) (float64, error) { return r.inC(p, k, ops, n) }}, nil
			}},
			{"Go", func(r *paired) (runner, error) {
				return runner{run: func(ops int) (float64, error) { return r.inGo(k, ops, n) }}, nil
			}},
			{"Chorus", func(r *paired) (runner, error) {
				return runner{run: func(ops int) (float64, error) { return r.byChorus(k, ops, n) }}, nil
			}},
		}
	})
}

// Captures is package graph's Capture of what fn enqueues on s, which returns what launches
// the graph and what gives it up. A test outside of this package sets it.
var Captures func(s *stream.Stream, fn func() error) (launch, discard func() error, err error)

// What the same takes in graphs of 20 operations, captured and launched in C, and by Chorus.
func BenchmarkGraphsBesideThinnest(b *testing.B) {
	besideThinnest(b, func(p *pairing, k, n int) []contender {
		return []contender{
			{"C", func(r *paired) (runner, error) { return r.graphInC(p, k, n) }},
			{"Chorus", func(r *paired) (runner, error) { return r.graphByChorus(k, n) }},
		}
	})
}

// A contender issues operations in one of the ways that a benchmark compares.
type contender struct {
	name    string
	prepare func(r *paired) (runner, error)
}

// A runner issues so many operations of a rank, waits for them, and returns the microseconds
// that one took.
type runner struct {
	run func(operations int) (float64, error)
	end func() error // or nil
}

// besideThinnest has a row for each operation k and number n of elements.
func besideThinnest(b *testing.B, contenders func(p *pairing, k, n int) []contender) {
	if *thinnest == "" {
		b.Skip("needs -thinnest")
	}
	path, err := filepath.Abs(*thinnest)
	require.NoError(b, err)
	lib, err := dl.Open(&dl.Spec{Name: "the thinnest loop", Sonames: []string{path}})
	require.NoError(b, err)
	traced := handle.Trace.Swap(false) // which programs do not do
	defer handle.Trace.Store(traced)
	for _, gpus := range []int{2, 4, 8} {
		b.Run(fmt.Sprint("gpus=", gpus), func(b *testing.B) {
			p := newPairing(b, testgpu.CUDA(b, gpus), lib)
			for k, op := range besides {
				for _, bytes := range []int{8, 256, 8 << 10, 256 << 10} {
					if op.split && bytes < 16*gpus {
						continue
					}
					n := bytes / 4
					if op.split {
						n = n / gpus / 4 * 4
					}
					b.Run(fmt.Sprintf("op=%s/bytes=%d", op.kind, bytes), func(b *testing.B) { p.row(b, contenders(p, k, n)) })
				}
			}
		})
	}
}

// besides are the operations, in the order of nccl.c. prepare returns what issues one of n
// elements, or as many for each rank.
var besides = []struct {
	kind    collective.Kind
	split   bool // a rank's part is the size over the number of ranks
	prepare func(r *paired, n int) func() error
}{
	{collective.AllReduce, false, func(r *paired, n int) func() error {
		dst, src := r.slices(n, n)
		return func() error { return AllReduce(r.c, r.s, dst, src, Sum) }
	}},
	{collective.AllGather, true, func(r *paired, n int) func() error {
		dst, src := r.slices(n*r.c.size, n)
		return func() error { return AllGather(r.c, r.s, dst, src) }
	}},
	{collective.ReduceScatter, true, func(r *paired, n int) func() error {
		dst, src := r.slices(n, n*r.c.size)
		return func() error { return ReduceScatter(r.c, r.s, dst, src, Sum) }
	}},
	{collective.Broadcast, false, func(r *paired, n int) func() error {
		dst, src := r.slices(n, n)
		return func() error { return Broadcast(r.c, r.s, dst, src, 0) }
	}},
	{collective.Reduce, false, func(r *paired, n int) func() error {
		dst, src := r.slices(n, n)
		return func() error { return Reduce(r.c, r.s, dst, src, Sum, 0) }
	}},
	{collective.AllToAll, true, func(r *paired, n int) func() error {
		dst, src := r.slices(n*r.c.size, n*r.c.size)
		return func() error { return AllToAll(r.c, r.s, dst, src) }
	}},
	{collective.Gather, true, func(r *paired, n int) func() error {
		dst, src := r.slices(n*r.c.size, n)
		return func() error { return Gather(r.c, r.s, dst, src, 0) }
	}},
	{collective.Scatter, true, func(r *paired, n int) func() error {
		dst, src := r.slices(n, n*r.c.size)
		return func() error { return Scatter(r.c, r.s, dst, src, 0) }
	}},
	{collective.Send, false, func(r *paired, n int) func() error {
		dst, src := r.slices(n, n)
		both := func(b *Batch) error {
			if err := Send(b.On(r.c), r.s, src, r.next()); err != nil {
				return err
			}
			return Recv(b.On(r.c), r.s, dst, r.before())
		}
		return func() error { return Group(both) }
	}},
}

// A pairing is ranks that issue the same operations in different ways.
type pairing struct {
	ranks []paired
	c     loops
	meet  atomic.Int64
}

// loops are the functions of nccl.c.
type loops struct{ series, captured, replays, discard uintptr }

func (l *loops) find(lib *dl.Library) error {
	for name, at := range map[string]*uintptr{"series": &l.series, "captured": &l.captured, "replays": &l.replays, "discard": &l.discard} {
		ok := false
		if *at, ok = lib.Symbol(name); !ok {
			return fmt.Errorf("%s has no %s", *thinnest, name)
		}
	}
	return nil
}

// A paired is a rank of a pairing.
type paired struct {
	c        *Communicator
	s        *stream.Stream
	dst, src memory.Slice[float32]
}

func (r *paired) slices(to, from int) (dst, src memory.Slice[float32]) {
	return r.dst.Slice(0, to), r.src.Slice(0, from)
}

func (r *paired) next() int   { return (r.c.rank + 1) % r.c.size }
func (r *paired) before() int { return (r.c.rank + r.c.size - 1) % r.c.size }

const pairedRoom = 1 << 16 // elements

func newPairing(b *testing.B, devs []*device.Device, lib *dl.Library) *pairing {
	p := &pairing{ranks: make([]paired, len(devs))}
	require.NoError(b, p.c.find(lib))
	cs, err := NewCommunicators(testgpu.Context(b), devs, nil)
	require.NoError(b, err)
	for i := range p.ranks {
		r := &p.ranks[i]
		r.c = cs[i]
		r.s, err = stream.New(devs[i], nil)
		require.NoError(b, err)
		for _, x := range []*memory.Slice[float32]{&r.dst, &r.src} {
			*x, err = memory.Make[float32](r.s, pairedRoom)
			require.NoError(b, err)
			require.NoError(b, x.Zero(r.s))
		}
	}
	b.Cleanup(func() {
		for i := range p.ranks {
			r := &p.ranks[i]
			require.NoError(b, r.s.Sync(testgpu.Context(b)))
			require.NoError(b, r.dst.Close())
			require.NoError(b, r.src.Close())
			require.NoError(b, r.c.Close())
			require.NoError(b, r.s.Close())
		}
	})
	return p
}

// together waits for all ranks without giving up the thread.
func (p *pairing) together() {
	n := int64(len(p.ranks))
	for end := (p.meet.Add(1) + n - 1) / n * n; p.meet.Load() < end; {
	}
}

const (
	warm      = 20
	timed     = 300
	perLaunch = 20 // operations of a graph
)

// row lets contenders take turns.
func (p *pairing) row(b *testing.B, list []contender) {
	var mu sync.Mutex
	all := make([][]float64, len(list)) // by round
	for i := range all {
		all[i] = make([]float64, b.N)
	}
	var done sync.WaitGroup
	errs := make([]error, len(p.ranks))
	for i := range p.ranks {
		done.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			r := &p.ranks[i]
			errs[i] = gpu.DeviceOf(r.c.dev).Bound(func() (err error) {
				ways := make([]runner, len(list))
				for k := range list {
					if ways[k], err = list[k].prepare(r); err != nil {
						return err
					}
					if end := ways[k].end; end != nil {
						defer func() { err = errors.Join(err, end()) }()
					}
				}
				for round := range b.N {
					for k := range ways {
						at := (k + round) % len(ways)
						if _, err := ways[at].run(warm); err != nil {
							return err
						}
						p.together()
						us, err := ways[at].run(timed)
						if err != nil {
							return err
						}
						mu.Lock()
						all[at][round] += us / float64(len(p.ranks))
						mu.Unlock()
						p.together()
					}
				}
				return nil
			})
		})
	}
	done.Wait()
	for _, err := range errs {
		require.NoError(b, err)
	}
	b.ReportMetric(0, "ns/op")
	for i, c := range list {
		b.ReportMetric(middle(all[i]), c.name+"-µs")
	}
	last := all[len(all)-1]
	for i := range last {
		last[i] /= all[0][i]
	}
	b.ReportMetric(middle(last), "Chorus/C")
}

func middle(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return list[len(list)/2]
}

func (r *paired) inC(p *pairing, k, operations, n int) (float64, error) {
	us, _ := dl.Get().In(uintptr(k), uintptr(*r.c.h), uintptr(r.c.rank), uintptr(len(p.ranks)), uintptr(operations),
		uintptr(n), 0, uintptr(r.dst.Ptr()), uintptr(r.src.Ptr()), uintptr(gpu.StreamOf(r.s).Raw())).Out().Do1(p.c.series)
	return math.Float64frombits(us), nil
}

func (r *paired) graphInC(p *pairing, k, n int) (runner, error) {
	if _, err := r.inC(p, k, warm, n); err != nil { // NCCL connects the ranks
		return runner{}, err
	}
	exec, _ := dl.Get().In(uintptr(k), uintptr(*r.c.h), uintptr(r.c.rank), uintptr(len(p.ranks)), perLaunch,
		uintptr(n), 0, uintptr(r.dst.Ptr()), uintptr(r.src.Ptr()), uintptr(gpu.StreamOf(r.s).Raw())).Out().Do1(p.c.captured)
	return runner{
		run: func(operations int) (float64, error) {
			us, _ := dl.Get().In(uintptr(exec), uintptr(operations/perLaunch), uintptr(gpu.StreamOf(r.s).Raw())).Out().Do1(p.c.replays)
			return math.Float64frombits(us) / perLaunch, nil
		},
		end: func() error { dl.Get().In(uintptr(exec)).Do(p.c.discard); return nil },
	}, nil
}

// inGo calls NCCL as Chorus does, without all that it does before and behind.
func (r *paired) inGo(k, operations, n int) (float64, error) {
	o := operation{Op: collective.Op{Call: collective.Call{Request: collective.Request{Kind: besides[k].kind, DType: memory.Float32, N: n}, Stream: r.s},
		Dst: collective.OperandOf(r.dst), Src: collective.OperandOf(r.src)}, unit: 1, wire: ncclapi.Float32, redop: ncclapi.Sum, comm: r.c}
	api := r.c.api
	begun := time.Now()
	for range operations {
		if o.Kind != collective.Send {
			if got := o.callNCCL(); got != ncclapi.Success {
				return 0, r.c.check("thinnest", got)
			}
			continue
		}
		api.GroupStart()
		api.Collective(ncclapi.Call{Func: ncclapi.FuncSend, Send: o.Src.Ptr, Count: uintptr(n), Type: o.wire, Root: int32(r.next()), Comm: *r.c.h, Stream: gpu.StreamOf(r.s).Raw()})
		api.Collective(ncclapi.Call{Func: ncclapi.FuncRecv, Recv: o.Dst.Ptr, Count: uintptr(n), Type: o.wire, Root: int32(r.before()), Comm: *r.c.h, Stream: gpu.StreamOf(r.s).Raw()})
		if got := api.GroupEnd(); got != ncclapi.Success {
			return 0, r.c.check("thinnest", got)
		}
	}
	return r.end(begun, operations)
}

func (r *paired) byChorus(k, operations, n int) (float64, error) {
	issue := besides[k].prepare(r, n)
	begun := time.Now()
	for range operations {
		if err := issue(); err != nil {
			return 0, err
		}
	}
	return r.end(begun, operations)
}

func (r *paired) graphByChorus(k, n int) (runner, error) {
	issue := besides[k].prepare(r, n)
	launch, discard, err := Captures(r.s, func() error {
		for range perLaunch {
			if err := issue(); err != nil {
				return err
			}
		}
		return nil
	})
	run := func(operations int) (float64, error) {
		begun := time.Now()
		for range operations / perLaunch {
			if err := launch(); err != nil {
				return 0, err
			}
		}
		return r.end(begun, operations)
	}
	return runner{run, discard}, err
}

// end waits as the loop in C does.
func (r *paired) end(begun time.Time, operations int) (float64, error) {
	for {
		if done, err := r.s.Query(); done || err != nil {
			return float64(time.Since(begun)) / 1e3 / float64(operations), err
		}
	}
}
