package comm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// groupBy makes a group with a strategy.
func groupBy(t *testing.T, devs []*device.Device, cfg comm.Config) *comm.Group {
	t.Helper()
	g, err := comm.LocalWith(testgpu.Context(t), &cfg, devs...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

// siteOf is where tunings for groups of these devices hold.
func siteOf(t *testing.T, devs []*device.Device) comm.Site {
	t.Helper()
	g := local(t, devs)
	at, err := g.Site()
	require.NoError(t, err)
	return at
}

// anyTuning has each strategy as the fastest of some operations and sizes.
func anyTuning(at comm.Site, r *rand.Rand) *comm.Tuning {
	t := &comm.Tuning{For: at}
	every := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines, comm.Windows, comm.CopyEngines}
	for _, op := range []string{"all-reduce", "all-gather", "reduce-scatter", "broadcast", "all-to-all"} {
		for bytes := 4; bytes <= 1<<16; bytes += 1 + bytes/2 {
			c := comm.Choice{Operation: op, Bytes: bytes}
			if strings.Contains(op, "reduce") {
				c.Type, c.Reduction = "float32", "sum"
			}
			for i, k := range r.Perm(len(every)) {
				x := comm.Timing{Strategy: every[k], Micros: float64(i)}
				if x.Strategy == comm.CopyEngines {
					x.Eager = float64(r.IntN(8))
				}
				c.Times = append(c.Times, x)
			}
			t.Choices = append(t.Choices, c)
		}
	}
	return t
}

// TestStrategiesConform checks all collectives by each strategy, and by tunings that
// mix them.
func TestStrategiesConform(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	for _, s := range []comm.Strategy{comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines, comm.Windows, comm.CopyEngines, comm.Tuned} {
		sizes := []int{1, 3}
		if s == comm.Tuned { // which has all of them
			sizes = append(sizes, 8)
		}
		for _, n := range sizes {
			t.Run(fmt.Sprint(s, "/virtual/", n), func(t *testing.T) {
				devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n})
				g := groupBy(t, devs, comm.Config{Strategy: s, Tuning: anyTuning(siteOf(t, devs), rand.New(rand.NewPCG(seed, 1)))})
				require.Equal(t, n > 1, g.Strategy() == s)
				require.NoError(t, conform(testgpu.Context(t), g))
			})
		}
		t.Run(fmt.Sprint(s, "/cuda"), func(t *testing.T) {
			devs := testgpu.CUDA(t, 2)
			g := groupBy(t, devs, comm.Config{Strategy: s, Tuning: anyTuning(siteOf(t, devs), rand.New(rand.NewPCG(seed, 1)))})
			require.NoError(t, conform(testgpu.Context(t), g))
		})
	}
	for _, backend := range []string{"virtual", "cuda"} {
		for _, s := range []comm.Strategy{comm.Windows, comm.Tuned} {
			t.Run(fmt.Sprint(s, "/processes/", backend), func(t *testing.T) {
				if backend == "cuda" {
					testgpu.CUDA(t, 2)
				}
				file := filepath.Join(t.TempDir(), "of", "tuning.json")
				code, out, _ := job(t, backend, "conform", 2, env.CommStrategy.Name+"="+s.String(), env.TuningFile.Name+"="+file)
				require.Zero(t, code, out)
				_, err := os.Stat(file)
				require.Equal(t, s == comm.Tuned, err == nil, "the first group measures and writes")
			})
		}
	}
}

// TestWindowsAreUsed compares how often NCCL's collectives and the copies beside them
// are called: a window takes one there and one back.
func TestWindowsAreUsed(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	g := groupBy(t, devs, comm.Config{Strategy: comm.Windows})
	for _, c := range []struct {
		kind  nccl.CollectiveKind
		dtype memory.DType
		op    nccl.Op
		count int
		want  comm.Strategy
	}{
		{nccl.AllReduceKind, memory.Float32, nccl.Sum, 1, comm.Windows},
		{nccl.AllReduceKind, memory.BFloat16T, nccl.Sum, 2 << 20, comm.Windows},
		{nccl.AllReduceKind, memory.BFloat16T, nccl.Sum, 2<<20 + 1, comm.NCCLOnly},
		{nccl.AllReduceKind, memory.Float32, nccl.Max, 1, comm.NCCLOnly},
		{nccl.AllReduceKind, memory.Int32, nccl.Sum, 1, comm.NCCLOnly},
		{nccl.AllReduceKind, memory.Float32, nccl.Sum, 0, comm.NCCLOnly},
		{nccl.AllGatherKind, memory.Int32, 0, 2, comm.Windows},
		{nccl.AllGatherKind, memory.Int32, 0, 3, comm.NCCLOnly}, // 12 bytes, which NCCL 2.28.3 spoils
		{nccl.AllGatherKind, memory.Int64, 0, 256 << 10, comm.Windows},
		{nccl.AllGatherKind, memory.Int64, 0, 256<<10 + 1, comm.NCCLOnly},
		{nccl.ReduceScatterKind, memory.Float16T, nccl.Sum, 4, comm.Windows},
		{nccl.ReduceScatterKind, memory.Float16T, nccl.Sum, 5, comm.NCCLOnly},
		{nccl.BroadcastKind, memory.Float32, 0, 4, comm.NCCLOnly},
		{nccl.AllToAllKind, memory.Float32, 0, 4, comm.NCCLOnly},
	} {
		require.Equal(t, c.want, g.Choice(1, nccl.Collective{Kind: c.kind, DType: c.dtype, Op: c.op, Count: c.count}), "%+v", c)
	}
	exact := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: "2.28.7"}), comm.Config{Strategy: comm.Windows})
	require.Equal(t, comm.Windows, exact.Choice(0, nccl.Collective{Kind: nccl.AllGatherKind, DType: memory.Int32, Count: 3}))
	old := groupBy(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: "2.26.2"}), comm.Config{Strategy: comm.Windows})
	require.Equal(t, comm.NCCLOnly, old.Strategy(), "it has no windows")

	// What NCCL is given lies in the windows: with in place results its own memory would
	// be both, and what is beside stays as it was.
	xs, hs := shards(t, g, 100)
	ys, _ := shards(t, g, 300)
	before := [][]float32{read(t, g, 0, ys[0]), read(t, g, 1, ys[1])}
	require.NoError(t, comm.ReduceScatter(g, comm.Sum, comm.Shards[float32]{ys[0].Slice(100, 150), ys[1].Slice(100, 150)}, xs))
	require.NoError(t, g.Wait(testgpu.Context(t)))
	for i := range ys {
		copy(before[i][100:], total(hs)[50*i:50*i+50])
		require.Equal(t, before[i], read(t, g, i, ys[i]))
	}
}

