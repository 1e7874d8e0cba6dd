package nccl_test

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// A taker is a Substitute that takes all-reduces, and does nothing with them.
type taker struct {
	taken   atomic.Int32
	aborted atomic.Bool
}

func (x *taker) Takes(c nccl.Collective) nccl.Service {
	if c.Kind == nccl.AllReduceKind {
		return nccl.Instead
	}
	return nccl.Nothing
}
func (x *taker) Enqueue(*stream.Stream, nccl.Collective) error {
	x.taken.Add(1)
	return nil
}
func (x *taker) Lend(*stream.Stream, nccl.Collective) (dst, src uint64, err error) { return 0, 0, nil }
func (x *taker) Return(*stream.Stream, nccl.Collective, bool) error                { return nil }
func (x *taker) Together([]*stream.Stream, []nccl.Collective) error                { return nil }
func (x *taker) Abort()                                                            { x.aborted.Store(true) }

// Where NCCL refuses its part of a group, what a Substitute has enqueued before does not
// count as refused: its communicators end, since other ranks may wait for the rest.
func TestGroupThatNCCLRefusesInPart(t *testing.T) {
	for name, c := range map[string]struct {
		fault string
		early bool // the transfers come before the collectives
		taken int32
	}{
		"at its end":                {"ncclGroupEnd#2=ncclInvalidUsage", false, 1},
		"an operation":              {"ncclSend#2=ncclInvalidUsage", false, 1},
		"one before the collective": {"ncclSend#2=ncclInvalidUsage", true, 0},
		"at its beginning":          {"ncclGroupStart#2=ncclInvalidUsage", false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			ranks := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: c.fault}))
			xs, _ := buffers(t, ranks, 24)
			ys, _ := buffers(t, ranks, 24)
			takers := []*taker{{}, {}}
			for i, k := range ranks {
				k.c.Substitute(k.s, takers[i])
			}
			transfer := func() error {
				if err := nccl.Send(ranks[0].c, ranks[0].s, ys[0], 1); err != nil {
					return err
				}
				return nccl.Recv(ranks[1].c, ranks[1].s, ys[1], 0)
			}
			group := func() error {
				return nccl.Group(ranks[0].c, func() error {
					if c.early {
						if err := transfer(); err != nil {
							return err
						}
					}
					for i, k := range ranks {
						if err := nccl.AllReduce(k.c, k.s, xs[i], xs[i], nccl.Sum); err != nil {
							return err
						}
					}
					if c.early {
						return nil
					}
					return transfer()
				})
			}
			require.NoError(t, group())
			require.ErrorIs(t, group(), nccl.ErrorInvalidUsage)
			for i, k := range ranks {
				require.Equal(t, 1+c.taken, takers[i].taken.Load())
				if c.taken == 0 {
					require.NoError(t, k.c.Err(), "nothing was enqueued")
					require.EqualValues(t, 1, k.c.Progress().Issued.Collective)
					continue
				}
				until(t, func() bool { return k.c.Err() != nil })
				require.ErrorIs(t, k.c.Err(), nccl.ErrorInvalidUsage)
				until(t, takers[i].aborted.Load)
				require.EqualValues(t, 2, k.c.Progress().Issued.Collective, "the collective counts")
			}
			if c.taken == 0 {
				require.NoError(t, group(), "after which all goes on")
			}
		})
	}
}

// An atOnce is a Substitute that takes all-gathers where it gets those of all ranks, and
// does nothing with them.
type atOnce struct {
	mu      sync.Mutex
	asked   []bool // of Together
	streams [][]*stream.Stream
}

func (x *atOnce) Takes(c nccl.Collective) nccl.Service {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.asked = append(x.asked, c.Together)
	if c.Together && c.Kind == nccl.AllGatherKind {
		return nccl.Whole
	}
	return nccl.Nothing
}
func (x *atOnce) Enqueue(*stream.Stream, nccl.Collective) error { return nil }
func (x *atOnce) Lend(*stream.Stream, nccl.Collective) (dst, src uint64, err error) {
	return 0, 0, nil
}
func (x *atOnce) Return(*stream.Stream, nccl.Collective, bool) error { return nil }
func (x *atOnce) Together(ss []*stream.Stream, _ []nccl.Collective) error {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.streams = append(x.streams, ss)
	return nil
}
func (x *atOnce) Abort() {}

