package comm_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/cluster"
	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/groups"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// checked makes a group that checks for NaN.
func checked(t *testing.T, devs []*device.Device, s comm.Strategy) *comm.Group {
	t.Helper()
	return groupBy(t, devs, comm.Config{Strategy: s, NCCL: &nccl.Config{NaNCheck: true}})
}

// makeNaN makes an element of a slice NaN.
func makeNaN(t *testing.T, g *comm.Group, i int, x memory.Slice[float32], at int) {
	t.Helper()
	require.NoError(t, x.Slice(at, at+1).CopyFrom(g.Stream(i), []float32{float32(math.NaN())}))
}

// requireNaN requires that an error names a NaN of rank 1.
func requireNaN(t *testing.T, err error, index int, record uint64, operation string) {
	t.Helper()
	var e *nccl.NaNError
	require.ErrorAs(t, err, &e)
	require.ErrorIs(t, err, comm.ErrBroken)
	require.Equal(t, []any{1, 2, index, record}, []any{e.Rank, e.Size, e.Index, e.Record})
	require.Equal(t, operation, e.Operation)
	require.ErrorContains(t, err, "on rank 1 of 2")
}

// A NaN on one rank fails the operation on all ranks, with every backend; the operations before it
// complete, also if they have infinities.
func TestNaNWithEveryStrategy(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.Windows, comm.CopyEngines} {
			g := checked(t, devs, s)
			xs, _ := shards(t, g, 1000)
			wide, _ := shards(t, g, 2000)
			require.NoError(t, xs[1].Slice(7, 8).CopyFrom(g.Stream(1), []float32{float32(math.Inf(-1))}))
			require.NoError(t, comm.AllReduce(g, comm.Max, xs...))
			require.NoError(t, g.Wait(testgpu.Context(t)), s)
			makeNaN(t, g, 1, xs[1], 998)
			makeNaN(t, g, 1, xs[1], 999)
			w, err := comm.Start(g, func() error { return comm.AllGather(g, wide, xs) })
			require.NoError(t, err)
			if err := comm.AllReduce(g, comm.Sum, xs...); err != nil { // which has a NaN too, but is not the first
				requireNaN(t, err, 998, 2, "ncclAllGather(1000 x float32) as collective 2")
			}
			requireNaN(t, g.Wait(testgpu.Context(t)), 998, 2, "ncclAllGather(1000 x float32) as collective 2")
			requireNaN(t, w.Wait(testgpu.Context(t)), 998, 2, "ncclAllGather(1000 x float32) as collective 2")
			requireNaN(t, comm.AllReduce(g, comm.Sum, xs...), 998, 2, "ncclAllGather(1000 x float32) as collective 2")
		}
	})
}

// Inputs that an operation does not read are not checked, and neither are other types and groups
// without the check.
func TestNaNThatIsNoInput(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := checked(t, devs, comm.NCCLOnly)
		xs, hs := shards(t, g, 100)
		ys, _ := shards(t, g, 100)
		makeNaN(t, g, 1, xs[1], 5)
		makeNaN(t, g, 1, ys[1], 5)
		require.NoError(t, comm.BroadcastFrom(g, 0, xs...), "which overwrites it")
		require.NoError(t, comm.ReduceTo(g, 0, comm.Sum, ys, xs))
		require.NoError(t, g.Wait(testgpu.Context(t)))
		require.Equal(t, hs[0], read(t, g, 1, xs[1]))
		ints, err := comm.MakeFrom(g, []int32{-1, math.MinInt32})
		require.NoError(t, err)
		defer ints.Close()
		require.NoError(t, comm.AllReduce(g, comm.Max, ints...))
		require.NoError(t, g.Wait(testgpu.Context(t)))

		plain := local(t, devs)
		require.NoError(t, plain.Stream(1).WaitStream(g.Stream(1)))
		require.NoError(t, plain.Stream(0).WaitStream(g.Stream(0)))
		require.NoError(t, comm.AllReduce(plain, comm.Sum, ys...))
		require.NoError(t, plain.Wait(testgpu.Context(t)))
		require.True(t, math.IsNaN(float64(read(t, plain, 0, ys[0])[5])))
	})
}

// A captured operation is checked at each launch.
func TestNaNInAGraph(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, s := range []comm.Strategy{comm.NCCLOnly, comm.OwnKernels, comm.Windows} {
			g := checked(t, devs, s)
			xs, _ := shards(t, g, 300)
			ys, _ := shards(t, g, 600)
			exec, err := graph.Capture(g.Streams(), func() error { return comm.AllGather(g, ys, xs) }, nil)
			require.NoError(t, err)
			defer exec.Close()
			launch := func() error {
				require.NoError(t, g.Stream(0).WaitStream(g.Stream(1)))
				require.NoError(t, exec.Launch(g.Stream(0)))
				require.NoError(t, g.Stream(1).WaitStream(g.Stream(0)))
				return g.Wait(testgpu.Context(t))
			}
			require.NoError(t, launch())
			require.NoError(t, launch())
			makeNaN(t, g, 1, xs[1], 299)
			requireNaN(t, launch(), 299, 1, "ncclAllGather(300 x float32) as collective 1")
			require.NoError(t, exec.Close())
		}
	})
}

