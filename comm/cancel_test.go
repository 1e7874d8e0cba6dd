package comm_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

var errCancelled = errors.New("cancelled by the test")

// soonCancelled returns a context that is cancelled after a random time.
func soonCancelled(ctx context.Context, c *rand.Rand, most time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	end := time.AfterFunc(time.Duration(c.Int64N(int64(most))), func() { cancel(errCancelled) })
	return ctx, func() { end.Stop(); cancel(nil) }
}

// requireNoneLeft waits until the devices have no memory in use.
func requireNoneLeft(t *testing.T, devs []*device.Device) {
	t.Helper()
	for _, d := range devs {
		require.Eventually(t, func() bool {
			n, err := memory.Allocated(d)
			return err == nil && n == 0
		}, time.Minute, time.Millisecond, "memory of %s", d)
	}
}

// requireSums has a group work.
func requireSums(t *testing.T, g *comm.Group) {
	t.Helper()
	xs, hs := shards(t, g, 1<<10)
	require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
	require.Equal(t, total(hs), read(t, g, 0, xs[0]))
	require.NoError(t, xs.Close())
}

// A context that ends while a group is made leaves no memory, and disturbs no later group on the devices.
func TestLocalIsCancelledAtAnyTime(t *testing.T) {
	for _, s := range []comm.Strategy{"nccl", "own", "copy-engines", "windows"} {
		t.Run(string(s), func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
			c := rand.New(rand.NewPCG(1, uint64(len(s))))
			ended := 0
			for k := range 100 {
				ctx, cancel := soonCancelled(testgpu.Context(t), c, 25*time.Millisecond)
				g, err := comm.Local(ctx, devs, &comm.Config{Strategy: s})
				cancel()
				if err == nil {
					require.NoError(t, g.Close())
				} else {
					ended++
					require.ErrorIs(t, err, errCancelled)
				}
				if k%10 == 9 {
					g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{Strategy: s})
					require.NoError(t, err)
					requireSums(t, g)
					require.NoError(t, g.Close())
				}
			}
			require.NotZero(t, ended)
			requireNoneLeft(t, devs)
		})
	}
}

// The same for experts, after which the group goes on.
func TestExpertsAreCancelledAtAnyTime(t *testing.T) {
	for _, s := range []comm.Strategy{"nccl", "own"} {
		t.Run(string(s), func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
			g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{Strategy: s})
			require.NoError(t, err)
			c := rand.New(rand.NewPCG(2, uint64(len(s))))
			cfg := &comm.ExpertsConfig{DType: memory.Float32, Experts: 3, TopK: 1, Hidden: 256, MaxTokens: 100}
			ended := 0
			for range 200 {
				ctx, cancel := soonCancelled(testgpu.Context(t), c, 2*time.Millisecond)
				e, err := comm.NewExperts(ctx, g, cfg)
				cancel()
				if err == nil {
					require.NoError(t, e.Close())
				} else {
					ended++
					require.ErrorIs(t, err, errCancelled)
				}
			}
			require.NotZero(t, ended)
			e, err := comm.NewExperts(testgpu.Context(t), g, cfg)
			require.NoError(t, err)
			require.NoError(t, e.Close())
			requireSums(t, g)
			require.NoError(t, g.Close())
			requireNoneLeft(t, devs)
		})
	}
}

// Each rank of Join may be cancelled at a time of its own.
func TestJoinIsCancelledAtAnyTime(t *testing.T) {
	for _, s := range []comm.Strategy{"nccl", "own", "copy-engines", "windows"} {
		t.Run(string(s), func(t *testing.T) {
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
			seed := uint64(len(s))
			join := func(each func(rank int) (context.Context, context.CancelFunc)) []error {
				bs := exchanges(t.Context(), len(devs))
				return atOnce(len(devs), func(i int) error {
					ctx, cancel := each(i)
					defer cancel()
					g, err := comm.Join(ctx, bs[i], devs[i], &comm.Config{Strategy: s})
					return errors.Join(err, g.Close())
				})
			}
			cs := []*rand.Rand{rand.New(rand.NewPCG(3, seed)), rand.New(rand.NewPCG(4, seed))}
			ended := 0
			for range 50 {
				errs := join(func(rank int) (context.Context, context.CancelFunc) {
					return soonCancelled(testgpu.Context(t), cs[rank], 30*time.Millisecond)
				})
				if errors.Join(errs...) != nil {
					ended++
				}
				for _, d := range devs {
					require.NoError(t, d.Err())
				}
			}
			require.NotZero(t, ended)
			errs := join(func(int) (context.Context, context.CancelFunc) { return context.WithCancel(testgpu.Context(t)) })
			require.NoError(t, errors.Join(errs...))
			requireNoneLeft(t, devs)
		})
	}
}