// TestSubstituteOfAllRanks issues all-gathers of two communicators that share their
// devices in groups of all shapes: a Substitute gets those of all ranks at once only where
// a group has one of each rank of one communicator and nothing else, and is asked with
// that in mind. All others are NCCL's, and right.
func TestSubstituteOfAllRanks(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		a, b := connect(t, devs), connect(t, devs)
		src, hs := buffers(t, a, 24)
		whole := slices.Concat(hs...)
		in, _ := buffers(t, a, 24)
		dst := map[*nccl.Communicator]memory.Slice[int64]{}
		for _, ranks := range [][]rank{a, b} {
			outs, _ := buffers(t, ranks, 48)
			for i, r := range ranks {
				dst[r.c] = outs[i]
				require.NoError(t, r.s.WaitStream(a[i].s))
			}
		}
		beside := make([]*stream.Stream, 2)
		for i := range beside {
			var err error
			beside[i], err = stream.New(devs[i], nil)
			require.NoError(t, err)
			defer beside[i].Close()
			require.NoError(t, beside[i].WaitStream(a[i].s))
			require.NoError(t, beside[i].WaitStream(b[i].s))
		}
		on := func(s *stream.Stream, r rank) func() error {
			return func() error { return nccl.AllGather(r.c, s, dst[r.c], src[r.c.Rank()]) }
		}
		gather := func(r rank) func() error { return on(r.s, r) }
		send := func() error { return nccl.Send(a[0].c, a[0].s, src[0], 1) }
		recv := func() error { return nccl.Recv(a[1].c, a[1].s, in[1], 0) }
		reduce := func(i int) func() error {
			return func() error { return nccl.AllReduce(a[i].c, a[i].s, dst[a[i].c], dst[a[i].c], nccl.Max) }
		}
		type group []func() error
		for name, c := range map[string]struct {
			groups []group // at the same time
			asked  []bool
			whole  bool
		}{
			"all":                      {[]group{{gather(a[0]), gather(a[1])}}, []bool{true, true}, true},
			"in another order":         {[]group{{gather(a[1]), gather(a[0])}}, []bool{true, true}, true},
			"of another kind":          {[]group{{reduce(0), reduce(1)}}, []bool{true, true}, false},
			"of two kinds":             {[]group{{gather(a[0]), reduce(1)}}, []bool{false, false}, false},
			"a group each":             {[]group{{gather(a[0])}, {gather(a[1])}}, []bool{false, false}, false},
			"each twice":               {[]group{{gather(a[0]), gather(a[1]), gather(a[0]), gather(a[1])}}, nil, false},
			"twice of each by itself":  {[]group{{gather(a[0]), gather(a[0])}, {gather(a[1]), gather(a[1])}}, nil, false},
			"beside transfers":         {[]group{{gather(a[0]), gather(a[1]), send, recv}}, []bool{false, false}, false},
			"of two communicators":     {[]group{{gather(a[0]), gather(b[1])}, {gather(b[0]), gather(a[1])}}, []bool{false, false, false, false}, false},
			"all of two communicators": {[]group{{gather(a[0]), gather(b[0]), gather(a[1]), gather(b[1])}}, []bool{false, false, false, false}, false},
			"one on another stream":    {[]group{{gather(a[0]), on(beside[1], a[1])}}, []bool{false}, false},
			"all on other streams":     {[]group{{on(beside[0], a[0]), on(beside[1], a[1])}}, nil, false},
		} {
			x := &atOnce{}
			for _, r := range slices.Concat(a, b) {
				r.c.Substitute(r.s, x)
				require.NoError(t, dst[r.c].Zero(r.s))
				require.NoError(t, beside[r.c.Rank()].WaitStream(r.s))
			}
			errs := make([]error, len(c.groups))
			var all sync.WaitGroup
			for i, calls := range c.groups {
				all.Go(func() {
					errs[i] = nccl.Group(a[0].c, func() error {
						for _, call := range calls {
							if err := call(); err != nil {
								return err
							}
						}
						return nil
					})
				})
			}
			all.Wait()
			require.Equal(t, c.asked, x.asked, name)
			if name == "of two kinds" {
				require.ErrorIs(t, errs[0], nccl.ErrorInvalidUsage)
				require.Empty(t, x.streams)
				continue
			}
			require.NoError(t, errors.Join(errs...), name)
			for _, s := range append(beside, b[0].s, b[1].s) {
				require.NoError(t, s.Sync(testgpu.Context(t)))
			}
			if c.whole {
				require.Equal(t, [][]*stream.Stream{{a[0].s, a[1].s}}, x.streams, name)
				continue
			}
			require.Empty(t, x.streams, name)
			if len(c.asked) == 2 && c.asked[0] || name == "beside transfers" {
				continue // they do not gather alone
			}
			for _, r := range a {
				got := make([]int64, len(whole))
				require.NoError(t, dst[r.c].CopyTo(r.s, got))
				require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
				require.Equal(t, whole, got, name)
			}
		}
	})
}