// A rank that enqueues its operations alone checks them too. The environment enables it.
func TestNaNOfASingleOperation(t *testing.T) {
	t.Setenv("CHORUS_NCCL_NAN_CHECK", "1")
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gs := joined(t, context.Background(), devs)
		xs := []comm.Shards[float32]{{}, {}}
		for i, g := range gs {
			xs[i], _ = shards(t, g, 64)
		}
		makeNaN(t, gs[1], 0, xs[1][0], 3)
		require.NoError(t, atOnce(2, func(i int) error { return comm.AllReduce(gs[i], comm.Sum, xs[i]...) })[1])
		for _, g := range gs { // rank 0 may have called after the NaN was found
			require.NoError(t, poll.Until(testgpu.Context(t), func() (bool, error) { return g.Err() != nil, nil }))
			requireNaN(t, g.Wait(testgpu.Context(t)), 3, 1, "ncclAllReduce(64 x float32, sum) as collective 1")
		}
	})
}

// A nanExchange returns the report of a NaN a moment after the end of the rank that has reported it.
type nanExchange struct{ *testgpu.Exchange }

func (b nanExchange) Get(ctx context.Context, key string) ([]byte, error) {
	v, err := b.Exchange.Get(ctx, key)
	if prefix, ok := strings.CutSuffix(key, "nan"); ok && err == nil {
		_, err = b.Exchange.Get(ctx, prefix+"ended")
		time.Sleep(50 * time.Millisecond) // in virtual time
	}
	return v, err
}

// A rank that hears first that another one has ended still names the NaN that the other one had reported before.
func TestNaNAfterTheEnd(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(env.NCCLTraceFile.Name, filepath.Join(dir, "trace-"))
	streamtest.RunInVirtualTime(t, &device.SystemConfig{VirtualDevices: 2}, func(t *testing.T, devs []*device.Device) {
		var bs [2]*exchange
		gs, errs := joinBy(t, devs, func(i int, b *exchange) (comm.Rendezvous, *comm.Config) {
			bs[i] = b
			return nanExchange{b}, &comm.Config{Strategy: comm.NCCLOnly, NCCL: &nccl.Config{NaNCheck: true}}
		})
		require.NoError(t, errors.Join(errs...))
		nan, ended := gs[0].NaNKey()
		report := `{"Rank":1,"Size":2,"Device":"virtual:1","Record":7,"Operation":"ncclAllReduce","Index":3}`
		require.NoError(t, bs[1].Set(t.Context(), nan, []byte(report)))
		require.NoError(t, bs[1].Set(t.Context(), ended, []byte("1 failed: the input is not a number")))
		var e *nccl.NaNError
		require.ErrorAs(t, gs[0].RootCause(nccl.ErrorRemote), &e)
		require.Equal(t, []any{1, uint64(7), 3}, []any{e.Rank, e.Record, e.Index})
		require.NoError(t, poll.Until(testgpu.Context(t), func() (bool, error) { return gs[0].Err() != nil, nil }))
		trace, err := os.ReadFile(filepath.Join(dir, "trace-0"))
		require.NoError(t, err)
		require.Contains(t, string(trace), `"end_follows":true`, "the other rank is the cause")
		for _, g := range gs {
			require.NoError(t, g.Close())
		}
	})
}

// A call on a group whose communicator has failed says that the group is broken, and why, although
// no call of the group has noticed the failure before.
func TestCallAfterUnnoticedFailure(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for name, call := range map[string]func(g *comm.Group, xs comm.Shards[float32]) error{
			"call": func(g *comm.Group, xs comm.Shards[float32]) error { return comm.AllReduce(g, comm.Sum, xs...) },
			"batch": func(g *comm.Group, xs comm.Shards[float32]) error {
				return g.Batch(func(b *comm.Batch) error { return comm.AllReduce(b, comm.Sum, xs...) })
			},
		} {
			t.Run(name, func(t *testing.T) {
				g := checked(t, devs, comm.NCCLOnly)
				xs, _ := shards(t, g, 64)
				makeNaN(t, g, 1, xs[1], 3)
				require.NoError(t, comm.AllReduce(g, comm.Sum, xs...))
				failed := func() (bool, error) { return g.Communicator(0).Err() != nil, nil }
				require.NoError(t, poll.Until(testgpu.Context(t), failed))
				err := call(g, xs)
				requireNaN(t, err, 3, 1, "ncclAllReduce(64 x float32, sum) as collective 1")
				require.Equal(t, err, g.Err())
			})
		}
	})
}

