package memory_test

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

func newPool(t testing.TB, cfg *memory.PoolConfig) *memory.Pool {
	t.Helper()
	p := memory.NewPool(cfg)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return p
}

func makeIn(t testing.TB, p *memory.Pool, s *stream.Stream, n int) (x memory.Slice[byte]) {
	t.Helper()
	require.NoError(t, p.Use(s, func() (err error) {
		x, err = memory.Make[byte](s, n)
		return err
	}))
	return x
}

// What is freed in a pool is used again in it alone.
func TestPoolKeepsItsMemory(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True", "backend:cudaMallocAsync"} {
		t.Run(conf, func(t *testing.T) {
			eachFresh(t, conf, func(t *testing.T, d *device.Device) {
				s := newStream(t, d)
				p, q := newPool(t, nil), newPool(t, nil)
				require.NotEqual(t, p.ID(), q.ID(), "test_mempool_id")
				require.NotEqual(t, [2]uint64{}, p.ID())
				require.Zero(t, p.Reserved(), "costs nothing yet")
				x := makeIn(t, p, s, 1000)
				require.Equal(t, 1024, p.Allocated())
				require.Equal(t, 2*mib, p.Reserved())
				was := x.Ptr()
				require.NoError(t, x.Close())
				require.Equal(t, 2*mib, p.Reserved())
				for _, other := range []func() memory.Slice[byte]{
					func() memory.Slice[byte] { x, err := memory.Make[byte](s, 1000); require.NoError(t, err); return x },
					func() memory.Slice[byte] { return makeIn(t, q, s, 1000) },
				} {
					y := other()
					require.NotEqual(t, was, y.Ptr())
					require.NoError(t, y.Close())
				}
				y := makeIn(t, p, s, 1000)
				require.Equal(t, was, y.Ptr())
				require.NoError(t, y.Zero(s))
				list := p.Snapshot()
				require.Len(t, list, 1)
				require.Equal(t, p.ID(), list[0].Pool)
				require.EqualValues(t, 1024, list[0].AllocatedSize)
				all, err := memory.TakeSnapshot(d)
				require.NoError(t, err)
				require.True(t, slices.ContainsFunc(all.Segments, func(g memory.Segment) bool { return g.Pool == p.ID() && g.Address == list[0].Address }))
				require.NoError(t, y.Close())
				require.NoError(t, memory.EmptyCache(d))
				require.Equal(t, 2*mib, p.Reserved(), "an open pool keeps its memory (test_mempool_emptycache_multithread)")
				y = makeIn(t, p, s, 1000)
				require.Equal(t, was, y.Ptr())
				require.NoError(t, errors.Join(y.Close(), p.Close()))
				require.Zero(t, p.Reserved(), "a closed one nothing")
			})
		})
	}
}