// TestServicesOfTheLastCollectives tells what was taken of the last collectives, without
// transfers and what was refused.
func TestServicesOfTheLastCollectives(t *testing.T) {
	r := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "ncclBroadcast#2=ncclInvalidUsage"}))[0]
	first, list := r.c.Services(5)
	require.Zero(t, first)
	require.Empty(t, list)
	r.c.Substitute(r.s, &taker{})
	xs, _ := buffers(t, []rank{r}, 24)
	x := xs[0]
	broadcast := func() error { return nccl.Broadcast(r.c, r.s, x, x, 0) }
	reduce := func() error { return nccl.AllReduce(r.c, r.s, x, x, nccl.Sum) }
	self := func() error {
		return nccl.Group(r.c, func() error {
			return errors.Join(nccl.Send(r.c, r.s, x.Slice(0, 8), 0), nccl.Recv(r.c, r.s, x.Slice(8, 16), 0))
		})
	}
	for _, call := range []func() error{reduce, self, broadcast, reduce, self} {
		require.NoError(t, call())
	}
	require.ErrorIs(t, broadcast(), nccl.ErrorInvalidUsage)
	for _, call := range []func() error{reduce, self} {
		require.NoError(t, call())
	}
	all := []nccl.Service{nccl.Instead, nccl.Nothing, nccl.Instead, nccl.Instead}
	for n := 1; n < 6; n++ {
		first, list := r.c.Services(n)
		require.Equal(t, all[max(4-n, 0):], list)
		require.EqualValues(t, max(5-n, 1), first)
	}
}

// A lender lends the buffers that the operation has, or panics.
type lender struct {
	taker
	panics         bool
	lent, returned atomic.Int32
}

func (x *lender) Takes(nccl.Collective) nccl.Service {
	if x.panics {
		panic("a Substitute")
	}
	return nccl.Lending
}
func (x *lender) Lend(_ *stream.Stream, c nccl.Collective) (dst, src uint64, err error) {
	x.lent.Add(1)
	return c.Dst, c.Src, nil
}
func (x *lender) Return(_ *stream.Stream, _ nccl.Collective, taken bool) error {
	if taken {
		x.returned.Add(1)
	} else {
		x.returned.Add(1000)
	}
	return nil
}

// What a Substitute has lent it gets back, by itself, in a group and where NCCL refuses; and
// a panic of it leaves the communicator as it was.
func TestLent(t *testing.T) {
	for _, c := range []struct {
		fault    string
		grouped  bool
		returned int32
	}{
		{"", false, 1}, {"", true, 1}, {"ncclAllReduce#1=ncclInvalidUsage", false, 1000}, {"ncclAllReduce#1=ncclInvalidUsage", true, 1000},
	} {
		r := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: c.fault}))[0]
		xs, _ := buffers(t, []rank{r}, 8)
		x := &lender{}
		r.c.Substitute(r.s, x)
		once := func() error { return nccl.AllReduce(r.c, r.s, xs[0], xs[0], nccl.Sum) }
		issue := once
		if c.grouped {
			issue = func() error { return nccl.Group(r.c, once) }
		}
		require.Equal(t, c.fault != "", issue() != nil)
		require.EqualValues(t, 1, x.lent.Load())
		require.Equal(t, c.returned, x.returned.Load(), c)
		x.panics = true
		require.Panics(t, func() { _ = issue() })
		x.panics = false
		require.NoError(t, issue())
	}
}