// nanOfRank1 lets rank 1 reduce a NaN. The ranks wait for nothing afterwards except an error of the
// group, and rank 1 stays until the others have one.
func nanOfRank1(ctx context.Context, sess *cluster.Session, g *comm.Group, xs comm.Shards[float32]) error {
	if g.Rank() == 1 {
		if err := xs[0].Slice(77, 78).CopyFrom(g.Stream(0), []float32{float32(math.NaN())}); err != nil {
			return err
		}
	}
	_ = comm.AllReduce(g, comm.Sum, xs...) // fails on a rank that is so late that rank 1 has ended the group
	if err := poll.Until(ctx, func() (bool, error) { return g.Err() != nil, nil }); err != nil {
		return err
	}
	// An error says that another rank has ended, after all ranks had set their keys.
	err := sess.Set(ctx, fmt.Sprint("knows/", g.Rank()), nil)
	for rank := 0; rank < g.Size() && err == nil; rank++ {
		_, err = sess.Get(ctx, fmt.Sprint("knows/", rank))
	}
	return g.Err()
}

// All processes report the rank with the NaN, its operation and the element.
func TestNaNOfAProcess(t *testing.T) {
	t.Parallel()
	eachBackend(t, 3, 2, testgpu.CUDA, func(t *testing.T, backend string, ranks int) {
		_, out, _ := job(t, backend, "nan", ranks, env.NCCLNaNCheck.Name+"=1")
		for rank := range ranks {
			require.Regexp(t, fmt.Sprintf(`(?m)^\[rank %d\] worker: comm: the group is broken: nccl: ncclAllReduce\(1048576 x float32, sum\) as collective 1 on rank 1 of %d .*: element 77 of the input is not a number`, rank, ranks), out)
		}
	})
}

// Reports of other processes are validated.
func TestHostileNaNReport(t *testing.T) {
	good := `{"Rank":1,"Size":2,"Device":"cuda:1","Record":7,"Operation":"ncclAllReduce","Index":3}`
	e := comm.ReadNaN([]byte(good), 0, 2)
	require.NotNil(t, e)
	require.Equal(t, nccl.NaNError{Rank: 1, Size: 2, Device: "cuda:1", Record: 7, Operation: "ncclAllReduce", Index: 3}, *e)
	require.Nil(t, comm.ReadNaN([]byte(good), 1, 2), "its own")
	require.NotContains(t, comm.ReadNaN([]byte(strings.ReplaceAll(good, "ncclAllReduce", `\u001b[2J`)), 0, 2).Error(), "\x1b")
	for _, bad := range []string{
		"", "{", "[]", strings.ReplaceAll(good, `"Rank":1`, `"Rank":2`), strings.ReplaceAll(good, `"Rank":1`, `"Rank":-1`),
		strings.ReplaceAll(good, `"Size":2`, `"Size":3`), strings.ReplaceAll(good, `"Index":3`, `"Index":-3`),
		strings.ReplaceAll(good, "ncclAllReduce", strings.Repeat("x", 1<<20)),
	} {
		require.Nil(t, comm.ReadNaN([]byte(bad), 0, 2), "%.100s", bad)
	}
}

// shortTimeout is a timeout of operations that hang.
const shortTimeout = 2 * time.Second

// pair makes a group of two processes whose operations have the timeout d. An operation that
// only one of them issues hangs.
func pair(t *testing.T, devs []*device.Device, d time.Duration) (gs [2]*comm.Group, xs [2]comm.Shards[float32]) {
	t.Helper()
	for i, g := range joined(t, context.Background(), devs) {
		gs[i] = g
		xs[i], _ = shards(t, g, 64)
		require.NoError(t, g.SetTimeout(d))
	}
	return gs, xs
}

// reduceOnBoth reduces on both ranks, so that the connections exist before an operation hangs.
func reduceOnBoth(t *testing.T, gs [2]*comm.Group, xs [2]comm.Shards[float32]) {
	t.Helper()
	groups.Each(t, gs[:], func(i int, g *comm.Group) error {
		return errors.Join(comm.AllReduce(g, comm.Sum, xs[i]...), g.Wait(testgpu.Context(t)))
	})
}

// requireTimeout requires that the operations of a group end by a timeout.
func requireTimeout(t *testing.T, g *comm.Group, limit time.Duration) {
	t.Helper()
	var late *nccl.TimeoutError
	require.ErrorAs(t, g.Wait(testgpu.Context(t)), &late)
	require.Equal(t, limit, late.Limit)
	require.Greater(t, late.Age, limit)
}

// requireNilOrBroken checks the error of a call during which shortTimeout may end on a busy machine.
func requireNilOrBroken(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		require.ErrorIs(t, err, comm.ErrBroken)
	}
}