// TestWindowsAndGraphs launches a graph on a stream of one rank, the group's or another,
// beside operations of the group, without a word about order: the window is one for all.
func TestWindowsAndGraphs(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{Strategy: comm.Windows})
		other, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer other.Close()
		for _, s := range []*stream.Stream{g.Stream(0), other} {
			var in, out [2]comm.Shards[float32]
			var want [2][]float32
			for k := range in {
				xs, hs := shards(t, g, 2000)
				in[k], want[k] = xs, total(hs)
				out[k], _ = shards(t, g, 2000)
			}
			sum := func(k int) error {
				return nccl.Group(g.Communicator(0), func() error {
					for i := range in[k] {
						if err := nccl.AllReduce(g.Communicator(i), g.Stream(i), out[k][i], in[k][i], nccl.Sum); err != nil {
							return err
						}
					}
					return nil
				})
			}
			x, err := graph.Capture(g.Streams(), func() error { return sum(0) })
			require.NoError(t, err)
			defer x.Close()
			require.NoError(t, g.Wait(testgpu.Context(t)))
			for range 30 {
				require.NoError(t, x.Launch(s))
				require.NoError(t, sum(1))
			}
			require.NoError(t, g.Wait(testgpu.Context(t)))
			require.NoError(t, s.Sync(testgpu.Context(t)))
			for k := range out {
				for i := range out[k] {
					require.Equal(t, want[k], read(t, g, i, out[k][i]))
				}
			}
		}
	})
}

// TestWindowsFail fails the copies there and back.
func TestWindowsFail(t *testing.T) {
	for _, fault := range []string{"cuMemcpyDtoDAsync#1=CUDA_ERROR_INVALID_VALUE", "cuMemcpyDtoDAsync#3=CUDA_ERROR_INVALID_VALUE", "cuMemcpyDtoDAsync#4=CUDA_ERROR_INVALID_VALUE"} {
		t.Run(fault, func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: fault})
			g := groupBy(t, devs, comm.Config{Strategy: comm.Windows})
			xs, _ := shards(t, g, 100)
			err := comm.AllReduce(g, comm.Sum, xs...)
			require.ErrorIs(t, err, comm.ErrBroken)
			require.ErrorContains(t, err, "cuMemcpyDtoDAsync")
			require.NoError(t, g.Close())
		})
	}
}

// TestWindowsThatOneRankCannotHave fails the memory of one rank's window, and then its
// registration, for which NCCL waits for all ranks: none waits, and all name that rank.
func TestWindowsThatOneRankCannotHave(t *testing.T) {
	for fault, says := range map[string]string{
		"ncclMemAlloc#2=ncclSystemError":           `windows: .*rank (\d) of 3 .*ncclMemAlloc`,
		"ncclCommWindowRegister#3=ncclSystemError": `ncclCommWindowRegister on rank (\d) of 3 .*ncclSystemError`,
	} {
		for _, s := range []comm.Strategy{comm.Windows, comm.Tuned} {
			t.Run(fmt.Sprint(fault, "/", s), func(t *testing.T) {
				cfg := &comm.Config{Strategy: s, Tuning: &comm.Tuning{}}
				devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: fault})
				_, err := comm.LocalWith(testgpu.Context(t), cfg, devs...)
				require.Regexp(t, says, err)
				devs = testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: fault})
				errs := make([]error, 3)
				var wg sync.WaitGroup
				for i, b := range boards(t.Context(), 3) {
					wg.Go(func() { _, errs[i] = comm.JoinWith(testgpu.Context(t), b, devs[i], cfg) })
				}
				wg.Wait()
				culprits, others := map[string]bool{}, 0
				for _, err := range errs {
					require.NotErrorIs(t, err, context.DeadlineExceeded)
					require.Regexp(t, says, err)
					culprits[regexp.MustCompile(says).FindStringSubmatch(err.Error())[1]] = true
					if strings.Contains(err.Error(), " cannot: ") {
						others++
					} else {
						require.ErrorIs(t, err, nccl.ErrorSystem)
					}
				}
				require.Len(t, culprits, 1, "%v", errs)
				require.Equal(t, 2, others, "%v", errs)
			})
		}
	}
}

// TestCopyEngines lets NCCL fail: what is of all ranks at once does not need it.
func TestCopyEngines(t *testing.T) {
	const faults = "ncclAllGather#*=ncclInvalidUsage,ncclAlltoAll#*=ncclInvalidUsage"
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: faults})
	g := groupBy(t, devs, comm.Config{Strategy: comm.CopyEngines})
	xs, hs := shards(t, g, 30)
	ys, _ := shards(t, g, 90)
	whole := slices.Concat(hs...)
	all := func() error { return comm.AllGather(g, ys, xs) }
	x, err := graph.Capture(g.Streams(), all)
	require.NoError(t, err)
	defer x.Close()
	for name, call := range map[string]func() error{
		"by itself":       all,
		"in a graph":      func() error { return x.Launch(g.Stream(1)) },
		"in a nccl.Group": func() error { return nccl.Group(g.Communicator(2), all) },
		"in another order": func() error {
			return nccl.Group(g.Communicator(0), func() error {
				for _, i := range []int{2, 0, 1} {
					if err := nccl.AllGather(g.Communicator(i), g.Stream(i), ys[i], xs[i]); err != nil {
						return err
					}
				}
				return nil
			})
		},
		"in place": func() error {
			var parts comm.Shards[float32]
			for i := range ys {
				part := ys[i].Slice(30*i, 30*i+30)
				require.NoError(t, part.CopyFrom(g.Stream(i), hs[i]))
				parts = append(parts, part)
			}
			return comm.AllGather(g, ys, parts)
		},
	} {
		for i := range ys {
			require.NoError(t, ys[i].CopyFrom(g.Stream(i), make([]float32, 90)))
			require.NoError(t, g.Stream(1).WaitStream(g.Stream(i)), "for the graph")
		}
		require.NoError(t, call(), name)
		for i := range ys {
			require.NoError(t, g.Stream(i).WaitStream(g.Stream(1)))
			require.Equal(t, whole, read(t, g, i, ys[i]), name)
		}
	}
	zs, _ := shards(t, g, 90)
	require.NoError(t, comm.AllToAll(g, zs, ys))
	for i := range zs {
		require.Equal(t, slices.Repeat(hs[i], 3), read(t, g, i, zs[i]))
	}
	// What is overwritten at once is read before, on the other ranks too.
	for round := range 20 {
		for i := range xs {
			require.NoError(t, xs[i].CopyFrom(g.Stream(i), slices.Repeat([]float32{float32(round)}, 30)))
		}
		require.NoError(t, all())
		for i := range xs {
			require.NoError(t, xs[i].Zero(g.Stream(i)))
		}
		for i := range ys {
			require.Equal(t, slices.Repeat([]float32{float32(round)}, 90), read(t, g, i, ys[i]))
		}
	}
	// One rank by itself, and two of three, are NCCL's.
	require.ErrorIs(t, nccl.Group(g.Communicator(0), func() error {
		return errors.Join(nccl.AllGather(g.Communicator(0), g.Stream(0), ys[0], xs[0]), nccl.AllGather(g.Communicator(1), g.Stream(1), ys[1], xs[1]))
	}), nccl.ErrorInvalidUsage)
}

