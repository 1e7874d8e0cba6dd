package comm_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/tensor"
)

var local, join, shards, read = groups.Local, groups.Join, groups.Shards, groups.Read

func total(hs [][]float32) []float32 {
	s := make([]float32, len(hs[0]))
	for _, h := range hs {
		for k, v := range h {
			s[k] += v
		}
	}
	return s
}

func TestMismatches(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		xs, hs := shards(t, g, 8)
		for _, err := range []error{
			comm.AllReduce(g, comm.Sum, xs[0]),
			comm.AllReduce(g, comm.Sum, xs[0], xs[1].Slice(0, 4)),
			comm.AllReduce(g, comm.Sum, xs[1], xs[0]),
			comm.BroadcastFrom(g, 0, xs[0], xs[0]),
		} {
			require.ErrorIs(t, err, comm.ErrMismatch)
		}
		require.ErrorContains(t, comm.BroadcastFrom(g, 5, xs...), "rank 5 does not exist")
		require.ErrorContains(t, comm.AllGather(g, xs, xs), "want 16")
		require.NoError(t, g.Err(), "a wrong argument does not break the group")
		require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
		require.Equal(t, total(hs), read(t, g, 0, xs[0]))

		_, err := comm.Local(testgpu.Context(t), []*device.Device{devs[0], devs[0]}, nil)
		require.ErrorContains(t, err, "ranks 0 and 1 are both on")
		require.NoError(t, g.Close())
		require.NoError(t, g.Close())
		require.ErrorIs(t, comm.AllReduce(g, comm.Sum, xs...), device.ErrClosed)
		require.NoError(t, (*comm.Group)(nil).Close())
	})
}

// Errors of arguments match ErrMismatch, also of those that only package nccl compares, and in batches. Errors that are
// not about arguments do not.
func TestErrorsOfArgumentsMatch(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	xs, _ := shards(t, g, 8)
	wide, _ := shards(t, g, 16)
	shorts, err := comm.Make[int16](g, 8)
	require.NoError(t, err)
	defer func() { require.NoError(t, shorts.Close()) }()
	vector := func(i int) tensor.Tensor {
		x, err := tensor.Of(xs[i], 8)
		require.NoError(t, err)
		return x
	}
	for name, call := range map[string]func(on comm.Issuer) error{
		"root":       func(on comm.Issuer) error { return comm.BroadcastFrom(on, 2, xs...) },
		"reduction":  func(on comm.Issuer) error { return comm.AllReduce(on, comm.Op(77), xs...) },
		"type":       func(on comm.Issuer) error { return comm.AllReduce(on, comm.Sum, shorts...) },
		"lengths":    func(on comm.Issuer) error { return comm.AllGather(on, xs, xs) },
		"numbers":    func(on comm.Issuer) error { return comm.AllGatherV(on, wide, xs, []int{8}) },
		"peer":       func(on comm.Issuer) error { return comm.Send(on, -1, xs[0]) },
		"device":     func(on comm.Issuer) error { return comm.Recv(on, 1, xs[1]) },
		"overlap":    func(on comm.Issuer) error { return comm.AllToAll(on, xs, xs) },
		"of tensors": func(on comm.Issuer) error { return comm.OfTensors(on).BroadcastFrom(2, vector(0), vector(1)) },
	} {
		require.ErrorIs(t, call(g), comm.ErrMismatch, name)
		require.ErrorIs(t, g.Batch(func(b *comm.Batch) error { return call(b) }), comm.ErrMismatch, name)
	}
	err = comm.SendRecv(g, 0, wide[0].Slice(0, 8), 0, wide[0].Slice(4, 12))
	require.ErrorIs(t, err, nccl.ErrorInvalidUsage)
	require.NotErrorIs(t, err, comm.ErrMismatch)
	require.ErrorIs(t, comm.AllReduce(nil, comm.Sum, xs...), comm.ErrMismatch)
	require.NoError(t, g.Err())
	_, err = graph.Capture(g.Streams()[:1], func() error { // the other rank is not captured
		err := comm.AllReduce(g, comm.Sum, xs...)
		require.Error(t, err)
		require.NotErrorIs(t, err, comm.ErrMismatch)
		return nil
	}, nil)
	require.ErrorContains(t, err, "nothing was captured")
	_, err = graph.Capture(g.Streams(), func() error {
		require.Error(t, gpu.DeviceOf(g.Device(0)).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.CtxSynchronize() }))
		err := comm.AllReduce(g, comm.Sum, xs...)
		require.ErrorIs(t, err, graph.ErrorInvalidated)
		require.NotErrorIs(t, err, comm.ErrMismatch)
		return nil
	}, nil)
	require.ErrorIs(t, err, graph.ErrorInvalidated)
	require.NoError(t, g.Close())
	require.NotErrorIs(t, comm.AllReduce(g, comm.Sum, xs...), comm.ErrMismatch)
}

