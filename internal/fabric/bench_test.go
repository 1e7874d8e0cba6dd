package fabric_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/stream"
)

// How many operations a graph has, and how often it is launched in a round.
const (
	benchOps      = 50
	benchLaunches = 20
)

func BenchmarkAllReduce(b *testing.B) {
	sizes := []int{8, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20}
	benchGroups(b, func(b *testing.B, group []member) {
		for _, a := range fabric.Algorithms {
			for _, bytes := range sizes {
				if bytes <= limitOf(group[0], a) && (a != fabric.Pipelined || bytes >= 1<<20) {
					benchCall(b, group, fmt.Sprintf("algo=%s/bytes=%d", a, bytes), call{name: "all-reduce", algorithm: a, n: bytes / 4})
				}
			}
		}
	})
}

func BenchmarkAllGather(b *testing.B)     { benchParts(b, "all-gather") }
func BenchmarkReduceScatter(b *testing.B) { benchParts(b, "reduce-scatter") }
func BenchmarkBroadcast(b *testing.B)     { benchParts(b, "broadcast") }
func BenchmarkAllToAll(b *testing.B)      { benchParts(b, "all-to-all") }

// benchParts measures a collective by the bytes of one rank's part.
func benchParts(b *testing.B, name string) {
	benchGroups(b, func(b *testing.B, group []member) {
		for _, bytes := range []int{8, 4 << 10, 64 << 10} {
			benchCall(b, group, fmt.Sprint("bytes=", bytes), call{name: name, n: bytes / 4})
		}
		for _, bytes := range []int{1 << 20, 32 << 20, 128 << 20} {
			if name != "broadcast" {
				benchCall(b, group, fmt.Sprint("algo=pipelined/bytes=", bytes), call{name: name, algorithm: fabric.Pipelined, n: bytes / 4})
			}
		}
	})
}

func benchGroups(b *testing.B, fn func(b *testing.B, group []member)) {
	for _, n := range []int{2, 4, 8} {
		b.Run(fmt.Sprint("gpus=", n), func(b *testing.B) { fn(b, open(b, testgpu.CUDA(b, n), nil)) })
	}
}

// benchCall checks a collective once and measures it, each operation enqueued by
// itself and in graphs.
func benchCall(b *testing.B, group []member, name string, c call) {
	b.Run(name, func(b *testing.B) {
		carryOut(b, group, floats(func(x float32) float32 { return x }), c)
		for _, mode := range []string{"eager", "graph"} {
			b.Run(mode, func(b *testing.B) { measure(b, group, c, mode == "graph") })
		}
	})
}

func measure(b *testing.B, group []member, c call, captured bool) {
	measureEach(b, group, captured, func(m member) func() error {
		dst, src := typedStep[float32]{call: c}.elements(m.Ranks())
		x := anySlice[float32]{makeOf[float32](b, m.s, dst), makeOf[float32](b, m.s, src)}
		return func() error { return x.enqueue(c, m) }
	})
}

// measureEach measures the operation that make returns for each rank.
func measureEach(b *testing.B, group []member, captured bool, operation func(m member) func() error) {
	racers := make([]*racer, len(group))
	for i, m := range group {
		racers[i] = newRacer(b, m, operation(m), captured)
	}
	race(b, racers, 1) // which loads what is to be loaded
	b.ResetTimer()
	slowest := race(b, racers, b.N)
	b.ReportMetric(float64(slowest.Nanoseconds())/1e3/float64(b.N*benchOps*benchLaunches), "µs/op")
	b.ReportMetric(0, "ns/op")
	for _, r := range racers {
		r.close(b)
	}
}

// A racer enqueues one rank's operations.
type racer struct {
	m        member
	op       func() error
	exec     *graph.Exec
	from, to *stream.Event
}