// TestCopyEnginesOrTheNext gives a group a tuning by which copy engines are the fastest,
// and own kernels next: these have what is not of all ranks at once, and NCCL nothing.
func TestCopyEnginesOrTheNext(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	tuning := &comm.Tuning{For: siteOf(t, devs), Choices: []comm.Choice{{Operation: "all-gather", Bytes: 64, Times: []comm.Timing{
		{Strategy: comm.CopyEngines}, {Strategy: comm.OwnKernels, Micros: 1}, {Strategy: comm.NCCLOnly, Micros: 2}}}}}
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: tuning})
	x := nccl.Collective{Kind: nccl.AllGatherKind, DType: memory.Float32, Count: 30}
	require.Equal(t, comm.OwnKernels, g.Chosen(x))
	x.Together = true
	require.Equal(t, comm.CopyEngines, g.Chosen(x))
	xs, hs := shards(t, g, 30)
	ys, _ := shards(t, g, 60)
	other, _ := shards(t, g, 8)
	one := func(i int) error { return nccl.AllGather(g.Communicator(i), g.Stream(i), ys[i], xs[i]) }
	captured := func(i int) error {
		x, err := graph.Capture([]*stream.Stream{g.Stream(i)}, func() error { return one(i) })
		if err != nil {
			return err
		}
		return errors.Join(x.Launch(g.Stream(i)), x.Close())
	}
	for name, call := range map[string]func() error{
		"together":              func() error { return comm.AllGather(g, ys, xs) },
		"one after the other":   func() error { return errors.Join(one(0), one(1)) },
		"in graphs of one rank": func() error { return errors.Join(captured(0), captured(1)) },
		"in groups of one": func() error {
			return errors.Join(nccl.Group(g.Communicator(0), func() error { return one(0) }), one(1))
		},
		"in a group with transfers": func() error {
			return nccl.Group(g.Communicator(0), func() error { return errors.Join(one(0), transfer(g, other), one(1)) })
		},
	} {
		for i := range ys {
			require.NoError(t, ys[i].Zero(g.Stream(i)))
		}
		stop := devs[0].System().Machine().CountCalls()
		require.NoError(t, call(), name)
		calls := stop()
		require.Zero(t, calls["ncclAllGather"], "%s: %v", name, calls)
		require.Equal(t, name == "together", calls["cuMemcpyDtoDAsync"] == 4, "%s: %v", name, calls)
		for i := range ys {
			require.Equal(t, slices.Concat(hs...), read(t, g, i, ys[i]), name)
		}
	}
}

// transfer sends what rank 0 has of xs to itself, in place.
func transfer(g *comm.Group, xs comm.Shards[float32]) error {
	c, s := g.Communicator(0), g.Stream(0)
	return errors.Join(nccl.Send(c, s, xs[0].Slice(0, 8), 0), nccl.Recv(c, s, xs[0].Slice(0, 8), 0))
}

// TestCopyEnginesInGraphs gives a group a tuning by which copy engines are the fastest in
// graphs only.
func TestCopyEnginesInGraphs(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	tuning := &comm.Tuning{For: siteOf(t, devs), Choices: []comm.Choice{{Operation: "all-gather", Bytes: 64, Times: []comm.Timing{
		{Strategy: comm.CopyEngines, Micros: 1, Eager: 3}, {Strategy: comm.OwnKernels, Micros: 2}}}}}
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: tuning})
	x := nccl.Collective{Kind: nccl.AllGatherKind, DType: memory.Float32, Count: 30, Together: true}
	require.Equal(t, comm.OwnKernels, g.Chosen(x))
	x.Captured = true
	require.Equal(t, comm.CopyEngines, g.Chosen(x))
	x.Together = false
	require.Equal(t, comm.OwnKernels, g.Chosen(x))

	xs, hs := shards(t, g, 30)
	ys, _ := shards(t, g, 60)
	all := func() error { return comm.AllGather(g, ys, xs) }
	copies := func(call func() error) uint64 {
		stop := devs[0].System().Machine().CountCalls()
		require.NoError(t, call())
		n := stop()["cuMemcpyDtoDAsync"]
		for i := range ys {
			require.Equal(t, slices.Concat(hs...), read(t, g, i, ys[i]))
			require.NoError(t, ys[i].Zero(g.Stream(i)))
		}
		return uint64(n)
	}
	require.Zero(t, copies(all))
	require.EqualValues(t, 4, copies(func() error {
		exec, err := graph.Capture(g.Streams(), all)
		if err != nil {
			return err
		}
		s := g.Stream(0)
		return errors.Join(s.WaitStream(g.Stream(1)), exec.Launch(s), g.Stream(1).WaitStream(s), exec.Close())
	}))
}

// TestCopyEnginesFail has a copy between two ranks fail in the middle.
func TestCopyEnginesFail(t *testing.T) {
	t.Setenv(env.P2P.Name, "force") // whose test copies too
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: "cuMemcpyDtoDAsync#5=CUDA_ERROR_INVALID_VALUE"})
	g := groupBy(t, devs, comm.Config{Strategy: comm.CopyEngines})
	xs, _ := shards(t, g, 30)
	ys, _ := shards(t, g, 90)
	stop := devs[0].System().Machine().CountCalls()
	err := comm.AllGather(g, ys, xs)
	calls := stop()
	require.ErrorIs(t, err, comm.ErrBroken)
	require.ErrorContains(t, err, "cuMemcpyDtoDAsync")
	// The streams meet before the copies, and behind those that were enqueued: two wait
	// for one there, and that for them.
	require.Equal(t, 2*4, calls["cuStreamWaitEvent"], "%v", calls)
	require.NoError(t, g.Close())
}