// Uses are nested, and each is of one stream (test_nested_mempool,
// test_mempool_multithread).
func TestPoolUses(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s, o := newStream(t, d), newStream(t, d)
		p, q := newPool(t, nil), newPool(t, nil)
		var list []memory.Slice[byte]
		add := func(on *stream.Stream) error {
			x, err := memory.Make[byte](on, 512)
			list = append(list, x)
			return err
		}
		stop := errors.New("stop")
		require.NoError(t, p.Use(s, func() error {
			err := errors.Join(add(s), add(o))
			require.ErrorIs(t, q.Use(s, func() error { return errors.Join(add(s), p.Use(s, func() error { return add(s) }), stop) }), stop)
			return errors.Join(err, add(s))
		}))
		require.NoError(t, add(s))
		require.Equal(t, 3*512, p.Allocated())
		require.Equal(t, 512, q.Allocated())
		require.Panics(t, func() { _ = p.Use(s, func() error { panic("fn") }) })
		require.NoError(t, add(s))
		require.Equal(t, 3*512, p.Allocated(), "the use has ended")
		var wg sync.WaitGroup
		for range 4 {
			on := newStream(t, d)
			wg.Go(func() {
				for range 50 {
					err := p.Use(on, func() error {
						x, err := memory.Make[byte](on, 4096)
						return errors.Join(err, x.Zero(on), x.Close())
					})
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		require.Equal(t, 3*512, p.Allocated())
		for _, x := range list {
			require.NoError(t, x.Close())
		}
	})
}

// A pool that is closed gives back what nobody has, and the rest when it is closed.
func TestPoolClose(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True"} {
		t.Run(conf, func(t *testing.T) {
			eachFresh(t, conf, func(t *testing.T, d *device.Device) {
				s, o := newStream(t, d), newStream(t, d)
				p := memory.NewPool(nil)
				x, y := makeIn(t, p, s, 1000), makeIn(t, p, s, 30*mib)
				require.NoError(t, x.CopyFrom(s, slices.Repeat([]byte{7}, 1000)))
				require.NoError(t, y.Close())
				require.ErrorContains(t, p.Use(s, nil), "no function given")
				require.NoError(t, p.Use(s, func() error {
					require.NoError(t, p.Close())
					require.NoError(t, p.Close())
					_, err := memory.Make[byte](s, 10*mib)
					require.ErrorContains(t, err, "the memory pool was closed")
					return nil
				}))
				require.ErrorIs(t, p.Use(s, func() error { return nil }), device.ErrClosed)
				require.ErrorContains(t, p.Use(s, func() error { return nil }), "the pool: use after Close")
				require.ErrorContains(t, (*memory.Pool)(nil).Use(s, nil), "no pool given")
				require.EqualValues(t, 2*mib, statsOf(t, d).ReservedBytes.All.Current)
				out := make([]byte, 1000)
				require.NoError(t, x.CopyTo(s, out))
				require.Equal(t, slices.Repeat([]byte{7}, 1000), out)
				require.NoError(t, o.WaitStream(s))
				require.NoError(t, x.RecordStream(o))
				require.NoError(t, x.Zero(o))
				require.NoError(t, x.Close())
				require.NoError(t, memory.EmptyCache(d))
				require.Zero(t, statsOf(t, d).ReservedBytes.All.Current)
				require.NoError(t, s.Close())
				q := newPool(t, nil)
				require.ErrorIs(t, q.Use(s, func() error { return nil }), device.ErrClosed)
				require.ErrorContains(t, q.Use(nil, func() error { return nil }), "no stream given")
			})
		})
	}
}

// openStreams is an Allocator that wants streams which the driver knows.
type openStreams struct{ memory.Allocator }

func (a openStreams) Free(s *stream.Stream, ptr uint64, bytes int) error {
	err := gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result { return drv.StreamSynchronize(gpu.StreamOf(s).Raw()) })
	return errors.Join(err, a.Allocator.Free(s, ptr, bytes))
}

// A pool's segments come from its own Allocator (test_mempool_with_allocator).
func TestPoolAllocator(t *testing.T) {
	eachFresh(t, "expandable_segments:True", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		count := memory.Count(openStreams{memory.Limit(memory.Driver, 64*mib)})
		p := newPool(t, &memory.PoolConfig{Allocator: count})
		x := makeIn(t, p, s, 1000)
		y := makeIn(t, p, s, 1000)
		require.EqualValues(t, 1, count.Counts().Allocations.Current, "segments, not blocks")
		require.EqualValues(t, 2*mib, count.Counts().Bytes.Current)
		z := makeIn(t, p, s, 40*mib)
		require.NoError(t, z.Close())
		z = makeIn(t, p, s, 60*mib)
		require.EqualValues(t, 62*mib, count.Counts().Bytes.Current, "what is cached makes room when there is no more")
		require.ErrorIs(t, p.Use(s, func() error {
			_, err := memory.Alloc(s, 20*mib)
			oom, ok := errors.AsType[*memory.OutOfMemoryError](err)
			require.True(t, ok, "%v", err)
			require.EqualValues(t, oom.Allocated, oom.Private)
			return err
		}), device.ErrorOutOfMemory)
		require.NoError(t, errors.Join(x.Close(), y.Close(), z.Close()))
		short, err := stream.New(d, nil)
		require.NoError(t, err)
		x = makeIn(t, p, short, 1000)
		require.NoError(t, x.Zero(short))
		require.NoError(t, errors.Join(x.Close(), short.Close()))
		require.NoError(t, p.Close())
		require.Zero(t, count.Counts().Bytes.Current)
		require.EqualValues(t, count.Counts().Bytes.Allocated, count.Counts().Bytes.Freed)
	})
}

