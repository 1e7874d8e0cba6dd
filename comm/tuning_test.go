package comm_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

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
	every := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines, comm.Pipelined, comm.Windows, comm.CopyEngines}
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
			want := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels}
			if c.Operation == "all-reduce" {
				want = []comm.Strategy{comm.NCCLOnly, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines}
			}
			if (c.Type == "float32" || c.Operation == "all-gather") && (c.Operation == "all-reduce" || c.Bytes%8 == 0) {
				want = append(want, comm.Windows)
			}
			require.ElementsMatch(t, want, all, "%+v", c)
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
		require.Equal(t, tuning, again)
		h := groupBy(t, devs, comm.Config{Strategy: comm.Tuned})
		for _, kind := range []collective.Kind{collective.AllReduce, collective.AllGather, collective.AllToAll} {
			for count := 1; count < 400; count++ {
				x := collective.Op{Call: collective.Call{Request: collective.Request{Kind: kind, DType: memory.Float32, N: count}}}
				require.Equal(t, g.Choice(0, x), h.Choice(1, x))
			}
		}
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
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	gs, errs := joinBy(t, devs, func(_ int, b *exchange) (comm.Rendezvous, *comm.Config) {
		return b, &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}}
	})
	require.NoError(t, errors.Join(errs...))
	for _, err := range atOnce(2, func(i int) error {
		return second(comm.Tune(testgpu.Context(t), gs[i], &comm.TuneConfig{MaxBytes: 64 << i}))
	}) {
		require.ErrorContains(t, err, "comm: tune: rank 0 has the options {MaxBytes:64 ")
		require.ErrorContains(t, err, "and rank 1 the options {MaxBytes:128 ")
	}
	groups.Each(t, gs, func(_ int, g *comm.Group) error {
		return errors.Join(conform(testgpu.Context(t), g), g.Shutdown(testgpu.Context(t)))
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

// routed enqueues the operations that fn adds to a batch with the group's strategy, as comm's
// functions do, but of any ranks.
func routed(g *comm.Group, fn func(b *nccl.Batch) error) error {
	b := route.GroupOf(g).NewBatch()
	if err := fn(b.Batch); err != nil {
		return err
	}
	return b.Enqueue()
}

// alone enqueues one operation of local rank i with the group's strategy.
func alone(g *comm.Group, i int, issue func(on nccl.Issuer) error) error {
	return routed(g, func(b *nccl.Batch) error { return issue(b.On(g.Communicator(i))) })
}

// reduceAlone enqueues an all-reduce of local rank i with the group's strategy.
func reduceAlone(g *comm.Group, i int, x memory.Slice[float32], op nccl.Op) error {
	return alone(g, i, func(on nccl.Issuer) error { return nccl.AllReduce(on, g.Stream(i), x, x, op) })
}

// groupBy makes a group with a strategy.
func groupBy(t *testing.T, devs []*device.Device, cfg comm.Config) *comm.Group {
	t.Helper()
	g, err := comm.Local(testgpu.Context(t), devs, &cfg)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, g.Close()) })
	return g
}

// TestStrategiesConform checks all collectives by each strategy, and by tunings that
// mix them.
func TestStrategiesConform(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	comm.SetPushedBytes(t, 1)
	for _, s := range []comm.Strategy{comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines, comm.Pipelined, comm.Windows, comm.CopyEngines, comm.Tuned} {
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
					if s == comm.Tuned && env.ShareGPUs.Value() == "yes" {
						t.Skip("a tuning measures times, which mean nothing on a shared GPU")
					}
					testgpu.Ranks(t, 2)
				}
				file := filepath.Join(t.TempDir(), "of", "tuning.json")
				code, out, _ := job(t, backend, "conform", 2, env.CommStrategy.Name+"="+string(s), env.TuningFile.Name+"="+file)
				require.Zero(t, code, out)
				_, err := os.Stat(file)
				require.Equal(t, s == comm.Tuned, err == nil, "the first group measures and writes")
			})
		}
	}
}

