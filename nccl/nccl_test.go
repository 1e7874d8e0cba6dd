package nccl_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
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

// each runs f at once for every rank of a list, which may be one of their devices.
func each[T any](t *testing.T, list []T, f func(i int) error) {
	t.Helper()
	errs := make([]error, len(list))
	var wg sync.WaitGroup
	for i := range list {
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

// grouped issues an operation on all ranks in one group.
func grouped(ranks []rank, op func(i int, r rank) error) error {
	return nccl.Group(func(b *nccl.Batch) (err error) {
		for i, r := range ranks {
			err = errors.Join(err, op(i, r.in(b)))
		}
		return err
	})
}

// reduceAll reduces the memory of all ranks in place, in one group.
func reduceAll[T memory.Element](ranks []rank, xs []memory.Slice[T], op nccl.Op) error {
	return grouped(ranks, func(i int, r rank) error { return nccl.AllReduce(r.on(), r.s, xs[i], xs[i], op) })
}

// run issues an operation on all ranks in one group and returns the contents of out.
func run(t *testing.T, ranks []rank, out []memory.Slice[int64], op func(i int, r rank) error) [][]int64 {
	t.Helper()
	require.NoError(t, grouped(ranks, op))
	return contents(t, ranks, out)
}

// contents waits for the ranks and returns what they have.
func contents[T memory.Element](t *testing.T, ranks []rank, out []memory.Slice[T]) [][]T {
	t.Helper()
	got := make([][]T, len(ranks))
	for i, r := range ranks {
		require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
		got[i] = read(t, r.s, out[i])
	}
	return got
}

// requireAll requires that all ranks have these elements.
func requireAll[T memory.Element](t *testing.T, ranks []rank, xs []memory.Slice[T], want []T, what ...any) {
	t.Helper()
	require.Equal(t, slices.Repeat([][]T{want}, len(ranks)), contents(t, ranks, xs), what...)
}

// read returns what memory has when the stream has come to this place.
func read[T memory.Element](t *testing.T, s *stream.Stream, x memory.Slice[T]) []T {
	t.Helper()
	got := make([]T, x.Len())
	require.NoError(t, x.CopyTo(s, got))
	return got
}

// made returns memory with these elements, which the end of the test closes.
func made[T memory.Element](t *testing.T, s *stream.Stream, elements ...T) memory.Slice[T] {
	t.Helper()
	x, err := memory.MakeFrom(s, elements)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

// room returns memory for n elements, which the end of the test closes.
func room[T memory.Element](t *testing.T, s *stream.Stream, n int) memory.Slice[T] {
	t.Helper()
	return made(t, s, make([]T, n)...)
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

// Every collective of a length that is none, one, odd or large.
func TestLengths(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		for _, n := range []int{0, 1, 5, 1024, 100_001} {
			b := newBench(t, whole[int64](), ranks, n)
			b.all([]nccl.Op{nccl.Sum, nccl.Max})
			b.close()
		}
	})
}

func TestArgumentErrors(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, _ := buffers(t, ranks, 8)
		r := ranks[0]
		shorts := made[int16](t, r.s, 1, -7)
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
			"a type only to move": {nccl.AllReduce(r.on(), r.s, shorts, shorts, nccl.Sum), "cannot reduce int16"},
		} {
			require.ErrorContains(t, c.err, c.text, name)
		}
	})
}

func TestShutdown(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 10_000)
		each(t, devs, func(i int) error { return nccl.AllReduce(ranks[i].c, ranks[i].s, xs[i], xs[i], nccl.Sum) })
		each(t, devs, func(i int) error { return ranks[i].c.Shutdown(testgpu.Context(t)) })
		require.Equal(t, sum(in), read(t, ranks[1].s, xs[1]))
		require.ErrorIs(t, nccl.AllReduce(ranks[0].c, ranks[0].s, xs[0], xs[0], nccl.Sum), device.ErrClosed)
	})
}

// A Shutdown after the end of the communicator is no success: an operation may have been aborted. Only after a
// Shutdown that has succeeded another one does nothing.
func TestShutdownAfterTheEnd(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		for name, end := range map[string]func(c *nccl.Communicator){
			"abort":             func(c *nccl.Communicator) { require.NoError(t, c.Abort()) },
			"close":             func(c *nccl.Communicator) { require.NoError(t, c.Close()) },
			"a failed shutdown": func(c *nccl.Communicator) { require.ErrorIs(t, c.Shutdown(gone), context.Canceled) },
		} {
			ranks := connect(t, devs)
			xs, _ := buffers(t, ranks, 100)
			reduce := func(i int, r rank) error { return nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Sum) }
			run(t, ranks, xs, reduce)
			require.NoError(t, reduce(0, ranks[0])) // which the other rank does not issue
			end(ranks[0].c)
			for range 2 {
				require.ErrorIs(t, ranks[0].c.Shutdown(testgpu.Context(t)), device.ErrClosed, name)
			}
			require.NoError(t, ranks[1].c.Close())
		}
		ranks := connect(t, devs)
		for range 2 {
			each(t, devs, func(i int) error { return ranks[i].c.Shutdown(testgpu.Context(t)) })
		}
		ranks = connect(t, devs)
		each(t, devs, func(i int) error {
			errs := make(chan error, 2)
			for range cap(errs) {
				go func() { errs <- ranks[i].c.Shutdown(testgpu.Context(t)) }()
			}
			return errors.Join(<-errs, <-errs)
		})
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

func TestUniqueID(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		id, err := nccl.NewUniqueID(devs[0])
		require.NoError(t, err)
		require.NotEqual(t, nccl.UniqueID{}, id)
		other, err := nccl.NewUniqueID(devs[0])
		require.NoError(t, err)
		require.NotEqual(t, id, other)
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