// TestCopyEnginesWhereTheyCannot leaves it to NCCL where ranks are in several processes,
// or devices do not reach each other.
func TestCopyEnginesWhereTheyCannot(t *testing.T) {
	t.Setenv(env.CommStrategy.Name, "copy-engines")
	gs, errs := join(t, t.Context(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, comm.NCCLOnly, gs[1].Strategy())
	t.Setenv(env.P2P.Name, "off")
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	require.Equal(t, comm.NCCLOnly, g.Strategy())
}

// TestTunedChoice looks choices up by operation, type, reduction, size and whether it is
// made of whole 16 bytes.
func TestTunedChoice(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	choice := func(op, dtype, red string, bytes int, order ...comm.Strategy) comm.Choice {
		c := comm.Choice{Operation: op, Type: dtype, Reduction: red, Bytes: bytes}
		for i, s := range order {
			c.Times = append(c.Times, comm.Timing{Strategy: s, Micros: float64(i)})
		}
		return c
	}
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: siteOf(t, devs), Choices: []comm.Choice{
		choice("all-reduce", "float32", "sum", 16, comm.OneShot),
		choice("all-reduce", "float32", "sum", 12, comm.TwoShot),
		choice("all-reduce", "float32", "sum", 1024, comm.TwoShotPackets, comm.OneShot),
		choice("all-reduce", "float32", "sum", 1<<20, comm.NCCLOnly, comm.OneShot),
		choice("all-reduce", "bfloat16", "sum", 16, comm.Windows),
		choice("all-reduce", "int64", "max", 16, comm.Windows, comm.TwoShot), // windows cannot
		choice("all-reduce", "int32", "min", 16, comm.OneShot),
		choice("all-gather", "", "", 1<<20, comm.Windows, comm.OwnKernels), // too much for both
		choice("all-gather", "", "", 4<<10, comm.OwnKernels),
	}}})
	of := func(kind nccl.CollectiveKind, dtype memory.DType, op nccl.Op, count int) comm.Strategy {
		return g.Choice(0, nccl.Collective{Kind: kind, DType: dtype, Op: op, Count: count})
	}
	for _, c := range []struct {
		want, got comm.Strategy
	}{
		{comm.OneShot, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 4)},
		{comm.OneShot, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 28)}, // 112 bytes are nearer to 16 than to 1024
		{comm.TwoShotPackets, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 36)},
		{comm.TwoShotPackets, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 4<<10)},
		{comm.NCCLOnly, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 16<<10)},
		{comm.NCCLOnly, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 1<<24)},
		{comm.TwoShot, of(nccl.AllReduceKind, memory.Float32, nccl.Sum, 1001)}, // odd, as 12 are
		{comm.Windows, of(nccl.AllReduceKind, memory.BFloat16T, nccl.Sum, 8)},
		{comm.Windows, of(nccl.AllReduceKind, memory.BFloat16T, nccl.Sum, 7)},
		{comm.TwoShot, of(nccl.AllReduceKind, memory.Int64, nccl.Max, 2)},
		{comm.TwoShot, of(nccl.AllReduceKind, memory.Float64, nccl.Sum, 2)},  // as int64 rather than float32's sums
		{comm.OneShot, of(nccl.AllReduceKind, memory.Int32, nccl.Max, 4)},    // as its type rather than its reduction
		{comm.TwoShot, of(nccl.AllReduceKind, memory.Uint64, nccl.Max, 1)},   // as its reduction; whole 16 bytes count less
		{comm.OneShot, of(nccl.AllReduceKind, memory.Float16T, nccl.Sum, 8)}, // as the first of equals
		{comm.NCCLOnly, of(nccl.AllReduceKind, memory.Float32, 9, 4)},        // a reduction of the user's
		{comm.OwnKernels, of(nccl.AllGatherKind, memory.Float64, 0, 1)},
		{comm.NCCLOnly, of(nccl.AllGatherKind, memory.Float64, 0, 1<<20)},
		{comm.NCCLOnly, of(nccl.BroadcastKind, memory.Float64, 0, 1)}, // not measured
		{comm.NCCLOnly, of(nccl.AllGatherKind, memory.Float64, 0, 0)},
	} {
		require.Equal(t, c.want, c.got)
	}
}

// TestTuningTakesTheSlowest sorts strategies by the times of the ranks that took longest.
func TestTuningTakesTheSlowest(t *testing.T) {
	times := func(list ...comm.Strategy) (all []comm.Timing) {
		for _, s := range list {
			all = append(all, comm.Timing{Strategy: s})
		}
		return all
	}
	tuning := comm.Tuning{Choices: []comm.Choice{{Times: times(comm.NCCLOnly, comm.OwnKernels)}, {Times: times(comm.NCCLOnly)}}}
	tuning.Fill([][]float64{{3, 9, 1}, {4, 2, 7}, {1, 1, 2}})
	require.Equal(t, []comm.Timing{{Strategy: comm.NCCLOnly, Micros: 4}, {Strategy: comm.OwnKernels, Micros: 9}}, tuning.Choices[0].Times)
	require.Equal(t, []comm.Timing{{Strategy: comm.NCCLOnly, Micros: 7}}, tuning.Choices[1].Times)
}

// TestUse changes the strategy between operations.
func TestUse(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: siteOf(t, devs)}})
		every := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines, comm.Windows, comm.CopyEngines, comm.Tuned}
		require.Equal(t, every, g.Strategies())
		small := nccl.Collective{Kind: nccl.AllReduceKind, DType: memory.Float32, Count: 8}
		for _, s := range every {
			require.NoError(t, g.Use(testgpu.Context(t), s))
			require.Equal(t, s, g.Strategy())
			want := s
			if s == comm.Tuned || s == comm.CopyEngines {
				want = comm.NCCLOnly // nothing was measured, or it cannot
			}
			require.Equal(t, want, g.Choice(1, small))
			xs, hs := shards(t, g, 8)
			require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
			for i := range xs {
				require.Equal(t, total(hs), read(t, g, i, xs[i]))
			}
		}
		require.ErrorIs(t, g.Use(testgpu.Context(t), comm.ByEnvironment), comm.ErrMismatch)
		plain := local(t, devs)
		require.Equal(t, []comm.Strategy{comm.NCCLOnly}, plain.Strategies())
		require.NoError(t, plain.Use(testgpu.Context(t), comm.NCCLOnly))
		require.ErrorContains(t, plain.Use(testgpu.Context(t), comm.OneShot), "the group has no strategy one-shot: it has [nccl]")
		require.NoError(t, g.Close())
		require.ErrorIs(t, g.Use(testgpu.Context(t), comm.NCCLOnly), device.ErrClosed)
	})
}

