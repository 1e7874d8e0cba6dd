package nccl_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

func TestWindows(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		pool := memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})
		defer pool.Close()
		bufs := make([]*memory.Buffer, 2)
		for i, r := range ranks {
			require.NoError(t, pool.Use(r.s, func() (err error) {
				bufs[i], err = memory.Alloc(r.s, 2<<20)
				return err
			}))
			defer bufs[i].Close()
		}
		windows := make([]*nccl.Window, 2)
		each(t, devs, func(i int) (err error) {
			windows[i], err = ranks[i].c.RegisterWindow(testgpu.Context(t), bufs[i], 1<<20, true)
			return err
		})
		xs := make([]memory.Slice[float32], 2)
		for i, r := range ranks {
			var err error
			xs[i], err = memory.View[float32](bufs[i], 0, 4)
			require.NoError(t, err)
			require.NoError(t, xs[i].CopyFrom(r.s, []float32{1, 2, 3, float32(i)}))
		}
		require.NoError(t, reduceAll(ranks, xs, nccl.Sum))
		requireAll(t, ranks, xs, []float32{2, 4, 6, 1})
		_, err := ranks[0].c.RegisterWindow(testgpu.Context(t), bufs[1], 16, true)
		require.ErrorContains(t, err, "the buffer is of")
		_, err = ranks[0].c.RegisterWindow(testgpu.Context(t), bufs[0], 4<<20, true)
		require.ErrorContains(t, err, "ncclCommWindowRegister on rank 0 of 2")
		each(t, devs, func(i int) error { return windows[i].Close() })
		require.NoError(t, windows[0].Close())

		reg, err := ranks[0].c.Register(bufs[0])
		require.NoError(t, err)
		require.NoError(t, reg.Close())
		require.NoError(t, reg.Close())
		reg, err = ranks[0].c.Register(bufs[0])
		require.NoError(t, err)
		require.NoError(t, ranks[0].c.Close())
		require.NoError(t, reg.Close(), "the communicator has ended it")
	})
}

// The memory of a window, and of a registration, stays allocated until they are closed, although its buffer is closed.
func TestRegisteredMemoryStaysAllocated(t *testing.T) {
	for _, by := range []string{"window", "registration", "communicator"} {
		t.Run(by, func(t *testing.T) {
			testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
				ranks := connect(t, devs)
				var xs [2]*memory.Buffer
				var closers [2]func() error
				pools := make([]*memory.Pool, 2)
				for i, r := range ranks {
					pools[i] = memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})
					require.NoError(t, pools[i].Use(r.s, func() (err error) { xs[i], err = memory.Alloc(r.s, 8192); return err }))
					defer pools[i].Close()
				}
				first, err := memory.View[byte](xs[0], 0, 1)
				require.NoError(t, err)
				each(t, devs, func(i int) error {
					if by == "registration" {
						r, err := ranks[i].c.Register(xs[i])
						closers[i] = r.Close
						return err
					}
					w, err := ranks[i].c.RegisterWindow(testgpu.Context(t), xs[i], 8192, true)
					closers[i] = w.Close
					return err
				})
				for _, x := range xs {
					require.NoError(t, x.Close())
				}
				s := ranks[0].s
				next := func() (ptr uint64) {
					require.NoError(t, pools[0].Use(s, func() error {
						y, err := memory.Make[byte](s, 8192)
						ptr = y.Ptr()
						return errors.Join(err, y.Close())
					}))
					return ptr
				}
				require.NotEqual(t, first.Ptr(), next(), "another owner gets other memory")
				require.ErrorIs(t, first.Zero(s), device.ErrClosed)
				if by == "communicator" {
					require.NoError(t, ranks[0].c.Abort())
				} else {
					g, err := graph.Begin(s, nil)
					require.NoError(t, err)
					var captured *device.CaptureError
					require.ErrorAs(t, closers[0](), &captured)
					_ = g.Abort()
					require.NoError(t, closers[0]())
				}
				require.Equal(t, first.Ptr(), next(), "the memory is free")
				require.NoError(t, closers[0]())
				require.NoError(t, closers[1]())
			})
		})
	}
}

