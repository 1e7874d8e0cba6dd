package nccl_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

func TestMain(m *testing.M) { testgpu.Main(m) }

// A rank is one communicator with its stream.
type rank struct {
	c     *nccl.Communicator
	s     *stream.Stream
	batch *nccl.Batch // that on adds to; nil is none
}

// in returns the rank with operations that go into a batch.
func (r rank) in(b *nccl.Batch) rank {
	r.batch = b
	return r
}

// on returns where the rank issues its operations.
func (r rank) on() nccl.Issuer {
	if r.batch != nil {
		return r.batch.On(r.c)
	}
	return r.c
}

// An onto says where operations of a communicator go: direct, or Batch.On.
type onto func(*nccl.Communicator) nccl.Issuer

func direct(c *nccl.Communicator) nccl.Issuer { return c }

// connect makes one communicator on each device, which the test ends.
func connect(t *testing.T, devs []*device.Device) []rank {
	t.Helper()
	return connectWith(t, devs, nil)
}

func connectWith(t *testing.T, devs []*device.Device, cfg *nccl.Config) []rank {
	t.Helper()
	id, err := nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	ranks := make([]rank, len(devs))
	each(t, devs, func(i int) error {
		var err error
		if ranks[i].s, err = stream.New(devs[i], nil); err != nil {
			return err
		}
		ranks[i].c, err = nccl.NewCommunicator(testgpu.Context(t), devs[i], id, i, len(devs), cfg)
		return err
	})
	t.Cleanup(func() {
		each(t, devs, func(i int) error { return ranks[i].c.Close() })
		for _, r := range ranks {
			require.NoError(t, r.s.Close())
		}
	})
	return ranks
}

// each runs f for every rank at once.
func each(t *testing.T, devs []*device.Device, f func(i int) error) {
	t.Helper()
	errs := make([]error, len(devs))
	var wg sync.WaitGroup
	for i := range devs {
		wg.Go(func() { errs[i] = f(i) })
	}
	wg.Wait()
	for i, err := range errs {
		require.NoError(t, err, "rank %d", i)
	}
}

// issueAlone issues an all-reduce on one rank only and returns the error of the call, which blocks if the
// ranks are not connected yet, or else of the wait.
func issueAlone(t *testing.T, r rank, x memory.Slice[int64]) error {
	t.Helper()
	if err := nccl.AllReduce(r.c, r.s, x, x, nccl.Sum); err != nil {
		return err
	}
	return r.c.Wait(testgpu.Context(t), r.s)
}

// run issues an operation on all ranks in one group and returns the contents of out.
func run(t *testing.T, ranks []rank, out []memory.Slice[int64], op func(i int, r rank) error) [][]int64 {
	t.Helper()
	require.NoError(t, nccl.Group(func(b *nccl.Batch) error {
		for i, r := range ranks {
			if err := op(i, r.in(b)); err != nil {
				return err
			}
		}
		return nil
	}))
	return contents(t, ranks, out)
}

// contents waits for the ranks and returns what they have.
func contents(t *testing.T, ranks []rank, out []memory.Slice[int64]) [][]int64 {
	t.Helper()
	got := make([][]int64, len(ranks))
	for i, r := range ranks {
		require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
		got[i] = make([]int64, out[i].Len())
		require.NoError(t, out[i].CopyTo(r.s, got[i]))
	}
	return got
}

// buffers makes n random numbers on each rank.
func buffers(t *testing.T, ranks []rank, n int) ([]memory.Slice[int64], [][]int64) {
	t.Helper()
	g := rand.New(rand.NewPCG(3, uint64(n)))
	xs, hs := make([]memory.Slice[int64], len(ranks)), make([][]int64, len(ranks))
	for i, r := range ranks {
		hs[i] = make([]int64, n)
		for k := range hs[i] {
			hs[i][k] = g.Int64N(1 << 40)
		}
		var err error
		xs[i], err = memory.MakeFrom(r.s, hs[i])
		require.NoError(t, err)
		t.Cleanup(func() {
			// A test may have lost the device on purpose.
			if err := xs[i].Close(); !errors.Is(err, device.ErrorLaunchFailed) {
				require.NoError(t, err)
			}
		})
	}
	return xs, hs
}