type exchange = testgpu.Exchange

var exchanges = testgpu.Exchanges

// joined returns a group of one rank for each device, as if each rank were a process of a job with a context.
func joined(t testing.TB, ctx context.Context, devs []*device.Device) []*comm.Group {
	t.Helper()
	gs, errs := join(t, ctx, devs)
	require.NoError(t, errors.Join(errs...))
	return gs
}

// joinBy joins a rank for each device, with a exchange and a configuration of its own. The end of the test closes the groups.
func joinBy(t testing.TB, devs []*device.Device, by func(i int, b *exchange) (comm.Rendezvous, *comm.Config)) ([]*comm.Group, []error) {
	t.Helper()
	ctx, gs := testgpu.Context(t), make([]*comm.Group, len(devs))
	bs := exchanges(ctx, len(devs))
	errs := atOnce(len(devs), func(i int) (err error) {
		r, cfg := by(i, bs[i])
		gs[i], err = comm.Join(ctx, r, devs[i], cfg)
		return err
	})
	t.Cleanup(func() { atOnce(len(gs), func(i int) error { return gs[i].Close() }) })
	return gs, errs
}

// atOnce calls fn for each rank on a goroutine of its own, and returns the errors.
func atOnce(ranks int, fn func(i int) error) []error {
	errs := make([]error, ranks)
	var wg sync.WaitGroup
	for i := range errs {
		wg.Go(func() { errs[i] = fn(i) })
	}
	wg.Wait()
	return errs
}

func TestJoin(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		groups.Each(t, joined(t, context.Background(), devs), func(i int, g *comm.Group) error {
			if g.Rank() != i {
				return fmt.Errorf("rank %d is rank %d", i, g.Rank())
			}
			return errors.Join(conform(testgpu.Context(t), g), g.Shutdown(testgpu.Context(t)))
		})
	})
}

func TestTwoRanksOnOneDevice(t *testing.T) {
	t.Setenv(env.ShareGPUs.Name, "no")
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		_, errs := join(t, context.Background(), []*device.Device{devs[0], devs[0]})
		for i, err := range errs {
			require.ErrorIs(t, err, comm.ErrMismatch, "rank %d", i)
			require.ErrorContains(t, err, "ranks 0 (pid")
			require.ErrorContains(t, err, "a GPU holds one rank")
		}
	})
}

// A lateContext never calls the functions of context.AfterFunc, as if their goroutines had not
// run yet.
type lateContext struct{ context.Context }

func (lateContext) Value(any) any                { return nil }
func (lateContext) AfterFunc(func()) func() bool { return func() bool { return true } }

// Shutdown notices the loss of a rank before the function that breaks the group has run.
func TestShutdownAfterALoss(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx, lose := context.WithCancel(context.Background())
		gs := joined(t, lateContext{ctx}, devs)
		lose()
		for _, g := range gs {
			require.ErrorIs(t, g.Shutdown(testgpu.Context(t)), comm.ErrBroken)
		}
	})
}

// The loss of a rank ends what waits for it, and names the cause from then on.
func TestLostRankBreaksTheGroup(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx, lose := context.WithCancelCause(context.Background())
		defer lose(nil)
		gs := joined(t, ctx, devs)
		// A first one on both ranks at once: NCCL connects them in the call.
		xs := make([]comm.Shards[float32], 2)
		for i, g := range gs {
			xs[i], _ = shards(t, g, 1024)
		}
		groups.Each(t, gs, func(i int, g *comm.Group) error {
			return errors.Join(comm.AllReduce(g, comm.Sum, xs[i]...), g.Wait(testgpu.Context(t)))
		})
		require.NoError(t, comm.AllReduce(gs[0], comm.Sum, xs[0]...)) // rank 1 never calls it
		short, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
		defer cancel()
		err := gs[0].Wait(short)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "rank 0 of 2")
		lost := errors.New("rank 1 was killed")
		lose(lost)
		err = gs[0].Wait(testgpu.Context(t))
		require.ErrorIs(t, err, comm.ErrBroken)
		require.ErrorIs(t, err, lost)
		require.ErrorIs(t, comm.AllReduce(gs[0], comm.Sum, xs[0]...), lost)
		require.ErrorIs(t, gs[0].Shutdown(testgpu.Context(t)), lost)
	})
}

// A rank that ends because of an error that the others will notice too is lost before
// they have: what it is lost for is the cause.
func TestOwnFailureBeforeTheLoss(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclCommGetAsyncError#*=ncclInvalidUsage"})
	ctx, lose := context.WithCancelCause(context.Background())
	defer lose(nil)
	gs := joined(t, ctx, devs)
	lost := errors.New("rank 1 was killed")
	lose(lost)
	for _, g := range gs {
		require.Eventually(t, func() bool {
			xs, err := comm.Make[float32](g, 1)
			_ = xs.Close()
			return errors.Is(err, comm.ErrBroken)
		}, time.Minute, time.Millisecond)
		require.ErrorIs(t, g.Err(), nccl.ErrorInvalidUsage)
		require.NotErrorIs(t, g.Err(), lost)
	}
}

