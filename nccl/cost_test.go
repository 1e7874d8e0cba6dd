package nccl

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/ncclapi"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// An idleNCCL takes operations and does nothing, so that what Chorus adds to them
// can be measured.
type idleNCCL struct {
	ncclapi.API
	calls int
}

func (l *idleNCCL) GroupStart() ncclapi.Result { return ncclapi.Success }
func (l *idleNCCL) GroupEnd() ncclapi.Result   { return ncclapi.Success }

func (l *idleNCCL) Collective(c ncclapi.Call) ncclapi.Result {
	if c.Func == ncclapi.FuncAllReduce {
		l.calls++
	}
	return ncclapi.Success
}

// An idleRank is a communicator that enqueues nothing.
type idleRank struct {
	c    *Communicator
	s    *stream.Stream
	x, y memory.Slice[float32]
}

func newIdleRank(t testing.TB) *idleRank {
	cs, err := NewCommunicators(testgpu.Context(t), testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1}), nil)
	require.NoError(t, err)
	return makeIdle(t, cs[0])
}

func makeIdle(t testing.TB, c *Communicator) *idleRank {
	r := &idleRank{c: c}
	var err error
	r.s, err = stream.New(c.dev, nil)
	require.NoError(t, err)
	for _, x := range []*memory.Slice[float32]{&r.x, &r.y} {
		*x, err = memory.Make[float32](r.s, 64)
		require.NoError(t, err)
	}
	real := r.c.api
	r.c.api = &idleNCCL{API: real}
	r.c.marks.SetRequested(math.MaxInt64) // no more: the time decides how many, and they cost the device
	t.Cleanup(func() {
		r.c.api = real
		require.NoError(t, r.x.Close())
		require.NoError(t, r.y.Close())
		require.NoError(t, r.c.Close())
		require.NoError(t, r.s.Close())
	})
	return r
}

// newIdlePair returns rank 0 of two ranks of this process.
func newIdlePair(t testing.TB) *idleRank {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	cs, err := NewCommunicators(testgpu.Context(t), devs, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cs[1].Close()) })
	return makeIdle(t, cs[0])
}

// swap exchanges with the other rank.
func (r *idleRank) swap() error {
	return Group(func(b *Batch) error {
		if err := Send(b.On(r.c), r.s, r.x, 1); err != nil {
			return err
		}
		return Recv(b.On(r.c), r.s, r.y, 1)
	})
}

// ways are the forms in which operations are issued.
func (r *idleRank) ways() map[string]func() error {
	counts := []int{64}
	eight := func(b *Batch) error {
		for range 8 {
			if err := AllReduce(b.On(r.c), r.s, r.y, r.x, Sum); err != nil {
				return err
			}
		}
		return nil
	}
	again := NewBatch()
	configured := &configured{comm: r.c, config: callConfig{raw: ncclapi.NewCollConfig(23203)}}
	return map[string]func() error{
		"one":        func() error { return AllReduce(r.c, r.s, r.y, r.x, Sum) },
		"configured": func() error { return AllReduce(configured, r.s, r.y, r.x, Sum) },
		"group":      func() error { return Group(eight) },
		"batch": func() error {
			if err := eight(again); err != nil {
				return err
			}
			return again.Enqueue()
		},
		"uneven": func() error { return AllToAllV(r.c, r.s, r.y, counts, r.x, counts) },
		"in groups": func() error {
			return Group(func(b *Batch) error { return AllToAllV(b.On(r.c), r.s, r.y, counts, r.x, counts) })
		},
	}
}

func TestOperationsDoNotAllocate(t *testing.T) {
	r := newIdleRank(t)
	for name, issue := range r.ways() {
		require.NoError(t, issue(), name)
		pooled := name != "one" && name != "batch"
		requireNoAllocation(t, name, pooled, issue)
	}
	require.Positive(t, r.c.api.(*idleNCCL).calls)

	p := newIdlePair(t)
	require.NoError(t, p.swap())
	requireNoAllocation(t, "transfers", true, p.swap)
}

// requireNoAllocation checks that issue allocates nothing. Under the race detector it skips
// what takes a batch from a sync.Pool, which drops batches at random there.
func requireNoAllocation(t *testing.T, name string, pooled bool, issue func() error) {
	if pooled && testhost.On {
		return
	}
	require.Zero(t, testgpu.Allocs(500, func() { _ = issue() }), name)
}

// Many groups may be open at once.
func TestEachGroupHasItsBatch(t *testing.T) {
	r := newIdleRank(t)
	const goroutines = 256
	var open, done sync.WaitGroup
	open.Add(goroutines)
	for i := range goroutines {
		done.Go(func() {
			err := Group(func(b *Batch) (err error) {
				open.Done()
				open.Wait()
				for range i {
					err = errors.Join(err, AllReduce(b.On(r.c), r.s, r.y, r.x, Sum))
				}
				if n := len(b.ops); n != i {
					err = errors.Join(err, fmt.Errorf("the batch of goroutine %d has %d operations", i, n))
				}
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	done.Wait()
}

func BenchmarkOperation(b *testing.B) {
	r, p := newIdleRank(b), newIdlePair(b)
	r.c.places, p.c.places = false, false // stacks that only virtual devices record cost more than all the rest
	ways := r.ways()
	ways["transfers"] = p.swap
	for _, name := range []string{"one", "group", "batch", "transfers"} {
		issue := ways[name]
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := issue(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