func sum(hs [][]int64) []int64 {
	s := make([]int64, len(hs[0]))
	for _, h := range hs {
		for k, v := range h {
			s[k] += v
		}
	}
	return s
}

func concat(hs [][]int64) []int64 {
	all := []int64{}
	for _, h := range hs {
		all = append(all, h...)
	}
	return all
}

func TestCollectives(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		size := len(ranks)
		for _, n := range []int{0, 1, 5, 1024, 100_001} {
			t.Run(fmt.Sprintf("n=%d", n), func(t *testing.T) {
				src, in := buffers(t, ranks, n)
				dst, _ := buffers(t, ranks, n)
				wide, win := buffers(t, ranks, n*size)
				wide2, _ := buffers(t, ranks, n*size)
				total, all := sum(in), concat(in)

				for i, got := range run(t, ranks, dst, func(i int, r rank) error {
					return nccl.AllReduce(r.on(), r.s, dst[i], src[i], nccl.Sum)
				}) {
					require.Equal(t, total, got, "all-reduce, rank %d", i)
				}
				for i, got := range run(t, ranks, dst, func(i int, r rank) error {
					return nccl.Broadcast(r.on(), r.s, dst[i], src[i], size-1)
				}) {
					require.Equal(t, in[size-1], got, "broadcast, rank %d", i)
				}
				got := run(t, ranks, dst, func(i int, r rank) error {
					return nccl.Reduce(r.on(), r.s, dst[i], src[i], nccl.Max, 1)
				})
				for k := range n {
					require.Equal(t, max(in[0][k], in[1][k]), got[1][k], "reduce")
				}
				for i, got := range run(t, ranks, wide2, func(i int, r rank) error {
					return nccl.AllGather(r.on(), r.s, wide2[i], src[i])
				}) {
					require.Equal(t, all, got, "all-gather, rank %d", i)
				}
				for i, got := range run(t, ranks, dst, func(i int, r rank) error {
					return nccl.ReduceScatter(r.on(), r.s, dst[i], wide[i], nccl.Sum)
				}) {
					require.Equal(t, sum(win)[i*n:(i+1)*n], got, "reduce-scatter, rank %d", i)
				}
				for i, got := range run(t, ranks, wide2, func(i int, r rank) error {
					return nccl.AllToAll(r.on(), r.s, wide2[i], wide[i])
				}) {
					for j := range size {
						require.Equal(t, win[j][i*n:(i+1)*n], got[j*n:(j+1)*n], "all-to-all, rank %d from %d", i, j)
					}
				}
				got = run(t, ranks, wide2, func(i int, r rank) error {
					return nccl.Gather(r.on(), r.s, wide2[i], src[i], 1)
				})
				require.Equal(t, all, got[1], "gather")
				for i, got := range run(t, ranks, dst, func(i int, r rank) error {
					return nccl.Scatter(r.on(), r.s, dst[i], wide[i], 0)
				}) {
					require.Equal(t, win[0][i*n:(i+1)*n], got, "scatter, rank %d", i)
				}
				for i, got := range run(t, ranks, dst, func(i int, r rank) error {
					if err := nccl.Send(r.on(), r.s, src[i], (i+1)%size); err != nil {
						return err
					}
					return nccl.Recv(r.on(), r.s, dst[i], (i+size-1)%size)
				}) {
					require.Equal(t, in[(i+size-1)%size], got, "ring, rank %d", i)
				}
			})
		}
	})
}

// bool and 16-bit integers can be moved but not reduced.
func TestTypesThatNCCLLacks(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs := make([]memory.Slice[int16], len(ranks))
		for i, r := range ranks {
			var err error
			xs[i], err = memory.MakeFrom(r.s, []int16{int16(i), -7, 30000})
			require.NoError(t, err)
			defer xs[i].Close()
		}
		require.ErrorContains(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum), "cannot reduce int16")
		require.NoError(t, nccl.Group(func(b *nccl.Batch) error {
			for i, r := range ranks {
				if err := nccl.Broadcast(b.On(r.c), r.s, xs[i], xs[i], 1); err != nil {
					return err
				}
			}
			return nil
		}))
		for i, r := range ranks {
			got := make([]int16, 3)
			require.NoError(t, xs[i].CopyTo(r.s, got))
			require.Equal(t, []int16{1, -7, 30000}, got)
		}
	})
}

