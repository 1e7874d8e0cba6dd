package nccl_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// A mistake of one rank, and a function that fails or panics, keep all ranks of the group from enqueuing, and leave the thread and
// the communicators as they were.
func TestGroupChecksAllRanksFirst(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 64)
		bad := func(i int, r rank) error { return nccl.AllReduce(r.on(), r.s, xs[i], xs[0], nccl.Sum) }
		require.ErrorContains(t, grouped(ranks, bad), "rank 1 of 2")
		forgets := func(i int, r rank) error { _ = bad(i, r); return nil }
		require.ErrorContains(t, grouped(ranks, forgets), "rank 1 of 2")
		boom := errors.New("boom")
		for i, r := range ranks {
			issue := func(b *nccl.Batch) error { return nccl.AllReduce(b.On(r.c), r.s, xs[i], xs[i], nccl.Sum) }
			require.ErrorIs(t, nccl.Group(func(b *nccl.Batch) error { return errors.Join(issue(b), boom) }), boom)
			require.Panics(t, func() { _ = nccl.Group(func(b *nccl.Batch) error { _ = issue(b); panic(boom) }) })
		}
		require.Equal(t, in, contents(t, ranks, xs))
		require.NoError(t, nccl.Group(func(b *nccl.Batch) error { return nil }))
		require.NoError(t, reduceAll(ranks, xs, nccl.Sum))
		requireAll(t, ranks, xs, sum(in))
	})
}

// Operations that are issued on communicators while a batch is open do not belong to it.
func TestOperationsBesideABatch(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		xs, in := buffers(t, ranks, 16)
		boom := errors.New("boom")
		require.ErrorIs(t, nccl.Group(func(b *nccl.Batch) error {
			if err := nccl.AllReduce(b.On(ranks[0].c), ranks[0].s, xs[0], xs[0], nccl.Sum); err != nil {
				return err
			}
			each(t, devs, func(i int) error { return nccl.AllReduce(ranks[i].c, ranks[i].s, xs[i], xs[i], nccl.Sum) })
			return boom
		}), boom)
		requireAll(t, ranks, xs, sum(in))
	})
}

// Groups with the same communicators in any order do not wait for each other: the
// goroutines of a process share one rank each of two communicators.
func TestGroupsOfSharedCommunicators(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	a, b := connect(t, devs)[0], connect(t, devs)[0]
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		x := room[float32](t, a.s, 8)
		wg.Go(func() {
			g := rand.New(rand.NewPCG(uint64(i), 0))
			for range 200 {
				order := []rank{a, b}
				if g.IntN(2) == 0 {
					order = []rank{b, a}
				}
				errs[i] = errors.Join(errs[i], grouped(order, func(_ int, r rank) error { return nccl.AllReduce(r.on(), a.s, x, x, nccl.Max) }))
			}
		})
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))
}

func TestGroupOfTwoSystems(t *testing.T) {
	a := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}))
	b := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}))
	xs, _ := buffers(t, a, 4)
	ys, _ := buffers(t, b, 4)
	require.ErrorContains(t, reduceAll(append(a, b...), append(xs, ys...), nccl.Sum), "are of two systems")
	require.ErrorContains(t, nccl.Group(func(b *nccl.Batch) error {
		return nccl.AllReduce(b.On(nil), a[0].s, xs[0], xs[0], nccl.Sum)
	}), "no communicator given")
	var none *nccl.Batch
	require.ErrorContains(t, nccl.AllReduce(none.On(a[0].c), a[0].s, xs[0], xs[0], nccl.Sum), "no communicator given")
	require.ErrorContains(t, none.Enqueue(), "no batch given")
	require.ErrorContains(t, nccl.Group(nil), "no function given")
}

// A communicator that ends before its group enqueues nothing of it.
func TestGroupOfAClosedCommunicator(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		a, b := connect(t, devs)[0], connect(t, devs)[0]
		xs, _ := buffers(t, []rank{a}, 8)
		require.ErrorIs(t, nccl.Group(func(batch *nccl.Batch) error {
			return errors.Join(nccl.AllReduce(batch.On(a.c), a.s, xs[0], xs[0], nccl.Sum), nccl.AllReduce(batch.On(b.c), b.s, xs[0], xs[0], nccl.Sum), b.c.Abort())
		}), device.ErrClosed)
		require.NoError(t, nccl.AllReduce(a.c, a.s, xs[0], xs[0], nccl.Sum), "its lock is free")
	})
}

