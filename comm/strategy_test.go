package comm_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/groups"
	"github.com/gochorus/chorus/internal/ranks"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// routed enqueues the operations that fn adds to a batch with the group's strategy, as comm's
// functions do, but of any ranks.
func routed(g *comm.Group, fn func(b *nccl.Batch) error) error {
	b := groups.Of(g).NewBatch()
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
		every := []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.OneShot, comm.TwoShotPackets, comm.TwoShot, comm.TwoShotLines, comm.Windows, comm.CopyEngines, comm.Tuned}
		require.Equal(t, every, g.Strategies())
		small := ranks.Collective{Kind: flight.AllReduce, DType: memory.Float32, Count: 8}
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
			`rank 0 has the strategy "nccl" and rank 2 the strategy "one-shot"`: {comm.NCCLOnly, comm.NCCLOnly, comm.OneShot},
			`rank 0 has the strategy "nccl" and rank 1 the strategy "fastest"`:  {comm.NCCLOnly, "fastest", comm.NCCLOnly},
			`rank 0 has the strategy "windows" and rank 1 the strategy "nccl"`:  {comm.Windows, comm.NCCLOnly, comm.OneShot},
			"the group has no strategy windows: it has [nccl own one-":          {comm.Windows, comm.Windows, comm.Windows},
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
