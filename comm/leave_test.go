package comm_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// The others see that a rank has left, and not that it was lost. They begin another world at once, and their streams go on
// behind the aborted work of the broken group.
func TestRankThatLeaves(t *testing.T) {
	ctx := testgpu.Context(t)
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	silent := cluster.Timing{Heartbeat: 50 * time.Millisecond, LostAfter: 20 * time.Second}
	reg, err := cluster.Serve(ctx, &cluster.RegistryConfig{Addr: "127.0.0.1:0", Secret: []byte("a secret of 32 bytes for testing"), Timing: silent, Notify: func(string) {}})
	require.NoError(t, err)
	defer reg.Close()
	names := []string{"a", "b", "c"}
	members := make([]*cluster.Enlistment, len(names))
	for i, name := range names {
		members[i], err = cluster.Enlist(ctx, &cluster.EnlistConfig{Addr: reg.Addr(), Name: name, Secret: []byte("a secret of 32 bytes for testing"), Timing: silent})
		require.NoError(t, err)
		defer members[i].Close()
	}
	world := func(n int) (sessions []*cluster.Session, gs []*comm.Group) {
		sessions, gs = make([]*cluster.Session, n), make([]*comm.Group, n)
		require.NoError(t, reg.Begin(names[:n]...))
		require.NoError(t, errors.Join(atOnce(n, func(i int) (err error) {
			if sessions[i], err = members[i].World(ctx); err == nil {
				gs[i], err = comm.Join(ctx, sessions[i], devs[i], nil)
			}
			return err
		})...))
		return sessions, gs
	}
	sessions, gs := world(3)
	streams, xs := make([]*stream.Stream, 3), make([]memory.Slice[float32], 3)

	for i, g := range gs {
		streams[i] = streamtest.NewStream(t, devs[i])
		xs[i], err = memory.MakeFrom(streams[i], []float32{1, 2})
		require.NoError(t, err)
		defer xs[i].Close()
		require.NoError(t, g.Stream(0).WaitStream(streams[i]))
	}
	reduce := func(gs []*comm.Group) { // the ranks connect to each other by the first one
		groups.Each(t, gs, func(i int, g *comm.Group) error { return comm.AllReduce(g, comm.Sum, xs[i]) })
	}
	reduce(gs)
	for _, g := range gs {
		require.NoError(t, g.Wait(ctx))
	}
	reduce(gs[:2])
	require.NoError(t, errors.Join(gs[2].Close(), sessions[2].Close(), members[2].Close()))
	for i := range 2 {
		err := gs[i].Wait(ctx)
		require.ErrorIs(t, err, comm.ErrBroken)
		require.ErrorIs(t, err, comm.ErrLeft)
		require.ErrorContains(t, err, "rank 2 ")
		require.NoError(t, sessions[i].Context().Err(), "no member of the world is lost")
		require.NoError(t, streams[i].WaitStream(gs[i].Stream(0)))
		require.NoError(t, gs[i].Close())
		require.NoError(t, sessions[i].Close())
		require.NoError(t, xs[i].CopyFrom(streams[i], []float32{3, 4}))
	}
	sessions, gs = world(2)
	for i, g := range gs {
		require.NoError(t, g.Stream(0).WaitStream(streams[i]))
	}
	reduce(gs)
	for i, g := range gs {
		got := make([]float32, 2)
		require.NoError(t, xs[i].CopyTo(g.Stream(0), got))
		require.Equal(t, []float32{6, 8}, got)
	}
	for i, g := range gs {
		require.NoError(t, errors.Join(streams[i].WaitStream(g.Stream(0)), g.Close(), sessions[i].Close()))
	}
}

// A slowExchange needs a time for each value that its rank sets, and overwrites values, as the store of a job does.
type slowExchange struct {
	*testgpu.Exchange
	delay *atomic.Int64
}