// The same while NCCL still connects the ranks, which blocks the call.
func TestLostRankInTheFirstOperation(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ctx, lose := context.WithCancelCause(context.Background())
		defer lose(nil)
		gs := joined(t, ctx, devs)
		xs, _ := shards(t, gs[0], 1<<20)
		lost := errors.New("rank 1 was killed")
		done := make(chan error, 1)
		go func() {
			done <- errors.Join(comm.AllReduce(gs[0], comm.Sum, xs...), gs[0].Wait(testgpu.Context(t))) // rank 1 never calls it
		}()
		time.AfterFunc(50*time.Millisecond, func() { lose(lost) })
		err := <-done
		require.Error(t, err)
		require.ErrorIs(t, gs[0].Err(), lost)
	})
}

func TestJoinEndsWithContext(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer cancel()
	_, err := comm.Join(ctx, exchanges(context.Background(), 2)[0], devs[0], nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "wait for rank 1")
}

// A rank that fails on its way into a group, or gives up waiting, is named by the others,
// which do not wait until their contexts end: also for ranks that have not come.
func TestJoinNamesWhoFails(t *testing.T) {
	t.Parallel()
	for plan, says := range map[string]string{
		"cuDeviceGetUuid#1=CUDA_ERROR_NOT_SUPPORTED":                "CUDA_ERROR_NOT_SUPPORTED",
		"ncclGetVersion#*=ncclSystemError":                          "ncclSystemError",
		"ncclCommInitRankScalable#1=ncclInternalError":              "ncclInternalError",
		"cuStreamCreateWithPriority#1=CUDA_ERROR_OUT_OF_MEMORY":     "CUDA_ERROR_OUT_OF_MEMORY",
		"cuDeviceGetUuid#2=CUDA_ERROR_NOT_SUPPORTED gives up early": "deadline exceeded",
	} {
		t.Run(plan, func(t *testing.T) {
			faults, early := strings.CutSuffix(plan, " gives up early")
			ranks := 2
			if early {
				ranks = 3
			}
			bs, errs := exchanges(t.Context(), ranks), make([]error, 2)
			var wg sync.WaitGroup
			for i := range errs {
				cfg, ctx := &device.SystemConfig{VirtualDevices: 2}, testgpu.Context(t)
				if i == 1 {
					cfg.Faults = faults
				}
				if i == 1 && early {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, 30*time.Millisecond)
					defer cancel()
				}
				dev := testgpu.System(t, cfg).Devices()[i]
				wg.Go(func() { _, errs[i] = comm.Join(ctx, bs[i], dev, nil) })
			}
			wg.Wait()
			require.ErrorContains(t, errs[1], says)
			require.ErrorContains(t, errs[0], "comm: join as rank 0 of")
			require.Regexp(t, "rank 1 cannot: .*"+says, errs[0])
			require.NotErrorIs(t, errs[0], context.DeadlineExceeded)
		})
	}
}

func TestLocalOverFaults(t *testing.T) {
	for _, plan := range []string{
		"ncclGetUniqueId#1=ncclSystemError",
		"ncclCommInitRankScalable#2=ncclInternalError",
		"cuStreamCreateWithPriority#2=CUDA_ERROR_OUT_OF_MEMORY",
	} {
		t.Run(plan, func(t *testing.T) {
			devs := testgpu.System(t, &device.SystemConfig{VirtualDevices: 2, Faults: plan}).Devices()
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			_, err := comm.Local(ctx, devs, nil)
			require.Error(t, err)
			require.NoError(t, ctx.Err(), "the error came by itself")
		})
	}
}

// Where one of several new groups cannot be made, nothing is left of the others: the end of
// the tests would tell of a communicator that was not closed.
func TestSplitOverFaults(t *testing.T) {
	for _, plan := range []string{"cuStreamCreateWithPriority#3", "cuStreamCreateWithPriority#4"} {
		t.Run(plan, func(t *testing.T) {
			g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: plan + "=CUDA_ERROR_OUT_OF_MEMORY"}))
			_, err := g.Split(testgpu.Context(t), []int{0, 1}, []int{0, 0})
			require.ErrorIs(t, err, device.ErrorOutOfMemory)
		})
	}
}

func TestEnqueueAllocatesNothing(t *testing.T) {
	g := local(t, testgpu.CUDA(t, 1))
	xs, _ := shards(t, g, 1024)
	require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
	require.NoError(t, g.Wait(testgpu.Context(t)))
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if err := comm.AllReduce(g, comm.Sum, xs...); err != nil {
			t.Fatal(err)
		}
	}))
	require.NoError(t, g.Wait(testgpu.Context(t)))
}