// After a group whose ranks want different things all go on, also those before the first
// that is in the way.
func TestGroupAfterOneThatWasRefused(t *testing.T) {
	ranks := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3}))
	xs, in := buffers(t, ranks, 8)
	var mismatch *nccl.MismatchError
	require.ErrorAs(t, reduceAll(ranks, []memory.Slice[int64]{xs[0].Slice(0, 3), xs[1].Slice(0, 3), xs[2].Slice(0, 4)}, nccl.Sum), &mismatch)
	require.NoError(t, reduceAll(ranks, xs, nccl.Sum))
	requireAll(t, ranks, xs, sum(in))
}

// What a rank receives in a group overlaps with nothing else that it uses there, and what it
// sends with nothing that is written; with what is only read it may.
func TestGroupOfTransfersThatOverlap(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs[:2])
		xs, in := buffers(t, ranks, 12)
		ys, _ := buffers(t, ranks, 12)
		for name, issue := range map[string]func(i int, r rank) error{
			"two receives": func(i int, r rank) error {
				return errors.Join(nccl.Send(r.on(), r.s, xs[i].Slice(0, 4), 1-i), nccl.Send(r.on(), r.s, xs[i].Slice(4, 8), 1-i),
					nccl.Recv(r.on(), r.s, ys[i].Slice(0, 4), 1-i), nccl.Recv(r.on(), r.s, ys[i].Slice(3, 7), 1-i))
			},
			"in place": func(i int, r rank) error {
				return errors.Join(nccl.Send(r.on(), r.s, xs[i], 1-i), nccl.Recv(r.on(), r.s, xs[i], 1-i))
			},
			"to itself, shifted": func(i int, r rank) error {
				return errors.Join(nccl.Send(r.on(), r.s, xs[i].Slice(0, 8), i), nccl.Recv(r.on(), r.s, xs[i].Slice(4, 12), i))
			},
			"to itself, crosswise": func(i int, r rank) error {
				a, b := xs[i].Slice(0, 4), xs[i].Slice(4, 8)
				return errors.Join(nccl.Send(r.on(), r.s, a, i), nccl.Send(r.on(), r.s, b, i), nccl.Recv(r.on(), r.s, b, i), nccl.Recv(r.on(), r.s, a, i))
			},
			"to itself from another": func(i int, r rank) error {
				return errors.Join(nccl.Send(r.on(), r.s, xs[i].Slice(0, 4), i), nccl.Recv(r.on(), r.s, ys[i].Slice(0, 4), i),
					nccl.Send(r.on(), r.s, ys[i].Slice(4, 8), 1-i), nccl.Recv(r.on(), r.s, xs[i].Slice(0, 4), 1-i))
			},
			"two receives at one place": func(i int, r rank) error {
				y := ys[i].Slice(0, 4)
				return errors.Join(nccl.Send(r.on(), r.s, xs[i].Slice(0, 4), i), nccl.Recv(r.on(), r.s, y, i),
					nccl.Send(r.on(), r.s, xs[i].Slice(4, 8), i), nccl.Recv(r.on(), r.s, y, i))
			},
			"to itself, in a part": func(i int, r rank) error {
				return errors.Join(nccl.Send(r.on(), r.s, xs[i].Slice(0, 4), i), nccl.Recv(r.on(), r.s, xs[i].Slice(0, 3), i))
			},
			"a receive into what a collective reads": func(i int, r rank) error {
				return errors.Join(nccl.Send(r.on(), r.s, ys[i].Slice(0, 2), 1-i), nccl.Recv(r.on(), r.s, xs[i].Slice(5, 7), 1-i),
					nccl.AllGather(r.on(), r.s, ys[i].Slice(2, 12), xs[i].Slice(1, 6)))
			},
			"a receive into what is reduced": func(i int, r rank) error {
				return errors.Join(nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Sum), nccl.Send(r.on(), r.s, ys[i].Slice(0, 2), 1-i), nccl.Recv(r.on(), r.s, xs[i].Slice(2, 4), 1-i))
			},
			"a receive into uneven parts": func(i int, r rank) error {
				return errors.Join(nccl.AllToAllV(r.on(), r.s, ys[i].Slice(0, 3), []int{2 - i, 1 + i}, xs[i].Slice(0, 3), []int{2 - i, 1 + i}),
					nccl.Send(r.on(), r.s, xs[i].Slice(4, 5), 1-i), nccl.Recv(r.on(), r.s, xs[i].Slice(2, 3), 1-i))
			},
			"sending what a broadcast writes": func(i int, r rank) error {
				return errors.Join(nccl.Send(r.on(), r.s, xs[i].Slice(4*i, 4*i+4), i), nccl.Recv(r.on(), r.s, ys[i].Slice(0, 4), i),
					nccl.Broadcast(r.on(), r.s, xs[i].Slice(0, 4), ys[i].Slice(4, 8), 0))
			},
			"two all-reduces in place": func(i int, r rank) error {
				return errors.Join(nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Sum), nccl.AllReduce(r.on(), r.s, xs[i], xs[i], nccl.Sum))
			},
			"a broadcast of what is reduced": func(i int, r rank) error {
				return errors.Join(nccl.AllReduce(r.on(), r.s, xs[i].Slice(0, 4), ys[i].Slice(0, 4), nccl.Sum), nccl.Broadcast(r.on(), r.s, ys[i].Slice(4, 8), xs[i].Slice(0, 4), i))
			},
			"two results at one place": func(i int, r rank) error {
				return errors.Join(nccl.AllReduce(r.on(), r.s, xs[i].Slice(0, 4), ys[i].Slice(0, 4), nccl.Sum), nccl.AllReduce(r.on(), r.s, xs[i].Slice(3, 7), ys[i].Slice(4, 8), nccl.Sum))
			},
			"a receive within what is sent": func(i int, r rank) error {
				return errors.Join(nccl.Recv(r.on(), r.s, xs[i].Slice(9, 10), 1-i), nccl.Send(r.on(), r.s, xs[i].Slice(5, 6), 1-i),
					nccl.Send(r.on(), r.s, xs[i].Slice(2, 12), 1-i), nccl.Recv(r.on(), r.s, ys[i].Slice(0, 10), 1-i))
			},
		} {
			err := grouped(ranks, issue)
			require.ErrorIs(t, err, nccl.ErrorInvalidUsage, name)
			require.ErrorContains(t, err, "their buffers overlap", name)
			if devs[0].System().Backend() == "virtual" {
				require.Regexp(t, `batch_test.go:\d+\) and .*batch_test.go:\d+\), on rank`, err.Error(), name)
			}
			require.Equal(t, in, contents(t, ranks, xs), "nothing was enqueued")
		}
		require.NoError(t, grouped(ranks, func(i int, r rank) error {
			return errors.Join(nccl.Send(r.on(), r.s, xs[i].Slice(0, 8), 1-i), nccl.Send(r.on(), r.s, xs[i].Slice(4, 8), 1-i),
				nccl.Recv(r.on(), r.s, ys[i].Slice(4, 12), 1-i), nccl.Recv(r.on(), r.s, ys[i].Slice(0, 4), 1-i))
		}), "what is sent may overlap, and neighbours do not")
		for i, got := range contents(t, ranks, ys) {
			require.Equal(t, concat([][]int64{in[1-i][4:8], in[1-i][:8]}), got)
		}
		require.NoError(t, grouped(ranks, func(i int, r rank) error {
			return errors.Join(nccl.Send(r.on(), r.s, xs[i].Slice(0, 8), 1-i), nccl.AllReduce(r.on(), r.s, ys[i].Slice(8, 12), xs[i].Slice(4, 8), nccl.Sum),
				nccl.Recv(r.on(), r.s, ys[i].Slice(0, 8), 1-i), nccl.Send(r.on(), r.s, ys[i].Slice(0, 0), 1-i), nccl.Recv(r.on(), r.s, xs[i].Slice(2, 2), 1-i))
		}), "what is sent may be reduced beside, and neighbours and nothing do not overlap")
		for i, got := range contents(t, ranks, ys) {
			want := slices.Clone(in[1-i][:8])
			for k := range 4 {
				want = append(want, in[0][4+k]+in[1][4+k])
			}
			require.Equal(t, want, got)
		}
		require.NoError(t, grouped(ranks, func(i int, r rank) error {
			return errors.Join(nccl.Send(r.on(), r.s, xs[i], i), nccl.Recv(r.on(), r.s, xs[i], i))
		}), "to itself in place")
		require.Equal(t, in, contents(t, ranks, xs))
	})
}