func TestWindowsThatDiffer(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: newest})
	ranks := connect(t, devs)
	xs := allocated[int64](t, ranks, 1024)
	errs := make([]error, 2)
	each(t, devs, func(i int) error {
		_, errs[i] = ranks[i].c.RegisterWindow(testgpu.Context(t), xs[i].Buffer(), 512<<i, true)
		return nil
	})
	for _, err := range errs {
		require.ErrorContains(t, err, "rank 0 has a symmetric window of 512 bytes, rank 1 has a symmetric window of 1024 bytes")
	}
	windows := make([]*nccl.Window, 2)
	each(t, devs, func(i int) (err error) {
		windows[i], err = ranks[i].c.RegisterWindow(testgpu.Context(t), xs[i].Buffer(), 64, false)
		return err
	})
	p, err := windows[1].Ptr()
	require.NoError(t, err)
	require.Equal(t, xs[1].Ptr(), p)

	props, err := ranks[1].c.Properties()
	require.NoError(t, err)
	require.Equal(t, nccl.Properties{LSATeams: 1, OneSided: true}, props)
	r, w := ranks[0], windows[0]
	for name, c := range map[string]struct {
		err  error
		text string
	}{
		"put from elsewhere": {nccl.Put(w, r.s, xs[0].Slice(100, 102), 1, 0), "does not lie in a window"},
		"put too far":        {nccl.Put(w, r.s, xs[0].Slice(0, 2), 1, 60), "16 bytes at byte 60: the window has 64"},
		"put to a":           {nccl.Put(w, r.s, xs[0].Slice(0, 2), 2, 0), "rank 2 does not exist"},
		"put of":             {nccl.Put(w, r.s, xs[1].Slice(0, 2), 1, 0), "the buffer is of"},
		"wait for 0":         {nccl.WaitSignal(r.c, r.s, 1, 0), "0 signals: want one or more"},
		"other stream":       {nccl.Signal(r.c, ranks[1].s, 1), "use a stream of that device"},
		"closed":             {nccl.Put[int64](nil, r.s, xs[0], 1, 0), "the window is closed"},
	} {
		require.ErrorContains(t, c.err, c.text, name)
	}
	require.NoError(t, ranks[0].c.Close())
	for _, w := range windows {
		require.NoError(t, w.Close())
	}
}

func TestWindowEndsWithContext(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	ranks := connect(t, devs)
	xs := allocated[int64](t, ranks, 8)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	_, err := ranks[1].c.RegisterWindow(ctx, xs[1].Buffer(), 64, true)
	require.ErrorIs(t, err, context.DeadlineExceeded)
}

func TestSimulate(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		ranks := connect(t, devs)
		total(t, ranks)
		times := make([]time.Duration, 2)
		for k, n := range []int{1 << 10, 1 << 22} {
			xs, in := buffers(t, ranks, n)
			var err error
			times[k], err = nccl.Simulate(func(b *nccl.Batch) (err error) {
				for i, r := range ranks {
					err = errors.Join(err, nccl.AllReduce(b.On(r.c), r.s, xs[i], xs[i], nccl.Sum))
				}
				return err
			})
			require.NoError(t, err)
			require.Equal(t, in[0][:8], read(t, ranks[0].s, xs[0].Slice(0, 8)), "nothing ran")
		}
		t.Logf("8 KiB: %v, 32 MiB: %v", times[0], times[1])
		require.Greater(t, times[0], 100*time.Nanosecond)
		require.Less(t, times[0], time.Millisecond)
		require.Greater(t, times[1], times[0])
		require.Less(t, times[1], 100*time.Millisecond)
		none, err := nccl.Simulate(func(*nccl.Batch) error { return nil })
		require.NoError(t, err)
		require.Zero(t, none)
	})
}

func TestParameters(t *testing.T) {
	t.Setenv("NCCL_ALGO", "ring")
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: newest})[0]
	keys, err := nccl.Parameters(dev)
	require.NoError(t, err)
	require.Contains(t, keys, "NCCL_ALGO")
	v, err := nccl.Parameter(dev, "NCCL_ALGO")
	require.NoError(t, err)
	require.Equal(t, "ring", v)
	_, err = nccl.Parameter(dev, "NCCL_MISSPELT")
	require.ErrorIs(t, err, nccl.ErrorInvalidArgument)
	_, err = nccl.Parameter(dev, "NCCL_ALGO\x00")
	require.ErrorIs(t, err, nccl.ErrorInvalidArgument)
	require.ErrorContains(t, err, "contains a NUL byte")
	_, err = nccl.IntParameter(dev, "NCCL_ALGO\x00")
	require.ErrorContains(t, err, "contains a NUL byte")
}