// TestUse changes the strategy between operations.
func TestUse(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{For: siteOf(t, devs)}})
		every := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines, comm.Pipelined, comm.Windows, comm.CopyEngines, comm.Tuned}
		require.Equal(t, every, g.Strategies())
		small := collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllReduce, DType: memory.Float32, N: 8}}}
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
		require.ErrorIs(t, g.Use(testgpu.Context(t), ""), comm.ErrMismatch)
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		require.EqualError(t, g.Use(gone, comm.OwnKernels), "comm: use: context canceled")
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
		gs := joined(t, t.Context(), devs[:3])
		for text, wanted := range map[string][]comm.Strategy{
			`rank 0 has the strategy "nccl" and rank 2 the strategy "one-shot"`: {comm.NCCLOnly, comm.NCCLOnly, comm.OneShot},
			`rank 0 has the strategy "nccl" and rank 1 the strategy "fastest"`:  {comm.NCCLOnly, "fastest", comm.NCCLOnly},
			`rank 0 has the strategy "windows" and rank 1 the strategy "nccl"`:  {comm.Windows, comm.NCCLOnly, comm.OneShot},
			"the group has no strategy windows: it has [nccl own one-":          {comm.Windows, comm.Windows, comm.Windows},
		} {
			for _, err := range atOnce(3, func(i int) error { return gs[i].Use(testgpu.Context(t), wanted[i]) }) {
				require.ErrorIs(t, err, comm.ErrMismatch)
				require.ErrorContains(t, err, text)
			}
			for _, g := range gs {
				require.Equal(t, comm.OwnKernels, g.Strategy())
			}
		}
		for _, s := range []comm.Strategy{comm.TwoShot, comm.NCCLOnly, comm.OwnKernels} {
			groups.Each(t, gs, func(_ int, g *comm.Group) error {
				return errors.Join(g.Use(testgpu.Context(t), s), conform(testgpu.Context(t), g))
			})
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

var orderSeed = flag.Uint64("orderseed", 0, "the seed of the tests of deterministic reductions; 0 is a random one")

// newOrderSeed returns the seed of a test.
func newOrderSeed(t *testing.T) uint64 {
	seed := *orderSeed
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-orderseed %d", seed)
	return seed
}

// orderRun checks reductions of n elements by an operation.
type orderRun func(ctx context.Context, g *comm.Group, op comm.Op, n int, seed uint64) error

func orderRunOf[T memory.Element, A orderNumber](kit orderKit[T, A]) orderRun {
	return func(ctx context.Context, g *comm.Group, op comm.Op, n int, seed uint64) error {
		return runOrder(ctx, g, kit, op, n, seed)
	}
}

func sameOf[T any](x T) T { return x }

// orderTypes are all types that NCCL reduces.
var orderTypes = []orderRun{
	orderRunOf(orderFloats(sameOf[float32], sameOf[float32])),
	orderRunOf(orderFloats(memory.BFloat16Bits.Float32, memory.BFloat16Of)),
	orderRunOf(orderFloats(memory.Float16Bits.Float32, memory.Float16Of)),
	orderRunOf(orderFloats(sameOf[float64], sameOf[float64])),
	orderRunOf(orderFloats(memory.Float8E4M3Bits.Float32, memory.Float8E4M3Of)),
	orderRunOf(orderFloats(memory.Float8E5M2Bits.Float32, memory.Float8E5M2Of)),
	orderRunOf(orderInts[int8]()), orderRunOf(orderInts[uint8]()), orderRunOf(orderInts[int32]()),
	orderRunOf(orderInts[uint32]()), orderRunOf(orderInts[int64]()), orderRunOf(orderInts[uint64]()),
}

var orderOps = []comm.Op{comm.Sum, comm.Avg, comm.Prod, comm.Max, comm.Min}

// orderCases checks random types, operations and lengths, and the whole group of a strategy.
func orderCases(ctx context.Context, g *comm.Group, cases, longest int, seed uint64) error {
	r := rand.New(rand.NewPCG(seed, 7))
	every := g.Strategies()
	for i := range cases {
		if err := g.Use(ctx, every[r.IntN(len(every))]); err != nil {
			return err
		}
		n := 1 + r.IntN(1<<r.IntN(8))
		if i%3 == 0 {
			n = 1 + r.IntN(longest)
		}
		run := orderTypes[i%4]
		if r.IntN(2) == 0 {
			run = orderTypes[r.IntN(len(orderTypes))]
		}
		op := comm.Sum
		if r.IntN(2) == 0 {
			op = orderOps[r.IntN(len(orderOps))]
		}
		if err := run(ctx, g, op, n, r.Uint64()); err != nil {
			return err
		}
	}
	return nil
}

// tunedInOrder makes a deterministic group with all strategies and a random tuning.
func tunedInOrder(t *testing.T, devs []*device.Device, block int, seed uint64) *comm.Group {
	site := siteOf(t, devs)
	site.Kernels += ", deterministic"
	tuning := anyTuning(site, rand.New(rand.NewPCG(seed, 1)))
	return groupBy(t, devs, comm.Config{Deterministic: &comm.Order{Block: block}, Strategy: comm.Tuned, Tuning: tuning})
}

// TestDeterministic compares the bits of all reductions with a model that combines the ranks in
// the documented order: random types, operations, lengths, divisions into calls and strategies,
// eager, in batches and in graphs.
func TestDeterministic(t *testing.T) {
	seed := newOrderSeed(t)
	turns := testgpu.TurnsRaced(t, 4)
	for n := 2; n <= 8; n++ {
		for i, block := range []int{0, 1, 2, 3} {
			if block >= n || !turns(n, i) {
				continue
			}
			t.Run(fmt.Sprintf("virtual/%d/blocks of %d", n, block), func(t *testing.T) {
				defer comm.SetOrderedBytes(16 << 10)()
				defer comm.SetStaged(n%2 == 0)()
				comm.SetOwnBytes(t, 2<<10, 1<<10)
				devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: n})
				g := tunedInOrder(t, devs, block, seed)
				require.NoError(t, orderCases(testgpu.Context(t), g, testgpu.Rounds(testhost.Rounds(3, 6), 200), 4000, seed))
			})
		}
	}
	for _, block := range []int{0, 1} {
		t.Run(fmt.Sprint("cuda/blocks of ", block), func(t *testing.T) {
			defer comm.SetOrderedBytes(1 << 20)()
			devs := testgpu.CUDA(t, 2)
			g := tunedInOrder(t, devs, block, seed)
			require.NoError(t, orderCases(testgpu.Context(t), g, testgpu.Rounds(60, 1000), 1<<20, seed))
		})
	}
}

