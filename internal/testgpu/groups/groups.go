// Package groups makes groups of ranks for tests, with memory that has known contents.
package groups

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// Local returns a group with a rank on each device. The end of the test closes it.
func Local(t testing.TB, devs []*device.Device) *comm.Group {
	t.Helper()
	g, err := comm.Local(testgpu.Context(t), devs, nil)
	check(t, err)
	t.Cleanup(func() { check(t, g.Close()) })
	return g
}

// Join returns a group of one rank for each device, as if each rank were a process. It closes
// the groups at the end of the test.
func Join(t testing.TB, ctx context.Context, devs []*device.Device) ([]*comm.Group, []error) {
	t.Helper()
	gs, errs := make([]*comm.Group, len(devs)), make([]error, len(devs))
	var wg sync.WaitGroup
	for i, b := range testgpu.Exchanges(ctx, len(devs)) {
		wg.Go(func() { gs[i], errs[i] = comm.Join(testgpu.Context(t), b, devs[i], nil) })
	}
	wg.Wait()
	t.Cleanup(func() {
		for _, g := range gs {
			wg.Go(func() { _ = g.Close() })
		}
		wg.Wait()
	})
	return gs, errs
}

// Each runs f for each group at once, because the first operations of the ranks wait for each other.
func Each(t testing.TB, gs []*comm.Group, f func(i int, g *comm.Group) error) {
	t.Helper()
	errs := make([]error, len(gs))
	var wg sync.WaitGroup
	for i, g := range gs {
		wg.Go(func() { errs[i] = f(i, g) })
	}
	wg.Wait()
	check(t, errors.Join(errs...))
}

// Shards returns n small whole numbers on each local rank, whose sums are exact. It also
// returns them.
func Shards(t testing.TB, g *comm.Group, n int) (comm.Shards[float32], [][]float32) {
	t.Helper()
	r := rand.New(rand.NewPCG(11, uint64(n)))
	xs, err := comm.Make[float32](g, n)
	check(t, err)
	t.Cleanup(func() { check(t, xs.Close()) })
	values := make([][]float32, len(xs))
	for i, x := range xs {
		values[i] = make([]float32, n)
		for k := range values[i] {
			values[i][k] = float32(r.IntN(2001) - 1000)
		}
		check(t, x.CopyFrom(g.Stream(i), values[i]))
	}
	return xs, values
}

// Read returns the contents of memory of local rank i.
func Read(t testing.TB, g *comm.Group, i int, x memory.Slice[float32]) []float32 {
	t.Helper()
	out := make([]float32, x.Len())
	check(t, x.CopyTo(g.Stream(i), out))
	return out
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