// NCCL would see the text before the NUL byte only.
func TestConfigWithNUL(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualNCCL: newest})
	for want, cfg := range map[string]nccl.Config{
		`the field Name, "a\x00b", contains a NUL byte`:        {Name: "a\x00b"},
		`the field NetName, "Socket\x00", contains a NUL byte`: {NetName: "Socket\x00"},
	} {
		_, err := nccl.NewCommunicators(testgpu.Context(t), devs, &cfg)
		require.ErrorContains(t, err, want)
		require.ErrorIs(t, err, nccl.ErrorInvalidArgument)
	}
}

// What the loaded NCCL lacks is an error that names the version, before anything
// happens.
func TestCapabilities(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: "2.23.4"})
	ranks := connect(t, devs)
	xs, _ := buffers(t, ranks, 8)
	c, s, b := ranks[0].c, ranks[0].s, xs[0].Buffer()
	ctx := testgpu.Context(t)
	id, err := nccl.NewUniqueID(devs[0])
	require.NoError(t, err)
	config := func(cfg nccl.Config) error {
		_, err := nccl.NewCommunicator(ctx, devs[0], id, 0, 1, &cfg)
		return err
	}
	second := func(_ any, err error) error { return err }
	for since, list := range map[string][]error{
		"2.27.3": {
			second(c.Shrink(ctx, nccl.ShrinkDefault, []int{1}, nil)), second(c.RegisterWindow(ctx, b, 8, false)),
			config(nccl.Config{CollNet: new(true)}), config(nccl.Config{CTAPolicy: new(1)}), config(nccl.Config{ShrinkShare: new(true)}),
			config(nccl.Config{NVLSCTAs: new(4)}),
		},
		"2.28.7": {c.Revoke()},
		"2.29.2": {
			second(c.GrowID()), second(c.Grow(ctx, 3, &id, nil)), second(nccl.JoinGrown(ctx, devs[0], id, 0, 2, nil)), second(c.Properties()),
			nccl.Signal(c, s, 1), nccl.WaitSignal(c, s, 1, 1), config(nccl.Config{GraphUsageMode: new(1)}), config(nccl.Config{NumRMACtx: new(1)}),
		},
		"2.29.7": {c.Suspend(), c.Resume(), second(c.MemoryStats())},
		"2.26.2": {config(nccl.Config{TrafficClass: new(1)})},
		"2.28.3": {config(nccl.Config{NChannelsPerNetPeer: new(1)}), config(nccl.Config{NVLinkCentricSched: new(true)})},
		"2.30.3": {config(nccl.Config{MaxP2PPeers: new(1)})},
		"2.30.4": {second(nccl.Parameter(devs[0], "NCCL_DEBUG")), second(nccl.Parameters(devs[0]))},
		"2.30.7": {config(nccl.Config{GraphStreamOrdering: new(1)})},
		"2.31.2": {
			config(nccl.Config{LaunchOrderImplicit: new(true)}), config(nccl.Config{NumRMASignals: new(2)}),
			config(nccl.Config{RMAEagerInit: new(true)}), config(nccl.Config{HostCFTMode: new(2)}),
			second(nccl.With(c, &nccl.CallConfig{})),
		},
		"2.32.3": {config(nccl.Config{NVLSHostMode: new(1)})},
	} {
		for i, err := range list {
			var u *device.UnsupportedError
			require.ErrorAs(t, err, &u, "%s, %d", since, i)
			require.Equal(t, "NCCL "+since, u.Need, err)
			require.Equal(t, "NCCL 2.23.4", u.Have)
		}
	}
	total(t, ranks)
	one, err := nccl.NewCommunicator(ctx, devs[0], id, 0, 1, &nccl.Config{CGAClusterSize: new(2), MinCTAs: new(1), MaxCTAs: new(4), SplitShare: new(true), Name: "one"})
	require.NoError(t, err)
	require.NoError(t, one.Close())
}