// A shorter timeout holds for later operations, and operations that are already issued keep
// theirs.
func TestSetTimeout(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gs, xs := pair(t, devs, time.Hour)
		reduceOnBoth(t, gs, xs)
		require.NoError(t, gs[0].SetTimeout(shortTimeout))
		require.NoError(t, comm.AllReduce(gs[0], comm.Sum, xs[0]...))
		requireNilOrBroken(t, gs[0].SetTimeout(time.Hour))
		requireTimeout(t, gs[0], shortTimeout)
		require.ErrorIs(t, gs[0].SetTimeout(time.Hour), comm.ErrBroken)
	})
}

// The timeout of a batch holds for its operations only: operations behind them that have more
// time do not change it.
func TestTimeoutOfABatch(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		gs, xs := pair(t, devs, time.Hour)
		reduceOnBoth(t, gs, xs)
		sent := make(chan error, 1) // NCCL connects the ranks at their first transfer
		go func() { sent <- errors.Join(comm.Send(gs[1], 0, xs[1][0]), gs[1].Wait(testgpu.Context(t))) }()
		require.NoError(t, errors.Join(comm.Recv(gs[0], 1, xs[0][0]), gs[0].Wait(testgpu.Context(t)), <-sent))
		b := gs[0].NewBatch()
		b.SetTimeout(shortTimeout)
		require.NoError(t, comm.Recv(b, 1, xs[0][0]), "which hangs")
		later := gs[0].NewBatch()
		require.NoError(t, comm.Recv(later, 1, xs[0][0]))
		require.NoError(t, b.Enqueue())
		requireNilOrBroken(t, later.Enqueue())
		requireTimeout(t, gs[0], shortTimeout)
	})
}

// A batch can be without a timeout, and Enqueue forgets the timeout of a batch.
func TestTimeoutOfABatchEnds(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		require.NoError(t, g.SetTimeout(time.Minute))
		xs, _ := shards(t, g, 8)
		b := g.NewBatch()
		for _, d := range []time.Duration{-1, 3 * time.Minute, 0} {
			b.SetTimeout(d)
			require.NoError(t, comm.AllReduce(b, comm.Sum, xs...))
			require.NoError(t, b.Enqueue())
			require.NoError(t, comm.AllReduce(b, comm.Sum, xs...))
			require.NoError(t, b.Enqueue())
		}
		require.NoError(t, g.Wait(testgpu.Context(t)))
		for i := range devs {
			var limits []time.Duration
			for _, o := range g.Communicator(i).Trace() {
				limits = append(limits, o.Timeout)
			}
			require.Equal(t, []time.Duration{0, time.Minute, 3 * time.Minute, time.Minute, time.Minute, time.Minute}, limits)
		}
	})
}

func TestHighPriority(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for _, high := range []bool{false, true} {
			g, err := comm.Local(testgpu.Context(t), devs, &comm.Config{HighPriority: high})
			require.NoError(t, err)
			sub, err := g.Sub(testgpu.Context(t), 1, 0)
			require.NoError(t, err)
			for i, dev := range devs {
				least, greatest, err := stream.PriorityRange(dev)
				require.NoError(t, err)
				want := least
				if high {
					want = greatest
				}
				for _, s := range []*stream.Stream{g.Stream(i), sub.Stream(i)} {
					p, err := s.Priority()
					require.NoError(t, err)
					require.Equal(t, want, p)
				}
			}
			require.NoError(t, sub.Close())
			require.NoError(t, g.Close())
		}
	})
}

// On a busy machine NCCL answers late. Err waits for the answer, because callers end a training after an error.
func TestErrWaitsForNCCL(t *testing.T) {
	testhost.Bubble(t, func(t *testing.T) {
		begun, failure := time.Now(), errors.New("failure")
		after := func(d time.Duration, err error) func() error {
			return func() error { time.Sleep(d); return err }
		}
		noticedAt := func(d time.Duration) func() error {
			return func() error {
				if time.Since(begun) >= d {
					return failure
				}
				return nil
			}
		}
		for _, test := range []struct {
			answer, noticed, ends time.Duration
			err                   error
			answered              bool
		}{
			{answer: 9 * time.Second, noticed: time.Hour, ends: 9 * time.Second, answered: true},
			{answer: 9 * time.Second, noticed: 50 * time.Millisecond, ends: 250 * time.Millisecond, err: failure, answered: true},
			{answer: time.Minute, noticed: time.Hour, ends: 10 * time.Second},
		} {
			begun = time.Now()
			err, answered := comm.FirstAnswer(after(test.answer, nil), noticedAt(test.noticed))
			require.Equal(t, test.err, err)
			require.Equal(t, test.answered, answered)
			require.Equal(t, test.ends, time.Since(begun))
			time.Sleep(time.Minute)
		}
	})
}