func (b slowExchange) Set(ctx context.Context, key string, value []byte) error {
	select {
	case <-time.After(time.Duration(b.delay.Load())):
		_, _ = b.Delete(ctx, key) // which cannot fail
		return b.Exchange.Set(ctx, key, value)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// The others see that a rank has left, also if a busy store takes parts of a second for each of its last words.
func TestRankLeavesWithASlowStore(t *testing.T) {
	t.Setenv(env.CommStrategy.Name, "nccl")
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
		var delay atomic.Int64
		gs, errs := joinBy(t, devs, func(_ int, b *exchange) (comm.Rendezvous, *comm.Config) { return slowExchange{b, &delay}, nil })
		require.NoError(t, errors.Join(errs...))
		xs := make([]comm.Shards[float32], 2)
		for i, g := range gs {
			xs[i], _ = shards(t, g, 8)
		}
		groups.Each(t, gs, func(i int, g *comm.Group) error { return comm.AllReduce(g, comm.Sum, xs[i]...) }) // connects the ranks
		require.NoError(t, comm.AllReduce(gs[0], comm.Sum, xs[0]...))
		delay.Store(int64(300 * time.Millisecond))
		require.NoError(t, gs[1].Close())
		err := gs[0].Wait(testgpu.Context(t))
		require.ErrorIs(t, err, comm.ErrLeft)
		require.ErrorContains(t, err, "rank 1 ")
		require.NoError(t, gs[0].Close())
	})
}

// A stuckExchange is the exchange of a rank that hears of the others' agreement to shut down only after a delay.
type stuckExchange struct {
	slowExchange
	stuck time.Duration
}

func (b stuckExchange) Get(ctx context.Context, key string) ([]byte, error) {
	v, err := b.slowExchange.Get(ctx, key)
	if strings.HasSuffix(key, "leave/answer") {
		time.Sleep(b.stuck)
	}
	return v, err
}

// joinThree returns a group of three ranks that have connected to each other. stuck is the delay of rank 1.
func joinThree(t *testing.T, devs []*device.Device, stuck time.Duration) []*comm.Group {
	t.Helper()
	gs, errs := joinBy(t, devs, func(i int, b *exchange) (comm.Rendezvous, *comm.Config) {
		slow := slowExchange{b, new(atomic.Int64)}
		if i == 1 {
			return &stuckExchange{slow, stuck}, nil
		}
		return &slow, nil
	})
	require.NoError(t, errors.Join(errs...))
	groups.Each(t, gs, func(i int, g *comm.Group) error { return conformAllReduce(testgpu.Context(t), g, 8) })
	return gs
}

// If the ctx of a Shutdown ends, the rank leaves as by Close: all errors of the other ranks name it, also the first one, and also
// those of a Shutdown that waits already.
func TestShutdownThatGivesUp(t *testing.T) {
	t.Setenv(env.CommStrategy.Name, "nccl")
	for _, quits := range []int{0, 1} {
		t.Run(fmt.Sprint("rank ", quits), func(t *testing.T) {
			streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 3}, func(t *testing.T, devs []*device.Device) {
				gs := joinThree(t, devs, 0)
				waits := 1 - quits
				var quit, waited error
				var after time.Duration
				var wg sync.WaitGroup
				wg.Go(func() {
					ctx, cancel := context.WithTimeout(testgpu.Context(t), time.Second)
					defer cancel()
					quit = gs[quits].Shutdown(ctx)
				})
				wg.Go(func() {
					begun := time.Now()
					waited = gs[waits].Shutdown(testgpu.Context(t))
					after = time.Since(begun)
				})
				time.Sleep(3 * time.Second)
				first := gs[2].Err()
				wg.Wait()
				require.ErrorIs(t, quit, context.DeadlineExceeded)
				require.Less(t, after, 3*time.Second)
				for _, err := range []error{first, waited, gs[2].Shutdown(testgpu.Context(t))} {
					require.ErrorIs(t, err, comm.ErrBroken)
					require.ErrorIs(t, err, comm.ErrLeft)
					require.ErrorContains(t, err, fmt.Sprintf("rank %d ", quits))
				}
			})
		})
	}
}

// A lateStore writes a key only when the ctx of the write ends, and then fails as a call of a store does.
type lateStore struct {
	*exchange
	late string
}

func (s lateStore) Set(ctx context.Context, key string, value []byte) error {
	if strings.HasSuffix(key, s.late) {
		<-ctx.Done()
		return fmt.Errorf("set %q: %w", key, ctx.Err())
	}
	return s.exchange.Set(ctx, key, value)
}