// TestUseOfRanksThatDiffer lets the ranks of two processes want different strategies: all
// are told who wants what, and go on with what they had.
func TestUseOfRanksThatDiffer(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		t.Setenv(env.CommStrategy.Name, "own")
		gs, errs := join(t, t.Context(), devs[:3])
		require.NoError(t, errors.Join(errs...))
		all := func(do func(i int, g *comm.Group) error) []error {
			errs := make([]error, len(gs))
			var wg sync.WaitGroup
			for i, g := range gs {
				wg.Go(func() { errs[i] = do(i, g) })
			}
			wg.Wait()
			return errs
		}
		for text, wanted := range map[string][]comm.Strategy{
			"rank 2 wants the strategy one-shot and rank 0 nccl":       {comm.NCCLOnly, comm.NCCLOnly, comm.OneShot},
			"rank 1 wants the strategy Strategy(77) and rank 0 nccl":   {comm.NCCLOnly, 77, comm.NCCLOnly},
			"rank 1 wants the strategy nccl and rank 0 windows":        {comm.Windows, comm.NCCLOnly, comm.OneShot},
			"the group has no strategy windows: it has [nccl own one-": {comm.Windows, comm.Windows, comm.Windows},
		} {
			for _, err := range all(func(i int, g *comm.Group) error { return g.Use(testgpu.Context(t), wanted[i]) }) {
				require.ErrorIs(t, err, comm.ErrMismatch)
				require.ErrorContains(t, err, text)
			}
			for _, g := range gs {
				require.Equal(t, comm.OwnKernels, g.Strategy())
			}
		}
		for _, s := range []comm.Strategy{comm.TwoShot, comm.NCCLOnly, comm.OwnKernels} {
			require.NoError(t, errors.Join(all(func(i int, g *comm.Group) error {
				if err := g.Use(testgpu.Context(t), s); err != nil {
					return err
				}
				return conform(testgpu.Context(t), g)
			})...))
			require.Equal(t, s, gs[2].Strategy())
		}
		// One that does not come is waited for until the context ends.
		ctx, cancel := context.WithCancelCause(t.Context())
		late := errors.New("it does not come")
		go func() { // when rank 0 has issued what it waits for
			for gs[0].Communicator(0).Progress().Issued.Record == gs[1].Communicator(0).Progress().Issued.Record {
				runtime.Gosched()
			}
			cancel(late)
		}()
		require.ErrorIs(t, gs[0].Use(ctx, comm.NCCLOnly), late)
		require.Equal(t, comm.OwnKernels, gs[0].Strategy())
	})
}

var fewPoints = &comm.TuneConfig{MaxBytes: 1024, Types: []memory.DType{memory.Float32, memory.Int64}, Ops: []comm.Op{comm.Sum}}

// TestTune measures, writes, and goes by what was written.
func TestTune(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		file := filepath.Join(t.TempDir(), "tuning.json")
		t.Setenv(env.TuningFile.Name, file)
		at := siteOf(t, devs)
		require.NoError(t, (&comm.Tuning{For: at}).Save(t.Context(), file))
		g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned})
		tuning, err := comm.Tune(testgpu.Context(t), g, fewPoints)
		require.NoError(t, err)
		require.Equal(t, at, tuning.For)
		require.Equal(t, comm.Tuned, g.Strategy())
		have := map[string]int{}
		for _, c := range tuning.Choices {
			have[c.Operation]++
			require.True(t, slices.IsSortedFunc(c.Times, func(a, b comm.Timing) int { return int(a.Micros*1e3) - int(b.Micros*1e3) }), "%+v", c)
			if devs[0].System().Backend() == "cuda" {
				require.Positive(t, c.Times[0].Micros)
			}
			var all []comm.Strategy
			for _, x := range c.Times {
				all = append(all, x.Strategy)
			}
			slices.Sort(all)
			want := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels}
			if c.Operation == "all-reduce" {
				want = []comm.Strategy{comm.NCCLOnly, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines}
			}
			if (c.Type == "float32" || c.Operation == "all-gather") && (c.Operation == "all-reduce" || c.Bytes%8 == 0) {
				want = append(want, comm.Windows)
			}
			require.Equal(t, want, all, "%+v", c)
		}
		require.Equal(t, map[string]int{"all-reduce": 28, "all-gather": 14, "reduce-scatter": 28, "broadcast": 14, "all-to-all": 14}, have)
		require.NoError(t, conform(testgpu.Context(t), g))

		// Copy engines are for what is large.
		large, err := comm.TunePlan(g, &comm.TuneConfig{MaxBytes: 1 << 20, Types: fewPoints.Types, Ops: fewPoints.Ops})
		require.NoError(t, err)
		for _, c := range large {
			has := slices.ContainsFunc(c.Times, func(x comm.Timing) bool { return x.Strategy == comm.CopyEngines })
			require.Equal(t, c.Bytes >= 256<<10 && (c.Operation == "all-gather" || c.Operation == "all-to-all"), has, "%+v", c)
		}

		// What another group reads is the same.
		require.NoError(t, tuning.Save(t.Context(), file))
		again, err := comm.LoadTuning(file, at)
		require.NoError(t, err)
		require.NoError(t, tuning.Check())
		require.Equal(t, tuning, again)
		h := groupBy(t, devs, comm.Config{Strategy: comm.Tuned})
		for _, kind := range []nccl.CollectiveKind{nccl.AllReduceKind, nccl.AllGatherKind, nccl.AllToAllKind} {
			for count := 1; count < 400; count++ {
				x := nccl.Collective{Kind: kind, DType: memory.Float32, Count: count}
				require.Equal(t, g.Choice(0, x), h.Choice(1, x))
			}
		}
	})
}