// The memory of a graph goes back when its last launch is over, on whichever stream.
func TestPoolAllocatorOfGraphs(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s, o := newStream(t, d), newStream(t, d)
		var freed atomic.Bool
		p := memory.NewPool(&memory.PoolConfig{Allocator: onFree{memory.Driver, &freed}})
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			x, err := memory.Make[int32](s, 1000)
			return errors.Join(err, x.Zero(s), x.Close())
		}, &graph.Config{Pool: p})
		require.NoError(t, err)
		require.NoError(t, p.Close())
		open := streamtest.Hold(t, o)
		require.NoError(t, g.Launch(o))
		closed := make(chan error, 1)
		go func() { closed <- g.Close() }()
		require.False(t, poll.UntilNoLaterThan(20*time.Millisecond, freed.Load))
		open()
		require.NoError(t, <-closed)
		require.True(t, freed.Load())
	})
}

// onFree notes that Free is called, before anything is waited for.
type onFree struct {
	memory.Allocator
	called *atomic.Bool
}

func (a onFree) Free(s *stream.Stream, ptr uint64, bytes int) error {
	a.called.Store(true)
	return a.Allocator.Free(s, ptr, bytes)
}

// Each block of a pool with NoSplit is a segment (test_mempool_no_split).
func TestPoolNoSplit(t *testing.T) {
	eachFresh(t, "expandable_segments:True", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		p := newPool(t, &memory.PoolConfig{NoSplit: true})
		x, y := makeIn(t, p, s, 1000), makeIn(t, p, s, 1000)
		require.Equal(t, 4*mib, p.Reserved())
		require.Equal(t, 4*mib, p.Allocated())
		for _, g := range p.Snapshot() {
			require.Len(t, g.Blocks, 1)
		}
		require.NoError(t, errors.Join(x.Close(), y.Close()))
	})
}

// Others may use what is free in a pool with UseOnOOM when there is nothing else,
// and of no other pool (test_mempool_with_use_on_oom,
// test_deleted_mempool_not_used_on_oom).
func TestPoolUseOnOOM(t *testing.T) {
	for _, use := range []bool{true, false} {
		eachFresh(t, "", func(t *testing.T, d *device.Device) {
			s := newStream(t, d)
			p := memory.NewPool(&memory.PoolConfig{UseOnOOM: use})
			big := makeIn(t, p, s, 100*mib)
			was := big.Ptr()
			require.NoError(t, big.Close())
			_, total, err := d.MemoryInfo()
			require.NoError(t, err)
			require.NoError(t, memory.SetFraction(d, float64(110*mib)/float64(total)))
			x, err := memory.Make[byte](s, 60*mib)
			if use {
				require.NoError(t, err)
				require.Equal(t, was, x.Ptr())
				require.NoError(t, x.Close())
			} else {
				require.ErrorIs(t, err, device.ErrorOutOfMemory, "the pool keeps its memory")
			}
			require.Equal(t, 100*mib, p.Reserved())
			require.NoError(t, p.Close())
			x, err = memory.Make[byte](s, 60*mib)
			require.NoError(t, err)
			require.EqualValues(t, 60*mib, statsOf(t, d).ReservedBytes.All.Current, "a closed pool is nobody's")
			require.NoError(t, x.Close())
		})
	}
}

// What is free in an open pool stays there when others find no memory, whatever they
// then do (test_mempool_limited_memory_with_allocator).
func TestOpenPoolsKeepTheirMemory(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		limit(t, d, 82*mib)
		kept, onOOM := newPool(t, nil), newPool(t, &memory.PoolConfig{UseOnOOM: true})
		x, y := makeIn(t, kept, s, 40*mib), makeIn(t, onOOM, s, 40*mib)
		was := y.Ptr()
		_, err := memory.Make[byte](s, 30*mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
		require.NoError(t, errors.Join(x.Close(), y.Close(), memory.EmptyCache(d)))
		require.Equal(t, []int{40 * mib, 40 * mib}, []int{kept.Reserved(), onOOM.Reserved()})
		z, err := memory.Make[byte](s, 30*mib)
		require.NoError(t, err)
		require.Equal(t, was, z.Ptr(), "of the pool that others may use")
		_, err = memory.Make[byte](s, 30*mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory, "the other pool keeps its memory")
		require.Equal(t, 40*mib, kept.Reserved())
		x = makeIn(t, kept, s, 40*mib)
		require.NoError(t, errors.Join(x.Close(), z.Close()))
	})
}