func newRacer(b *testing.B, m member, op func() error, captured bool) *racer {
	r := &racer{m: m, op: op}
	var err error
	r.from, err = stream.NewEvent(m.s.Device(), &stream.EventConfig{Timing: true})
	require.NoError(b, err)
	r.to, err = stream.NewEvent(m.s.Device(), &stream.EventConfig{Timing: true})
	require.NoError(b, err)
	require.NoError(b, m.s.Sync(testgpu.Context(b)))
	if captured {
		r.exec, err = graph.Capture([]*stream.Stream{m.s}, r.batch, nil)
		require.NoError(b, err)
	}
	return r
}

func (r *racer) batch() error {
	for range benchOps {
		if err := r.op(); err != nil {
			return err
		}
	}
	return nil
}

// run enqueues rounds, between two events.
func (r *racer) run(rounds int) (time.Duration, error) {
	if err := r.from.Record(r.m.s); err != nil {
		return 0, err
	}
	for range rounds * benchLaunches {
		var err error
		if r.exec != nil {
			err = r.exec.Launch(r.m.s)
		} else {
			err = r.batch()
		}
		if err != nil {
			return 0, err
		}
	}
	if err := r.to.Record(r.m.s); err != nil {
		return 0, err
	}
	if err := r.to.Sync(context.Background()); err != nil {
		return 0, err
	}
	return r.to.Elapsed(r.from)
}

func (r *racer) close(b *testing.B) {
	if r.exec != nil {
		require.NoError(b, r.exec.Close())
	}
	require.NoError(b, r.from.Close())
	require.NoError(b, r.to.Close())
}

// race runs all ranks, each on a thread of its own, and returns the time of the
// slowest.
func race(b *testing.B, racers []*racer, rounds int) (slowest time.Duration) {
	var wg sync.WaitGroup
	var mu sync.Mutex
	gate := make(chan struct{})
	for _, r := range racers {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			<-gate
			d, err := r.run(rounds)
			if err != nil {
				b.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			slowest = max(slowest, d)
		})
	}
	close(gate)
	wg.Wait()
	if b.Failed() {
		b.FailNow()
	}
	return slowest
}

// BenchmarkGrid measures all-reduce in graphs by the number of blocks and of their
// threads, from which Rank's choice is made.
func BenchmarkGrid(b *testing.B) {
	sizes := []int{8, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 64 << 20}
	benchGroups(b, func(b *testing.B, group []member) {
		for _, bytes := range sizes {
			for _, a := range fabric.Algorithms {
				if bytes <= limitOf(group[0], a) {
					benchGrids(b, group, call{name: "all-reduce", algorithm: a, n: bytes / 4})
				}
			}
		}
	})
}

// benchGrids measures a call with the grid that it has by itself and with others: those
// in which threads have less than one word are left out, and those with more than eight.
func benchGrids(b *testing.B, group []member, c call) {
	name := fmt.Sprintf("bytes=%d/algo=%s", c.n*4, c.algorithm)
	set := func(blocks, threads int) {
		for _, m := range group {
			m.SetGrid(blocks, threads)
		}
	}
	defer set(0, 0)
	single := func(grid string) {
		b.Run(fmt.Sprint(name, "/grid=", grid), func(b *testing.B) {
			carryOut(b, group, floats(func(x float32) float32 { return x }), c)
			measure(b, group, c, true)
		})
	}
	single("auto")
	steps := c.algorithm.Steps(c.n*4, len(group))
	for _, threads := range []int{32, 64, 128, 256, 512} {
		for _, blocks := range []int{1, 2, 4, 8, 16, 32, 64, 128} {
			if all := threads * blocks; all < 2*max(steps, 32) && 8*all >= steps {
				set(blocks, threads)
				single(fmt.Sprint(blocks, "x", threads))
			}
		}
	}
}

func limitOf(m member, a fabric.Algorithm) int {
	l := m.Limits()
	return map[fabric.Algorithm]int{fabric.OneShot: l.OneShot, fabric.TwoShotPackets: l.TwoShotPackets, fabric.TwoShot: l.TwoShot, fabric.TwoShotLines: l.TwoShotLines, fabric.Pipelined: 1 << 30}[a]
}