// TestTuneOnFirstUse lets the first group of a site measure for the others.
func TestTuneOnFirstUse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "new", "tuning.json")
	t.Setenv(env.TuningFile.Name, file)
	t.Setenv(env.CommStrategy.Name, "tuned")
	for _, n := range []int{2, 3} {
		g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n}))
		require.Equal(t, comm.Tuned, g.Strategy())
		at, err := g.Site()
		require.NoError(t, err)
		require.Equal(t, n, at.Ranks)
		tuning, err := comm.LoadTuning(file, at)
		require.NoError(t, err)
		require.NotEmpty(t, tuning.Choices)
	}
	was, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, 2, strings.Count(string(was), `"gpu"`), "one beside the other")
	local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	is, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, string(was), string(is), "times would differ")
}

// TestTuningsAtOnce saves tunings for many places in one file at the same time.
func TestTuningsAtOnce(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	tuning := anyTuning(siteOf(t, devs), rand.New(rand.NewPCG(1, 1)))
	tuning.Choices = tuning.Choices[:2]
	var wg sync.WaitGroup
	for ranks := range 20 {
		wg.Go(func() {
			one := *tuning
			one.For.Ranks = ranks
			require.NoError(t, one.Save(t.Context(), file))
		})
	}
	wg.Wait()
	at := tuning.For
	for at.Ranks = range 20 {
		one, err := comm.LoadTuning(file, at)
		require.NoError(t, err)
		require.NotNil(t, one, "for %d ranks", at.Ranks)
	}
	entries, err := os.ReadDir(filepath.Dir(file))
	require.NoError(t, err)
	require.Len(t, entries, 1)
}

// TestTuningWhereAnotherWrites waits for another process no longer than ctx lets it.
func TestTuningWhereAnotherWrites(t *testing.T) {
	file := filepath.Join(t.TempDir(), "tuning.json")
	folder, err := os.Open(filepath.Dir(file))
	require.NoError(t, err)
	defer folder.Close()
	require.NoError(t, syscall.Flock(int(folder.Fd()), syscall.LOCK_EX))
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("enough")
	cancel(enough)
	require.ErrorIs(t, comm.CanSave(ctx, file), enough)
	require.ErrorIs(t, (&comm.Tuning{}).Save(ctx, file), enough)
	require.NoFileExists(t, file)
	require.NoError(t, syscall.Flock(int(folder.Fd()), syscall.LOCK_UN))
	require.NoError(t, (&comm.Tuning{}).Save(t.Context(), file))
}