// If another rank leaves while a Shutdown writes to the store, the error names that rank, and not only the call that ended.
func TestShutdownNamesTheRankThatLeaves(t *testing.T) {
	t.Setenv(env.CommStrategy.Name, "nccl")
	for _, late := range []string{"leave/0", "leave/answer"} {
		t.Run(late, func(t *testing.T) {
			streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
				gs, errs := make([]*comm.Group, 2), make([]error, 2)
				var wg sync.WaitGroup
				for i, b := range exchanges(testgpu.Context(t), 2) {
					wg.Go(func() { gs[i], errs[i] = comm.Join(testgpu.Context(t), lateStore{b, late}, devs[i], nil) })
				}
				wg.Wait()
				require.NoError(t, errors.Join(errs...))
				wg.Go(func() { errs[0] = gs[0].Shutdown(testgpu.Context(t)) })
				time.Sleep(time.Second)
				errs[1] = gs[1].Close()
				wg.Wait()
				require.NoError(t, errs[1])
				require.ErrorIs(t, errs[0], comm.ErrLeft)
				require.ErrorContains(t, errs[0], "rank 1 closed the group")
			})
		})
	}
}

// That is so too if the ctx ends when all ranks have agreed to shut down and a rank does not go on.
func TestShutdownThatGivesUpAfterTheAgreement(t *testing.T) {
	t.Setenv(env.CommStrategy.Name, "nccl")
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 3}, func(t *testing.T, devs []*device.Device) {
		gs := joinThree(t, devs, 5*time.Second)
		errs := atOnce(3, func(i int) error {
			ctx := testgpu.Context(t)
			if i == 0 {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, time.Second)
				defer cancel()
			}
			return gs[i].Shutdown(ctx)
		})
		require.ErrorIs(t, errs[0], context.DeadlineExceeded)
		require.ErrorIs(t, errs[1], comm.ErrBroken)
		require.ErrorIs(t, errs[1], comm.ErrLeft)
		require.ErrorContains(t, errs[1], "rank 0 ")
		require.NoError(t, errs[2], "it had left before")
	})
}

// A Close while another goroutine issues operations is the reason of their errors: the group has not broken.
func TestCloseDuringOperations(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3})
	for _, strategy := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels} {
		for name, issue := range map[string]func(g *comm.Group, dst, src comm.Shards[float32]) error{
			"all-reduce": func(g *comm.Group, _, src comm.Shards[float32]) error { return comm.AllReduce(g, comm.Sum, src...) },
			"all-to-all": func(g *comm.Group, dst, src comm.Shards[float32]) error { return comm.AllToAll(g, dst, src) },
			"quantized": func(g *comm.Group, _, src comm.Shards[float32]) error {
				return comm.AllReduceQuantized(g, comm.Sum, src, nil)
			},
			"norm": func(g *comm.Group, dst, src comm.Shards[float32]) error {
				part := func(x comm.Shards[float32], from, to int) (list comm.Shards[float32]) {
					for i := range x {
						list = append(list, x[i].Slice(from, to))
					}
					return list
				}
				return comm.AllReduceNorm(g, part(dst, 0, 1000), part(dst, 1000, 2000), part(src, 0, 1000), part(src, 1000, 1100), nil)
			},
			"batch": func(g *comm.Group, dst, src comm.Shards[float32]) error {
				return g.Batch(func(b *comm.Batch) error {
					return errors.Join(comm.AllReduce(b, comm.Sum, dst...), comm.AllReduce(b, comm.Sum, src...))
				})
			},
		} {
			t.Run(fmt.Sprint(strategy, " ", name), func(t *testing.T) {
				for round := range 12 {
					g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{Strategy: strategy})
					require.NoError(t, err)
					dst, err := comm.Make[float32](g, 3000)
					require.NoError(t, err)
					src, err := comm.Make[float32](g, 3000)
					require.NoError(t, err)
					begun := make(chan struct{})
					ended := make(chan error)
					go func() {
						err := issue(g, dst, src)
						close(begun)
						for err == nil {
							err = issue(g, dst, src)
						}
						ended <- err
					}()
					<-begun
					time.Sleep(time.Duration(round) * 150 * time.Microsecond)
					require.NoError(t, g.Close())
					for _, err := range []error{<-ended, g.Err()} {
						require.ErrorIs(t, err, device.ErrClosed)
						require.NotErrorIs(t, err, comm.ErrBroken)
					}
					require.NoError(t, errors.Join(dst.Close(), src.Close()))
				}
			})
		}
	}
}