// The memory of a pool that NCCL has registered goes back when the pool is closed, and
// not before, also if the pool itself has no more.
func TestRegisteredPoolStaysMapped(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		limit(t, d, 82*mib)
		p := memory.NewPool(nil)
		unmapped := 0
		stop, err := inside.PoolOf(p).Watch(func(_ *device.Device, _, _ uint64, taken bool) error {
			if !taken {
				unmapped++
			}
			return nil
		})
		require.NoError(t, err)
		require.NoError(t, makeIn(t, p, s, 60*mib).Close())
		require.NoError(t, memory.EmptyCache(d))
		_, err = memory.Make[byte](s, 60*mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
		require.ErrorIs(t, p.Use(s, func() error { _, err := memory.Make[byte](s, 70*mib); return err }), device.ErrorOutOfMemory)
		require.Zero(t, unmapped)
		require.Equal(t, 60*mib, p.Reserved())
		require.NoError(t, p.Close())
		require.Equal(t, 1, unmapped)
		require.NoError(t, stop())
	})
}

// EmptyCache by several goroutines, each within a pool of its own, leaves the pools alone
// (test_mempool_emptycache_multithread).
func TestEmptyCacheWithinPools(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		var wg sync.WaitGroup
		for range 4 {
			s, p := newStream(t, d), newPool(t, nil)
			wg.Go(func() {
				for range 20 {
					if err := p.Use(s, func() error {
						x, err := memory.Make[byte](s, 1000)
						return errors.Join(err, x.Zero(s), x.Close(), memory.EmptyCache(d))
					}); err != nil {
						t.Error(err)
					}
					if n := p.Reserved(); n != 2*mib {
						t.Errorf("the pool has %d bytes, want %d", n, 2*mib)
					}
				}
			})
		}
		wg.Wait()
	})
}

// Two captures that share a pool share memory, which saves a segment
// (test_graph_two_successive); with pools of their own they do not.
func TestGraphsShareAPool(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		capture := func(p *memory.Pool) (g *graph.Exec, reserved int64) {
			_, reserved, _ = grown(t, d, func() {
				var err error
				g, err = graph.Capture([]*stream.Stream{s}, func() error {
					x, err := memory.Make[int32](s, 1000)
					return errors.Join(err, x.Zero(s), x.Close())
				}, &graph.Config{Pool: p})
				require.NoError(t, err)
			})
			return g, reserved
		}
		p := newPool(t, nil)
		first, n := capture(p)
		require.EqualValues(t, 2*mib, n)
		second, n := capture(p)
		require.Zero(t, n)
		third, n := capture(nil)
		require.EqualValues(t, 2*mib, n)
		require.NotEqual(t, first.Pool().ID(), third.Pool().ID())
		require.NoError(t, memory.EmptyCache(d))
		require.Equal(t, 2*mib, p.Reserved(), "launches use it, although it is free")
		for _, g := range []*graph.Exec{first, second, third} {
			require.NoError(t, g.Launch(s))
		}
		require.NoError(t, errors.Join(first.Close(), third.Close()))
		require.NoError(t, second.Launch(s))
		require.NoError(t, p.Close())
		require.NoError(t, second.Launch(s))
		require.EqualValues(t, 2*mib, statsOf(t, d).ReservedBytes.All.Current)
		require.NoError(t, second.Close())
		require.NoError(t, poll.Until(testgpu.Context(t), func() (bool, error) {
			s, err := memory.StatsOf(d)
			return s.ReservedBytes.All.Current == 0, err
		}), "the end of the last launch is noticed a little later")
	})
}