func TestArgumentErrors(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, _ := buffers(t, ranks, 8)
		r := ranks[0]
		for name, c := range map[string]struct {
			err  error
			text string
		}{
			"lengths":             {nccl.AllReduce(r.on(), r.s, xs[0].Slice(0, 4), xs[0], nccl.Sum), "the destination has 4 elements: want 8"},
			"buffer of a device":  {nccl.AllReduce(r.on(), r.s, xs[0], xs[1], nccl.Sum), "the buffer is of"},
			"stream of a device":  {nccl.AllReduce(r.on(), ranks[1].s, xs[0], xs[0], nccl.Sum), "use a stream of that device"},
			"root":                {nccl.Broadcast(r.on(), r.s, xs[0], xs[0], 2), "rank 2 does not exist"},
			"peer":                {nccl.Send(r.on(), r.s, xs[0], -1), "rank -1 does not exist"},
			"all-gather":          {nccl.AllGather(r.on(), r.s, xs[0], xs[0]), "want 16"},
			"reduce-scatter":      {nccl.ReduceScatter(r.on(), r.s, xs[0], xs[0], nccl.Sum), "the source has 8 elements: want 16"},
			"all-to-all":          {nccl.AllToAll(r.on(), r.s, xs[0].Slice(0, 7), xs[0].Slice(0, 7)), "the destination has 7 elements: want as many from each rank"},
			"overlap":             {nccl.AllReduce(r.on(), r.s, xs[0].Slice(0, 4), xs[0].Slice(2, 6), nccl.Sum), "overlap: want the same memory"},
			"overlap of a gather": {nccl.AllGather(r.on(), r.s, xs[0], xs[0].Slice(2, 6)), "overlap: want the source to be the rank's part"},
			"overlap of parts":    {nccl.ReduceScatter(r.on(), r.s, xs[0].Slice(1, 5), xs[0], nccl.Sum), "overlap: want the destination to be the rank's part"},
			"all-to-all in place": {nccl.AllToAll(r.on(), r.s, xs[0], xs[0]), "overlap: want none in common"},
			"no communicator":     {nccl.AllReduce(nil, r.s, xs[0], xs[0], nccl.Sum), "no communicator given"},
			"no stream":           {nccl.AllReduce(r.on(), nil, xs[0], xs[0], nccl.Sum), "no stream given"},
			"an unknown operator": {nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Op(77)), "op 77 is not a reduction"},
		} {
			require.ErrorContains(t, c.err, c.text, name)
		}
	})
}

// A group whose function fails enqueues nothing and leaves the thread and the
// communicators as they were.
func TestGroupFailsWhole(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 64)
		boom := fmt.Errorf("boom")
		for range 3 {
			require.ErrorIs(t, nccl.Group(func(b *nccl.Batch) error {
				if err := nccl.AllReduce(b.On(ranks[0].c), ranks[0].s, xs[0], xs[0], nccl.Sum); err != nil {
					return err
				}
				return boom
			}), boom)
			require.Panics(t, func() {
				_ = nccl.Group(func(b *nccl.Batch) error {
					_ = nccl.AllReduce(b.On(ranks[0].c), ranks[0].s, xs[0], xs[0], nccl.Sum)
					panic("boom")
				})
			})
		}
		for i, got := range run(t, ranks, xs, func(i int, r rank) error {
			return nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Sum)
		}) {
			require.Equal(t, sum(in), got, "rank %d", i)
		}
	})
}