// TestDeterministicLarge checks lengths that need several rounds of the default memory, and several
// pieces of Chorus kernels.
func TestDeterministicLarge(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
			g := groupBy(t, devs, comm.Config{Deterministic: &comm.Order{}, Strategy: s})
			n := testgpu.Rounds(1<<16, 100_000_000) + 3
			require.NoError(t, orderTypes[1](testgpu.Context(t), g, comm.Sum, n, newOrderSeed(t)))
		}
	})
}

// TestDeterministicInPieces checks that Chorus kernels execute long all-reduces in several pieces, with
// the bits of the order.
func TestDeterministicInPieces(t *testing.T) {
	defer comm.SetOrderedBytes(64 << 10)()
	comm.SetOwnBytes(t, 8, 8) // longer operations have pieces
	seed := newOrderSeed(t)
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{Deterministic: &comm.Order{}, Strategy: comm.OwnKernels})
		x := &orderCase[memory.BFloat16Bits, float32]{
			ctx: testgpu.Context(t), g: g, kit: orderFloats(memory.BFloat16Bits.Float32, memory.BFloat16Of), op: comm.Avg, rng: rand.New(rand.NewPCG(seed, 5)),
		}
		require.NoError(t, x.make(3*(32<<10)+1001))
		require.NoError(t, x.whole())
		requireLastService(t, g, collective.Kernels)
		require.NoError(t, x.graph())
		require.NoError(t, g.Use(x.ctx, comm.NCCLOnly))
		require.NoError(t, x.whole())
		requireLastService(t, g, collective.Ordered)
		require.NoError(t, errors.Join(x.src.Close(), x.dst.Close()))
	})
}

// TestDeterministicManyOperations checks a batch with more operations than a stream holds, which
// share one memory.
func TestDeterministicManyOperations(t *testing.T) {
	const n, ops = 40, 1500
	defer comm.SetOrderedBytes(1 << 10)()
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{Deterministic: &comm.Order{}})
		xs, err := comm.Make[int64](g, n*ops)
		require.NoError(t, err)
		defer xs.Close()
		in, want := make([]int64, n*ops), make([]int64, n*ops)
		for k := range in {
			in[k], want[k] = int64(k), int64(k*len(devs))
		}
		for i, x := range xs {
			require.NoError(t, x.CopyFrom(g.Stream(i), in))
		}
		require.NoError(t, g.Batch(func(b *comm.Batch) (err error) {
			for k := range ops {
				part := make(comm.Shards[int64], len(xs))
				for i, x := range xs {
					part[i] = x.Slice(k*n, (k+1)*n)
				}
				err = errors.Join(err, comm.AllReduce(b, comm.Sum, part...))
			}
			return err
		}))
		require.NoError(t, g.Wait(testgpu.Context(t)))
		for i, x := range xs {
			got := make([]int64, n*ops)
			require.NoError(t, x.CopyTo(g.Stream(i), got))
			require.True(t, slices.Equal(want, got), "rank %d", i)
		}
	})
}