// TestSymmetricKernelsThatAreWrong refuses what NCCL would spoil in symmetric windows,
// before it is enqueued on any rank, and nothing else.
func TestSymmetricKernelsThatAreWrong(t *testing.T) {
	for version, wrong := range map[string]bool{"2.28.3": true, "2.28.7": false} {
		t.Run(version, func(t *testing.T) {
			ranks := connect(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualNCCL: version}))
			xs, windows := windowsOf(t, ranks)
			gather := func(n int) func(on onto, i int) error {
				return func(on onto, i int) error {
					return nccl.AllGather(on(ranks[i].c), ranks[i].s, xs[i].Slice(0, 2*n), xs[i].Slice(i*n, i*n+n))
				}
			}
			scatter := func(n int, op nccl.Op) func(on onto, i int) error {
				return func(on onto, i int) error {
					return nccl.ReduceScatter(on(ranks[i].c), ranks[i].s, xs[i].Slice(i*n, i*n+n), xs[i].Slice(0, 2*n), op)
				}
			}
			reduce := func(on onto, i int) error {
				return nccl.AllReduce(on(ranks[i].c), ranks[i].s, xs[i].Slice(9, 12), xs[i].Slice(9, 12), nccl.Sum)
			}
			outside := func(on onto, i int) error {
				return nccl.AllGather(on(ranks[i].c), ranks[i].s, room[float32](t, ranks[i].s, 6), xs[i].Slice(16, 19))
			}
			for name, c := range map[string]struct {
				ops   []func(on onto, i int) error
				wrong string // "" is none
			}{
				"all-gather of 12 bytes":           {[]func(onto, int) error{gather(3)}, "12 bytes of each rank in symmetric windows: NCCL 2.28.3 corrupts sizes that are not a multiple of 8 bytes"},
				"all-gather of 16 bytes":           {[]func(onto, int) error{gather(4)}, ""},
				"all-gather to other memory":       {[]func(onto, int) error{outside}, ""},
				"reduce-scatter of 4 bytes":        {[]func(onto, int) error{scatter(1, nccl.Sum)}, "4 bytes of each rank"},
				"reduce-scatter by an old kernel":  {[]func(onto, int) error{scatter(1, nccl.Max)}, ""},
				"all-reduce of 12 bytes":           {[]func(onto, int) error{reduce}, ""},
				"two in a group":                   {[]func(onto, int) error{gather(4), reduce}, "ncclAllReduce on rank 0 of 2: it is in one group with another operation, ncclAllGather, both in symmetric windows: NCCL 2.28.3 corrupts the results"},
				"one in a group beside other ones": {[]func(onto, int) error{gather(4), outside}, ""},
			} {
				err := nccl.Group(func(b *nccl.Batch) (err error) {
					for _, op := range c.ops {
						err = errors.Join(err, op(b.On, 0), op(b.On, 1))
					}
					return err
				})
				if c.wrong == "" || !wrong {
					require.NoError(t, err, name)
					continue
				}
				require.ErrorContains(t, err, c.wrong, name)
				require.ErrorIs(t, err, nccl.ErrorInvalidUsage, name)
			}
			for i, r := range ranks {
				require.NoError(t, r.c.Wait(testgpu.Context(t), r.s))
				require.NoError(t, windows[i].Close())
			}
			require.NoError(t, nccl.Group(func(b *nccl.Batch) error {
				return errors.Join(gather(3)(b.On, 0), gather(3)(b.On, 1))
			}), "the windows are closed")
		})
	}
}

// allocated gives the ranks n elements each of nccl.Allocator, at the beginning of an allocation.
func allocated[T memory.Element](t *testing.T, ranks []rank, n int) []memory.Slice[T] {
	pool := memory.NewPool(&memory.PoolConfig{Allocator: nccl.Allocator})
	t.Cleanup(func() { require.NoError(t, pool.Close()) })
	xs := make([]memory.Slice[T], len(ranks))
	for i, r := range ranks {
		require.NoError(t, pool.Use(r.s, func() (err error) {
			xs[i], err = memory.Make[T](r.s, n)
			return err
		}))
		t.Cleanup(func() { require.NoError(t, xs[i].Close()) })
	}
	return xs
}

// windowsOf gives the ranks memory in symmetric windows.
func windowsOf(t *testing.T, ranks []rank) ([]memory.Slice[float32], []*nccl.Window) {
	xs := allocated[float32](t, ranks, 1<<18)
	windows := make([]*nccl.Window, len(ranks))
	each(t, ranks, func(i int) (err error) {
		windows[i], err = ranks[i].c.RegisterWindow(testgpu.Context(t), xs[i].Buffer(), xs[i].Bytes(), true)
		return err
	})
	return xs, windows
}