func TestAbortEndsABlockedOperation(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, _ := buffers(t, ranks, 1024)
		each(t, devs, func(i int) error { return nccl.AllReduce(ranks[i].c, ranks[i].s, xs[i], xs[i], nccl.Sum) })
		for _, r := range ranks {
			require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
		}
		// Rank 1 never calls the second one.
		r := ranks[0]
		require.NoError(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum))
		ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
		defer cancel()
		err := r.c.Wait(ctx, r.s)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorContains(t, err, "rank 0 of 2")
		each(t, devs, func(i int) error { return ranks[i].c.Abort() })
		require.NoError(t, r.s.Sync(testgpu.Context(t)))
		require.ErrorIs(t, nccl.AllReduce(r.on(), r.s, xs[0], xs[0], nccl.Sum), device.ErrClosed)
		require.NoError(t, r.c.Close())
		require.NoError(t, (*nccl.Communicator)(nil).Close())
	})
}

func TestShutdown(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 10_000)
		each(t, devs, func(i int) error { return nccl.AllReduce(ranks[i].c, ranks[i].s, xs[i], xs[i], nccl.Sum) })
		each(t, devs, func(i int) error { return ranks[i].c.Shutdown(testgpu.Context(t)) })
		got := make([]int64, 10_000)
		require.NoError(t, xs[1].CopyTo(ranks[1].s, got))
		require.Equal(t, sum(in), got)
		require.ErrorIs(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum), device.ErrClosed)
	})
}

// TestShutdownEndsWithContext ends the context while NCCL waits for an operation that the other rank
// does not issue. NCCL would end the process if the abort freed the communicator at that time.
func TestShutdownEndsWithContext(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, after := range []time.Duration{0, time.Microsecond, time.Millisecond, 50 * time.Millisecond} {
			ranks := connect(t, devs)
			xs, _ := buffers(t, ranks, 10_000)
			reduce := func(i int, r rank) error { return nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Sum) }
			run(t, ranks, xs, reduce) // connects the ranks: the call of one rank would block
			require.NoError(t, reduce(0, ranks[0]))
			ctx, cancel := context.WithTimeoutCause(t.Context(), after, errors.New("enough"))
			err := ranks[0].c.Shutdown(ctx)
			cancel()
			require.ErrorContains(t, err, "aborted: enough", "after %v", after)
			require.NotContains(t, err.Error(), "ncclCommAbort", "the abort worked, after %v", after)
			require.ErrorIs(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum), device.ErrClosed)
			require.NoError(t, ranks[0].c.Close(), "the abort was complete, after %v", after)
			require.NoError(t, ranks[1].c.Close())
		}
	})
}

// TestShutdownBesideOperations issues operations while the communicator shuts down. Each operation is
// enqueued before, or refused because the communicator is closed: NCCL gets none after ncclCommFinalize.
func TestShutdownBesideOperations(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		for range testgpu.Rounds(40, 400) {
			ranks := connect(t, devs)
			r := ranks[0]
			xs, _ := buffers(t, ranks, 100)
			errs := make([]error, 8)
			var all sync.WaitGroup
			for i := range errs {
				all.Go(func() { errs[i] = nccl.AllReduce(r.c, r.s, xs[0], xs[0], nccl.Sum) })
			}
			require.NoError(t, r.c.Shutdown(testgpu.Context(t)))
			all.Wait()
			for _, err := range errs {
				if err != nil {
					require.ErrorIs(t, err, device.ErrClosed)
				}
			}
		}
	})
}

func TestInitEndsWithContext(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	id, err := nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err = nccl.NewCommunicator(ctx, devs[0], id, 0, 2, nil)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "rank 0 of 2")
	_, err = nccl.NewCommunicator(ctx, devs[0], id, 2, 2, nil)
	require.ErrorContains(t, err, "want 0 <= rank < size")
}

func TestConfigOfANewerNCCL(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		id, err := nccl.NewUniqueID(devs[0])
		require.NoError(t, err)
		c, err := nccl.NewCommunicator(testgpu.Context(t), devs[0], id, 0, 1, &nccl.Config{MaxCTAs: new(4), Name: "one", SplitShare: new(true)})
		require.NoError(t, err)
		require.Equal(t, 0, c.Rank())
		require.Equal(t, 1, c.Size())
		version, err := nccl.Version(devs[0])
		require.NoError(t, err)
		require.NotEmpty(t, version)
		require.NoError(t, c.Err())
		require.NoError(t, c.Shutdown(testgpu.Context(t)))
	})
}