// TestDeterministicJoined checks groups of one rank in each of several groups, as of processes.
func TestDeterministicJoined(t *testing.T) {
	defer comm.SetOrderedBytes(16 << 10)()
	seed := newOrderSeed(t)
	t.Run("virtual", func(t *testing.T) {
		joinInOrder(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}), seed)
	})
	t.Run("cuda", func(t *testing.T) { joinInOrder(t, testgpu.CUDA(t, 2), seed) })
}

// joinInOrder checks groups of one rank for each device.
func joinInOrder(t *testing.T, devs []*device.Device, seed uint64) {
	for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
		lists := slices.Collect(slices.Chunk(devs, 1))
		errs := joinDevices(t, lists, &comm.Config{Deterministic: &comm.Order{}, Strategy: s}, func(ctx context.Context, g *comm.Group) error {
			return orderCases(ctx, g, 8, 4000, seed)
		})
		require.NoError(t, errors.Join(errs...))
	}
}

// TestDeterministicEndsWithItsRanks closes one rank, which has not issued an operation: the wait of
// the other one ends with an error.
func TestDeterministicEndsWithItsRanks(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		gs, errs := joinBy(t, devs, func(_ int, b *exchange) (comm.Rendezvous, *comm.Config) {
			return b, &comm.Config{Deterministic: &comm.Order{}}
		})
		require.NoError(t, errors.Join(errs...))
		groups.Each(t, gs, func(_ int, g *comm.Group) error { return conformAllReduce(ctx, g, 1<<20) }) // NCCL connects the ranks at their first operation
		if devs[0].System().Backend() == "cuda" {                                                       // NCCL's kernel does not see that a rank is gone
			require.NoError(t, gs[0].SetTimeout(shortTimeout))
		}
		xs, err := comm.Make[float32](gs[0], 1<<20)
		require.NoError(t, err)
		require.NoError(t, comm.AllReduce(gs[0], comm.Sum, xs...))
		require.NoError(t, gs[1].Close())
		require.ErrorIs(t, gs[0].Wait(ctx), comm.ErrBroken)
		require.ErrorIs(t, comm.AllReduce(gs[0], comm.Sum, xs...), comm.ErrBroken)
		require.NoError(t, xs.Close())
		require.NoError(t, gs[0].Close())
	})
}

// orderSeedVar is the seed of the workers of TestDeterministicProcesses.
const orderSeedVar = "COMM_TEST_ORDER_SEED"

// orderWorker checks deterministic reductions in a worker process.
func orderWorker(ctx context.Context, r *cluster.Session) error {
	seed, err := strconv.ParseUint(os.Getenv(orderSeedVar), 10, 64)
	if err != nil {
		return err
	}
	dev, err := openLocal(r.LocalRank(), r.LocalSize())
	if err != nil {
		return err
	}
	defer comm.SetOrderedBytes(16 << 10)()
	g, err := comm.Join(ctx, r, dev, &comm.Config{Deterministic: &comm.Order{Block: 2}})
	if err != nil {
		return err
	}
	return errors.Join(orderCases(ctx, g, 10, 4000, seed), g.Shutdown(ctx))
}

// TestDeterministicProcesses checks several processes. With CHORUS_SHARE_GPUS=yes they may share
// a GPU.
func TestDeterministicProcesses(t *testing.T) {
	seed := newOrderSeed(t)
	for _, backend := range []string{"virtual", "cuda"} {
		t.Run(backend, func(t *testing.T) {
			ranks := 3
			if backend == "cuda" {
				if ranks = 2; env.ShareGPUs.Value() == "yes" {
					ranks = 4
				}
				testgpu.Ranks(t, ranks)
			}
			code, out, _ := job(t, backend, "order", ranks, fmt.Sprint(orderSeedVar, "=", seed))
			require.Zero(t, code, out)
		})
	}
}

// TestDeterministicMixedBatch checks a batch of reductions and other collectives.
func TestDeterministicMixedBatch(t *testing.T) {
	const n = 1000
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := groupBy(t, devs, comm.Config{Deterministic: &comm.Order{}})
		size, ctx := g.Size(), testgpu.Context(t)
		sums, err := having(g, always(n), element)
		require.NoError(t, err)
		src, err := having(g, always(n), element)
		require.NoError(t, err)
		defer src.Close()
		all, err := having(g, always(n*size), wrong)
		require.NoError(t, err)
		copies, err := having(g, always(n), element)
		require.NoError(t, err)
		require.NoError(t, g.Batch(func(b *comm.Batch) error {
			return errors.Join(comm.AllGather(b, all, src), comm.AllReduce(b, comm.Sum, sums...), comm.BroadcastFrom(b, 1, copies...))
		}))
		require.NoError(t, expect(ctx, g, "all-reduce", sums, always(n), func(_, i int) float32 { return sumOf(g, i) }))
		require.NoError(t, expect(ctx, g, "all-gather", all, always(n*size), func(_, i int) float32 { return element(i/n, i%n) }))
		require.NoError(t, expect(ctx, g, "broadcast", copies, always(n), func(_, i int) float32 { return element(1, i) }))
		for _, xs := range []comm.Shards[float32]{sums, all, copies} {
			require.NoError(t, xs.Close())
		}
	})
}