// TestTuneWhereNothingCanBeWritten goes by what was measured, on all ranks.
func TestTuneWhereNothingCanBeWritten(t *testing.T) {
	const nowhere = "/proc/nowhere/tuning.json"
	t.Setenv(env.TuningFile.Name, nowhere)
	require.ErrorContains(t, comm.CanSave(t.Context(), nowhere), "write the tuning")
	t.Setenv(env.CommStrategy.Name, "tuned")
	gs, errs := join(t, t.Context(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	require.NoError(t, errors.Join(errs...))
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() { errs[i] = errors.Join(conform(testgpu.Context(t), g), g.Shutdown(testgpu.Context(t))) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

// TestTuningOfRankZero gives ranks different tunings, of which rank 0's counts.
func TestTuningOfRankZero(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	at := siteOf(t, devs)
	at.Locals = 1
	gs, errs := make([]*comm.Group, 3), make([]error, 3)
	tunings := make([]*comm.Tuning, 3)
	var wg sync.WaitGroup
	for i, b := range boards(t.Context(), 3) {
		tunings[i] = anyTuning(at, rand.New(rand.NewPCG(5, uint64(i))))
		wg.Go(func() {
			gs[i], errs[i] = comm.JoinWith(testgpu.Context(t), b, devs[i], &comm.Config{Strategy: comm.Tuned, Tuning: tunings[i]})
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	differ := 0
	for bytes := 4; bytes < 1<<17; bytes = bytes*5/4 + 4 - bytes*5/4%4 {
		x := nccl.Collective{Kind: nccl.AllReduceKind, DType: memory.Float32, Count: bytes / 4}
		require.Equal(t, gs[0].Choice(0, x), gs[1].Choice(0, x))
		require.Equal(t, gs[0].Choice(0, x), gs[2].Choice(0, x))
		if gs[0].Choice(0, x) != comm.NCCLOnly {
			differ++
		}
	}
	require.Greater(t, differ, 10)
	for i, g := range gs {
		wg.Go(func() { errs[i] = errors.Join(conform(testgpu.Context(t), g), g.Shutdown(testgpu.Context(t))) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

// TestTuningsThatAreRefused gives groups files that are wrong or out of date.
func TestTuningsThatAreRefused(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	at := siteOf(t, devs)
	folder := t.TempDir()
	good := filepath.Join(folder, "good.json")
	tuning := anyTuning(at, rand.New(rand.NewPCG(1, 1)))
	require.NoError(t, tuning.Save(t.Context(), good))
	data, err := os.ReadFile(good)
	require.NoError(t, err)
	kind := tuning.Choices[0].Operation
	tuning.Choices[0].Operation = "bogus" // after it was read
	require.ErrorContains(t, tuning.Save(t.Context(), good), `there is no operation "bogus"`)
	tuning.Choices[0].Operation = kind
	swap := func(old, new string) string {
		text := strings.Replace(string(data), old, new, 1)
		require.NotEqual(t, string(data), text, old)
		return text
	}
	files := map[string][2]string{
		"nothing in it":       {"", "EOF"},
		"cut":                 {string(data[:len(data)/2]), "unexpected EOF"},
		"two":                 {string(data) + "{}", "there is more behind its end"},
		"a bracket behind":    {string(data) + "}", "there is more behind its end"},
		"no strategy":         {swap(`"strategy": "own",`, ""), "by environment"},
		"of another form":     {swap(`"form": 2`, `"form": 1`), "it is of form 1, and this Chorus knows form 2"},
		"of a later form":     {`{"form": 3, "leaves": []}`, "it is of form 3, and this Chorus knows form 2: remove it and measure anew with chorus tune"},
		"null":                {`{"form": 2, "tunings": [null]}`, "null"},
		"unknown field":       {swap(`"gpu"`, `"gpus"`), "gpus"},
		"unknown operation":   {swap(`"all-gather"`, `"all-gather-v"`), `there is no operation "all-gather-v"`},
		"unknown type":        {swap(`"float32"`, `"float33"`), `"float33"`},
		"unknown reduction":   {swap(`"redop": "sum"`, `"redop": "diff"`), `"diff"`},
		"unknown strategy":    {swap(`"strategy": "own"`, `"strategy": "magic"`), "magic"},
		"itself":              {swap(`"strategy": "own"`, `"strategy": "tuned"`), "tuned"},
		"no bytes":            {swap(`"bytes": 4`, `"bytes": 0`), "of 0 bytes"},
		"not fastest first":   {swap(`"us": 1`, `"us": 7`), "want the fastest first"},
		"less than no time":   {swap(`"us": 0`, `"us": -1`), "-1"},
		"other NCCL":          {swap(`"nccl": "2.28.3"`, `"nccl": "2.27.3"`), "out of date: it was measured with NCCL 2.27.3, here 2.28.3: measure anew with chorus tune"},
		"other driver":        {swap(at.Driver, "CUDA 11.0"), "with driver CUDA 11.0, here " + at.Driver},
		"other hosts, untold": {swap(`"hosts": 1,`, ""), "out of date: it was measured with number of hosts 0, here 1: measure anew with chorus tune"},
		"other own kernels":   {swap(at.Kernels, "abc"), "with own kernels abc, here " + at.Kernels},
		"with nothing timed":  {`{"form": 2, "tunings": [{"for": {}, "choices": [{"operation": "broadcast", "bytes": 1, "times": []}]}]}`, "broadcast of 1 bytes has no times"},
		"eager of others":     {swap(`"strategy": "own",`, `"strategy": "own", "eager_us": 3,`), "has eager_us 3 of own: want a time, of copy-engines only"},
		"less than no eager":  {`{"form": 2, "tunings": [{"for": {}, "choices": [{"operation": "all-gather", "bytes": 1, "times": [{"strategy": "copy-engines", "us": 0, "eager_us": -1}]}]}]}`, "has eager_us -1 of copy-engines"},
	}
	t.Setenv(env.CommStrategy.Name, "tuned")
	for _, name := range slices.Sorted(maps.Keys(files)) {
		path := filepath.Join(folder, "bad.json")
		require.NoError(t, os.WriteFile(path, []byte(files[name][0]), 0o644))
		t.Setenv(env.TuningFile.Name, path)
		_, err := comm.Local(testgpu.Context(t), devs...)
		require.ErrorContains(t, err, path, name)
		require.ErrorContains(t, err, files[name][1], name)
		if strings.HasPrefix(name, "other") {
			continue // for another place, that of one rank a process, it is not
		}
		require.Error(t, tuning.Save(t.Context(), path), "it would be lost")
		gs, errs := join(t, t.Context(), devs)
		for i := range gs {
			require.True(t, gs[i] == nil, name)
			require.ErrorContains(t, errs[i], files[name][1], name)
		}
	}
	pipe := filepath.Join(folder, "pipe")
	require.NoError(t, syscall.Mkfifo(pipe, 0o600))
	huge := filepath.Join(folder, "huge")
	require.NoError(t, os.WriteFile(huge, nil, 0o600))
	require.NoError(t, os.Truncate(huge, 1<<30))
	for path, text := range map[string]string{folder: "is no regular file", pipe: "is no regular file", "/dev/zero": "is no regular file", huge: "has 1073741824 bytes"} {
		t.Setenv(env.TuningFile.Name, path)
		_, err = comm.Local(testgpu.Context(t), devs...)
		require.ErrorContains(t, err, text)
	}
	for _, c := range []struct {
		tuning comm.Tuning
		text   string
	}{
		{comm.Tuning{Choices: tuning.Choices}, "the tuning given does not hold: it was measured with GPU , here"},
		{comm.Tuning{For: at, Choices: []comm.Choice{{Operation: "sum"}}}, `there is no operation "sum"`},
	} {
		_, err = comm.LocalWith(testgpu.Context(t), &comm.Config{Strategy: comm.Tuned, Tuning: &c.tuning}, devs...)
		require.ErrorContains(t, err, c.text)
	}
	// What no group could read is not written.
	require.ErrorContains(t, (&comm.Tuning{Choices: []comm.Choice{{Operation: "sum"}}}).Save(t.Context(), good), `there is no operation "sum"`)
	// One for another place is no hindrance, and is kept.
	t.Setenv(env.TuningFile.Name, good)
	other := *tuning
	other.For.GPU = "another"
	require.NoError(t, other.Save(t.Context(), good))
	g := groupBy(t, devs, comm.Config{})
	require.Equal(t, comm.Tuned, g.Strategy())
	for _, elsewhere := range []func(*comm.Site){
		func(at *comm.Site) { at.Locals = 1 }, func(at *comm.Site) { at.Backend = "cuda" }, func(at *comm.Site) { at.Ranks = 3 }, func(at *comm.Site) { at.Hosts = 2 },
	} {
		place := at
		elsewhere(&place)
		none, err := comm.LoadTuning(good, place)
		require.NoError(t, err, "%+v", place)
		require.Nil(t, none, "%+v", place)
	}
	kept, err := comm.LoadTuning(good, other.For)
	require.NoError(t, err)
	require.Len(t, kept.Choices, len(tuning.Choices))
	// A file that does not tell of hosts gets one that does.
	untold := filepath.Join(folder, "untold.json")
	require.NoError(t, os.WriteFile(untold, []byte(swap(`"hosts": 1,`, "")), 0o644))
	_, err = comm.LoadTuning(untold, at)
	require.ErrorContains(t, err, "out of date")
	require.NoError(t, tuning.Save(t.Context(), untold))
	kept, err = comm.LoadTuning(untold, at)
	require.NoError(t, err)
	require.Equal(t, at, kept.For)
}

// A farBoard is the rendezvous of a rank on another host than this process is on: what it
// says of its own is said of that one.
type farBoard struct {
	*board
	host string
}

func (b farBoard) Set(ctx context.Context, key string, value []byte) error {
	return b.board.Set(ctx, key, bytes.ReplaceAll(value, []byte(fabric.Host()), []byte(b.host)))
}

// TestSitesOfSeveralHosts joins ranks of three hosts, and groups of some of them: a tuning
// for one number of hosts is not for another, and all ranks know the number.
func TestSitesOfSeveralHosts(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4})
	hosts := []string{fabric.Host(), "here", "there", "here"}
	t.Setenv(env.TuningFile.Name, filepath.Join(t.TempDir(), "tuning.json"))
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i, b := range boards(t.Context(), 4) {
		wg.Go(func() {
			errs[i] = func() error {
				ctx := testgpu.Context(t)
				g, err := comm.JoinWith(ctx, farBoard{b, hosts[i]}, devs[i], &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}})
				if err != nil {
					return err
				}
				defer g.Close()
				if slices.Contains(g.Strategies(), comm.OwnKernels) {
					return errors.New("own kernels have several hosts")
				}
				if at, err := g.Site(); err != nil || at.Hosts != 3 {
					return fmt.Errorf("all are at %+v: %w", at, err)
				}
				for _, c := range []struct {
					hosts int
					ranks []int
				}{{1, []int{1, 3}}, {2, []int{3, 2}}, {3, []int{2, 1, 0}}} {
					sub, err := g.Sub(ctx, c.ranks...)
					if err != nil {
						return err
					}
					if sub == nil {
						continue
					}
					if at, err := sub.Site(); err != nil || at.Hosts != c.hosts || at.Ranks != len(c.ranks) {
						return fmt.Errorf("%v are at %+v: %w", c.ranks, at, err)
					}
					if err := sub.Shutdown(ctx); err != nil {
						return err
					}
				}
				return g.Shutdown(ctx)
			}()
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

// TestSetTuning changes what a group goes by.
func TestSetTuning(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}})
		x := nccl.Collective{Kind: nccl.AllReduceKind, DType: memory.Int32, Count: 1}
		require.Equal(t, comm.NCCLOnly, g.Chosen(x))
		tuning := &comm.Tuning{For: siteOf(t, devs), Choices: []comm.Choice{{
			Operation: "all-reduce", Type: "int32", Reduction: "sum", Bytes: 4, Times: []comm.Timing{{Strategy: comm.OneShot}}}}}
		require.NoError(t, comm.SetTuning(ctx, g, tuning))
		require.Equal(t, comm.OneShot, g.Chosen(x))
		require.NoError(t, comm.SetTuning(ctx, g, nil))
		require.Equal(t, comm.NCCLOnly, g.Chosen(x))
		require.ErrorContains(t, comm.SetTuning(ctx, local(t, devs), tuning), "the group has the strategies [nccl]: make it with Tuned")
		tuning.For.Ranks = 9
		require.ErrorContains(t, comm.SetTuning(ctx, g, tuning), "it was measured with number of ranks 9, here 2")
		require.ErrorIs(t, comm.SetTuning(ctx, g, nil), device.ErrClosed)
	})
}

func TestTunePlanRefuses(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: siteOf(t, devs)}})
	for text, cfg := range map[string]comm.TuneConfig{
		"MaxBytes is 7":            {MaxBytes: 7},
		"MaxBytes is -1":           {MaxBytes: -1},
		"type bool":                {Types: []memory.DType{memory.Bool}},
		"type invalid":             {Types: []memory.DType{memory.Invalid}},
		"there is no reduction op": {Ops: []comm.Op{17}},
	} {
		_, err := comm.Tune(testgpu.Context(t), g, &cfg)
		require.ErrorContains(t, err, text)
		require.ErrorIs(t, err, comm.ErrMismatch)
	}
	require.ErrorContains(t, nccl.Group(g.Communicator(0), func() error {
		_, err := comm.Tune(testgpu.Context(t), g, fewPoints)
		return err
	}), "tune")
	_, err := comm.Tune(testgpu.Context(t), groupBy(t, devs, comm.Config{Strategy: comm.OwnKernels}), fewPoints)
	require.ErrorContains(t, err, "the group was made with the strategy own: make it with tuned")
	plain := local(t, devs)
	tuning, err := comm.Tune(testgpu.Context(t), plain, fewPoints)
	require.NoError(t, err)
	require.Empty(t, tuning.Choices, "there is no choice")
	require.NoError(t, g.Close())
	_, err = comm.Tune(testgpu.Context(t), g, nil)
	require.ErrorIs(t, err, device.ErrClosed)
}

// TestTunePlansThatDiffer gives ranks different things to measure.
func TestTunePlansThatDiffer(t *testing.T) {
	gs, errs := make([]*comm.Group, 2), make([]error, 2)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	var wg sync.WaitGroup
	for i, b := range boards(t.Context(), 2) {
		wg.Go(func() {
			gs[i], errs[i] = comm.JoinWith(testgpu.Context(t), b, devs[i], &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}})
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
	for i, g := range gs {
		wg.Go(func() { _, errs[i] = comm.Tune(testgpu.Context(t), g, &comm.TuneConfig{MaxBytes: 64 << i}) })
	}
	wg.Wait()
	for i, g := range gs {
		require.ErrorContains(t, errs[i], "rank 1 is to measure other things than rank 0")
		wg.Go(func() { errs[i] = errors.Join(conform(testgpu.Context(t), g), g.Shutdown(testgpu.Context(t))) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...), "the group is as before")
}

// TestMeasuringLeavesTheStrategy measures every strategy, and copy engines after the others:
// what is issued then goes by the strategy that was in use.
func TestMeasuringLeavesTheStrategy(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}})
		large := &comm.TuneConfig{MaxBytes: 256 << 10, Types: fewPoints.Types, Ops: fewPoints.Ops}
		all, err := comm.TunePlan(g, large)
		require.NoError(t, err)
		few := slices.DeleteFunc(all, func(c comm.Choice) bool { return c.Operation != "all-gather" || c.Bytes != large.MaxBytes })
		require.Len(t, few, 1)
		require.Equal(t, comm.CopyEngines, few[0].Times[len(few[0].Times)-1].Strategy)
		x := nccl.Collective{Kind: nccl.AllGatherKind, DType: memory.Float32, Count: 64, Together: true}
		for s, want := range map[comm.Strategy]comm.Strategy{comm.NCCLOnly: comm.NCCLOnly, comm.OwnKernels: comm.OwnKernels, comm.Tuned: comm.NCCLOnly} {
			require.NoError(t, g.Use(testgpu.Context(t), s))
			require.NoError(t, g.Measure(testgpu.Context(t), few))
			engines := few[0].Times[len(few[0].Times)-1]
			require.Positive(t, engines.Micros)
			require.Positive(t, engines.Eager)
			require.Equal(t, s, g.Strategy())
			for i := range devs {
				require.Equal(t, want, g.Choice(i, x), "%s on rank %d", s, i)
			}
		}
	})
}

// TestTuneFails has an operation fail while it is measured.
func TestTuneFails(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclAlltoAll#*=ncclInternalError"})
	g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: siteOf(t, devs)}})
	_, err := comm.Tune(testgpu.Context(t), g, fewPoints)
	require.ErrorIs(t, err, comm.ErrBroken)
	// One rank may be at another operation when it hears of the other's.
	require.Regexp(t, `tune: [a-z-]+ of \d+ bytes by [a-z-]+ on rank \d.*ncclAlltoAll on rank \d of 2`, err.Error())
}
