package ddp_test

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// Ranks of several processes whose gradients or parameters differ are all told so, and go on
// with others.
func TestBucketsThatDiffer(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gs, errs := join(t, testgpu.Context(t), devs[:2])
		require.NoError(t, errs[0])
		require.NoError(t, errs[1])
		both := func(make func(i int, g *comm.Group) error) []error {
			var wg sync.WaitGroup
			for i, g := range gs {
				wg.Go(func() { errs[i] = make(i, g) })
			}
			wg.Wait()
			return errs
		}
		reducer := func(cfg *ddp.ReducerConfig, lens ...int) func(g *comm.Group) error {
			return func(g *comm.Group) error {
				flat, grads, err := memory.MakeFlat[float32](g.Stream(0), lens...)
				if err != nil {
					return err
				}
				defer flat.Close()
				r, err := ddp.NewReducer(g, [][]memory.Slice[float32]{grads}, cfg)
				if err != nil {
					return err
				}
				return r.Close()
			}
		}
		sharder := func(cfg *ddp.ShardConfig, lens ...int) func(g *comm.Group) error {
			return func(g *comm.Group) error {
				sh, err := ddp.NewSharder[float32](g, lens, cfg)
				if err != nil {
					return err
				}
				return sh.Close()
			}
		}
		units := func(cfg *ddp.UnitsConfig, lens ...[]int) func(g *comm.Group) error {
			return func(g *comm.Group) error {
				u, err := ddp.NewUnits[float32, memory.BFloat16Bits](g, lens, cfg)
				if err != nil {
					return err
				}
				return u.Close()
			}
		}
		for _, c := range []struct {
			make [2]func(g *comm.Group) error
			want [2]string // of each rank
		}{
			{[2]func(*comm.Group) error{reducer(nil, 4, 6), reducer(nil, 4, 7)}, [2]string{"new reducer: gradient 1 has 6 elements on rank 0 and 7 on rank 1: give the same on all ranks", "gradient 1 has 6 elements on rank 0 and 7 on rank 1"}},
			{[2]func(*comm.Group) error{reducer(nil, 4, 6), reducer(nil, 6, 4)}, [2]string{"gradient 0 has 4 elements on rank 0 and 6 on rank 1", "gradient 0 has 4 elements on rank 0 and 6 on rank 1"}},
			{[2]func(*comm.Group) error{reducer(nil, 4), reducer(&ddp.ReducerConfig{FindUnused: true}, 4)}, [2]string{"unused ones false", "unused ones true"}},
			{[2]func(*comm.Group) error{reducer(nil, 4), reducer(&ddp.ReducerConfig{Op: new(comm.Sum)}, 4)}, [2]string{"by avg", "by sum"}},
			{[2]func(*comm.Group) error{reducer(nil, 4), reducer(nil)}, [2]string{"rank 1 has given something wrong: ddp: new reducer: 1 lists of gradients", "want one list with at least one gradient"}},
			{[2]func(*comm.Group) error{sharder(nil, 4, 6), sharder(nil, 4)}, [2]string{"new sharder: rank 0 has given 2 parameters", "and rank 1 1 parameters"}},
			{[2]func(*comm.Group) error{sharder(&ddp.ShardConfig{BucketBytes: -1}, 4), sharder(nil, 4)}, [2]string{"buckets of 0 and -1 bytes", "rank 0 has given something wrong"}},
			{[2]func(*comm.Group) error{units(nil, []int{4, 6}, []int{1}), units(nil, []int{4}, []int{6, 1})}, [2]string{"new units: rank 0 has given units of [2 1] parameters", "and rank 1 units of [1 2] parameters"}},
			{[2]func(*comm.Group) error{units(nil, []int{4, 6}), units(nil, []int{4, 7})}, [2]string{"parameter 1 has 6 elements on rank 0 and 7 on rank 1", "parameter 1 has 6 elements"}},
			{[2]func(*comm.Group) error{units(nil, []int{4}), units(&ddp.UnitsConfig{Prefetch: new(2)}, []int{4})}, [2]string{"with a prefetch of 1", "with a prefetch of 2"}},
			{[2]func(*comm.Group) error{units(nil, []int{4}), units(&ddp.UnitsConfig{Reduce: memory.Float32}, []int{4})}, [2]string{"reduced in bfloat16 by avg", "reduced in float32 by avg"}},
		} {
			for i, err := range both(func(i int, g *comm.Group) error { return c.make[i](g) }) {
				require.ErrorContains(t, err, c.want[i])
				if strings.HasPrefix(c.want[i], "want ") || strings.HasPrefix(c.want[i], "buckets of ") {
					require.NotContains(t, err.Error(), "has given", "its own mistake is all that a rank is told")
				}
			}
		}
		for _, err := range both(func(_ int, g *comm.Group) error { return reducer(nil, 4, 6)(g) }) {
			require.NoError(t, err, "the groups are as good as before")
		}
	})
}

// A rank that closes its group when it has made a mistake does not end the comparison of the others.
func TestMistakesReachAllRanks(t *testing.T) {
	for range 20 {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
		for rank, err := range processes(t, devs, func(g *comm.Group) error {
			lens := []int{4, 6}
			if g.Rank() == 1 {
				lens = []int{-1}
			}
			_, err := ddp.NewSharder[float32](g, lens, nil)
			return errors.Join(err, g.Close())
		}) {
			require.ErrorContains(t, err, []string{"rank 1 has given something wrong: ddp: new sharder", "none negative"}[rank])
		}
	}
}