// TestBlocksWithinHosts checks when ranks reduce within their hosts first.
func TestBlocksWithinHosts(t *testing.T) {
	for _, x := range []struct {
		hosts []int
		block int
		want  bool
	}{
		{nil, 2, false}, {[]int{0, 0, 0, 0}, 2, false}, {[]int{0, 0, 1, 1}, 2, true}, {[]int{0, 0, 1, 1}, 0, false},
		{[]int{0, 0, 1, 1}, 1, true}, {[]int{0, 0, 0, 1, 1, 1}, 2, false}, {[]int{0, 1, 0, 1}, 2, false}, {[]int{0, 0, 0, 0, 1, 1}, 2, true},
	} {
		require.Equal(t, x.want, comm.BlocksWithinHosts(x.hosts, x.block), "%+v", x)
	}
}

// TestDeterministicOption checks the option: ranks with different orders are refused, groups of
// Split inherit the order, and Strategy is as without it.
func TestDeterministicOption(t *testing.T) {
	ctx := testgpu.Context(t)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4})
	_, err := comm.Local(ctx, devs, &comm.Config{Deterministic: &comm.Order{Block: -1}})
	require.ErrorIs(t, err, comm.ErrMismatch)
	require.ErrorContains(t, err, "Deterministic.Block is -1")
	g := groupBy(t, devs, comm.Config{Deterministic: &comm.Order{}})
	require.Equal(t, comm.NCCLOnly, g.Strategy())
	require.Equal(t, []comm.Strategy{comm.NCCLOnly}, g.Strategies())
	require.NoError(t, conform(ctx, g), "other collectives are as without the option")
	halves, err := g.Split(ctx, []int{0, 1, 0, 1}, nil)
	require.NoError(t, err)
	for _, half := range halves[:2] {
		require.NoError(t, orderCases(ctx, half, 4, 1000, newOrderSeed(t)))
		require.NoError(t, half.Close())
	}
	_, errs := joinBy(t, devs[:2], func(i int, b *exchange) (comm.Rendezvous, *comm.Config) {
		return b, &comm.Config{Deterministic: &comm.Order{Block: i}, NCCL: &nccl.Config{Timeout: time.Minute}}
	})
	for _, err := range errs {
		require.ErrorContains(t, err, "the order of deterministic reductions is blocks of 0 ranks on rank 0 and blocks of 1 ranks on rank 1")
	}
}

// TestDeterministicOnRequest checks groups in which only some batches are deterministic.
func TestDeterministicOnRequest(t *testing.T) {
	defer comm.SetOrderedBytes(16 << 10)()
	seed := newOrderSeed(t)
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g := groupBy(t, devs, comm.Config{Deterministic: &comm.Order{OnRequest: true}})
		x := &orderCase[float32, float32]{ctx: ctx, g: g, kit: orderFloats(sameOf[float32], sameOf[float32]), op: comm.Sum, rng: rand.New(rand.NewPCG(seed, 3))}
		require.NoError(t, x.make(5000))
		require.NoError(t, x.batch())
		requireLastService(t, g, collective.Ordered)
		xs, err := having(g, always(1000), element)
		require.NoError(t, err)
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		requireLastService(t, g, collective.NCCL)
		require.NoError(t, g.Batch(func(b *comm.Batch) error { return comm.AllReduce(b, comm.Sum, xs...) }))
		requireLastService(t, g, collective.NCCL) // a batch that is used again forgets the request
		require.NoError(t, g.Wait(ctx))
		require.NoError(t, errors.Join(xs.Close(), x.src.Close(), x.dst.Close()))

		usual := groupBy(t, devs, comm.Config{})
		err = usual.Batch(func(b *comm.Batch) error { _ = b.SetDeterministic(); return nil })
		require.ErrorIs(t, err, comm.ErrMismatch)
		require.ErrorContains(t, err, "OnRequest: true")
	})
}

// requireLastService checks which backend executed the last collective of each local rank.
func requireLastService(t *testing.T, g *comm.Group, want collective.Service) {
	t.Helper()
	for i := range g.Locals() {
		_, list := collective.Of(g.Communicator(i)).Services(1)
		require.Equal(t, []collective.Service{want}, list, "local rank %d", i)
	}
}
