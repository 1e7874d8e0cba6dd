package comm_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/route"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/memory"
)

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

// TestTuneWhereNothingCanBeWritten goes by what was measured, on all ranks.
func TestTuneWhereNothingCanBeWritten(t *testing.T) {
	const nowhere = "/proc/nowhere/tuning.json"
	t.Setenv(env.TuningFile.Name, nowhere)
	require.ErrorContains(t, route.CanSave(t.Context(), nowhere), "write the tuning")
	t.Setenv(env.CommStrategy.Name, "tuned")
	gs := joined(t, t.Context(), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	groups.Each(t, gs, func(i int, g *comm.Group) error {
		return errors.Join(conform(testgpu.Context(t), g), g.Shutdown(testgpu.Context(t)))
	})
}

// TestTuningOfRankZero gives ranks different tunings, of which rank 0's counts.
func TestTuningOfRankZero(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	at := siteOf(t, devs)
	at.Locals = 1
	gs, errs := joinBy(t, devs, func(i int, b *exchange) (comm.Rendezvous, *comm.Config) {
		return b, &comm.Config{Strategy: comm.Tuned, Tuning: anyTuning(at, rand.New(rand.NewPCG(5, uint64(i))))}
	})
	require.NoError(t, errors.Join(errs...))
	differ := 0
	for bytes := 4; bytes < 1<<17; bytes = bytes*5/4 + 4 - bytes*5/4%4 {
		x := collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllReduce, DType: memory.Float32, N: bytes / 4}}}
		require.Equal(t, gs[0].Choice(0, x), gs[1].Choice(0, x))
		require.Equal(t, gs[0].Choice(0, x), gs[2].Choice(0, x))
		if gs[0].Choice(0, x) != comm.NCCLOnly {
			differ++
		}
	}
	require.Greater(t, differ, 10)
	groups.Each(t, gs, func(i int, g *comm.Group) error {
		return errors.Join(conform(testgpu.Context(t), g), g.Shutdown(testgpu.Context(t)))
	})
}

// A farExchange is the rendezvous of a rank on another host than this process is on: what it
// says of its own is said of that one.
type farExchange struct {
	*exchange
	host string
}

func (b farExchange) Set(ctx context.Context, key string, value []byte) error {
	return b.exchange.Set(ctx, key, bytes.ReplaceAll(value, []byte(fabric.Host()), []byte(b.host)))
}

// TestSitesOfSeveralHosts joins ranks of three hosts, and groups of some of them: a tuning
// for one number of hosts is not for another, and all ranks know the number.
func TestSitesOfSeveralHosts(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 4})
	hosts := []string{fabric.Host(), "here", "there", "here"}
	t.Setenv(env.TuningFile.Name, filepath.Join(t.TempDir(), "tuning.json"))
	ctx := testgpu.Context(t)
	gs, errs := joinBy(t, devs, func(i int, b *exchange) (comm.Rendezvous, *comm.Config) {
		return farExchange{b, hosts[i]}, &comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}}
	})
	require.NoError(t, errors.Join(errs...))
	groups.Each(t, gs, func(i int, g *comm.Group) error {
		if slices.Contains(g.Strategies(), comm.OwnKernels) {
			return errors.New("own kernels have several hosts")
		}
		if at, err := g.Site(); err != nil || at.Hosts != 3 {
			return fmt.Errorf("all are at %+v: %w", at, err)
		}
		for n, ranks := range [][]int{{1, 3}, {3, 2}, {2, 1, 0}} { // of one host, two and three
			sub, err := g.Sub(ctx, ranks...)
			if err != nil {
				return err
			}
			if sub == nil {
				continue
			}
			if at, err := sub.Site(); err != nil || at.Hosts != n+1 || at.Ranks != len(ranks) {
				return fmt.Errorf("%v are at %+v: %w", ranks, at, err)
			}
			if err := sub.Shutdown(ctx); err != nil {
				return err
			}
		}
		return g.Shutdown(ctx)
	})
}

// TestSetTuning changes what a group goes by.
func TestSetTuning(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx := testgpu.Context(t)
		g := groupBy(t, devs, comm.Config{Strategy: comm.Tuned, Tuning: &comm.Tuning{}})
		x := collective.Op{Call: collective.Call{Request: collective.Request{Kind: collective.AllReduce, DType: memory.Int32, N: 1}}}
		require.Equal(t, comm.NCCLOnly, g.Chosen(x))
		tuning := &comm.Tuning{For: siteOf(t, devs), Choices: []comm.Choice{{
			Operation: "all-reduce", Type: "int32", Reduction: "sum", Bytes: 4, Times: []comm.Timing{{Strategy: comm.OneShot}}}}}
		require.NoError(t, comm.SetTuning(ctx, g, tuning))
		require.Equal(t, comm.OneShot, g.Chosen(x))
		require.NoError(t, comm.SetTuning(ctx, g, &comm.Tuning{}))
		require.Equal(t, comm.NCCLOnly, g.Chosen(x))
		file := filepath.Join(t.TempDir(), "tuning.json")
		t.Setenv(env.TuningFile.Name, file)
		require.NoError(t, tuning.Save(ctx, file))
		require.NoError(t, comm.SetTuning(ctx, g, nil))
		require.Equal(t, comm.OneShot, g.Chosen(x), "from the file")
		require.NoError(t, os.Remove(file))
		require.NoError(t, comm.SetTuning(ctx, g, nil))
		require.Equal(t, comm.NCCLOnly, g.Chosen(x), "there is no file")
		require.ErrorContains(t, comm.SetTuning(ctx, local(t, devs), tuning), "the group has the strategies [nccl]: make it with Tuned")
		tuning.For.Ranks = 9
		require.ErrorContains(t, comm.SetTuning(ctx, g, tuning), "it was measured with number of ranks 9, here 2")
		require.ErrorIs(t, comm.SetTuning(ctx, g, nil), device.ErrClosed)
	})
}
