package memory_test

import (
	"errors"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A mistake in the options is named and changes nothing (test_allocator_settings).
func TestWrongSettings(t *testing.T) {
	configure(t, "max_split_size_mb:100")
	for conf, want := range map[string]string{
		"foo:1,bar:2":                                   `there is no option "foo": the options are backend, expandable_segments`,
		"garbage_collection_threshold:1.2":              "garbage_collection_threshold:1.2: want a number > 0 and < 1",
		"garbage_collection_threshold:x":                "want a number",
		"max_split_size_mb:2":                           "max_split_size_mb:2: want a whole number of MiB, at least 21",
		"max_split_size_mb":                             "max_split_size_mb has no value",
		"release_lock_on_cudamalloc:none":               "want True or False",
		"pinned_use_cuda_host_register:none":            "want True or False",
		"pinned_num_register_threads:none":              "want a power of two",
		"pinned_num_register_threads:1024":              "want a power of two, at most 128",
		"roundup_power2_divisions:[64:3]":               "power of two",
		"backend:jemalloc":                              "want native or cudaMallocAsync",
		"expandable_segments:True,max_split_size_mb:-1": "max_split_size_mb:-1: want",
	} {
		err := memory.SetAllocatorSettings(conf)
		require.ErrorContains(t, err, "memory: set the allocator's options: ", conf)
		require.ErrorContains(t, err, want, conf)
		s, err := memory.TakeSnapshot()
		require.NoError(t, err)
		require.Equal(t, "max_split_size_mb:100", s.Settings.Conf)
		require.EqualValues(t, 100*mib, s.Settings.MaxSplitSize)
		require.False(t, s.Settings.ExpandableSegments)
	}
}

// Options change while the allocator is at work.
func TestSettingsAtRunTime(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		var open []memory.Slice[byte]
		for _, c := range []struct {
			conf  string
			bytes int
			block int64
		}{
			{"", 84 * mib, 84 * mib},
			{"roundup_power2_divisions:4", 84 * mib, 96 * mib},
			{"expandable_segments:True", 84 * mib, 84 * mib},
			{"max_split_size_mb:30", 84 * mib, 84 * mib},
			{"", 84 * mib, 84 * mib},
		} {
			require.NoError(t, memory.SetAllocatorSettings(c.conf))
			allocated, _, _ := grown(t, d, func() {
				x, err := memory.Make[byte](s, c.bytes)
				require.NoError(t, err)
				open = append(open, x)
			})
			require.Equal(t, c.block, allocated, c.conf)
			most := map[bool]int64{true: 30 * mib, false: -1}[c.conf == "max_split_size_mb:30"]
			require.Equal(t, most, statsOf(t, d).MaxSplitSize)
		}
		for _, x := range open {
			require.NoError(t, x.Zero(s))
			require.NoError(t, x.Close())
		}
		require.NoError(t, memory.EmptyCache(d))
		require.Zero(t, statsOf(t, d).ReservedBytes.All.Current)
		require.NoError(t, memory.SetAllocatorSettings("backend:cudaMallocAsync"))
		name, err := memory.Backend(d)
		require.NoError(t, err)
		require.Equal(t, "native", name, "it is in use")
	})
}

// An allocator takes the place of the device's before the first allocation only
// (change_current_allocator).
func TestChangeAllocatorInTime(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		require.ErrorContains(t, memory.ChangeAllocator(d, nil), "no allocator given")
		count := memory.Count(memory.Driver)
		require.NoError(t, memory.ChangeAllocator(d, count))
		s := newStream(t, d)
		x, err := memory.Make[byte](s, 1000)
		require.NoError(t, err)
		require.EqualValues(t, 1000, count.Counts().Bytes.Current, "as it was asked for")
		require.ErrorContains(t, memory.ChangeAllocator(d, memory.Driver), "memory was allocated already")
		require.NoError(t, memory.EnableCaching(d, false))
		y, err := memory.Make[byte](s, 1000)
		require.NoError(t, err)
		require.EqualValues(t, 1, count.Counts().Allocations.Current)
		require.EqualValues(t, 2, statsOf(t, d).Allocation.All.Current, "of both")
		require.NoError(t, memory.EnableCaching(d, true))
		z, err := memory.Make[byte](s, 1000)
		require.NoError(t, err)
		require.EqualValues(t, 2, count.Counts().Allocations.Current, "it is the program's again")
		name, err := memory.Backend(d)
		require.NoError(t, err)
		require.Equal(t, "pluggable", name)
		require.NoError(t, errors.Join(x.Close(), y.Close(), z.Close()))
		require.Zero(t, count.Counts().Allocations.Current)
	})
}

// What was allocated before the caching was turned off is freed as it was
// allocated.
func TestEnableCaching(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		x, err := memory.Make[byte](s, 1000)
		require.NoError(t, err)
		for range 3 {
			require.NoError(t, memory.EnableCaching(d, false))
		}
		y, err := memory.Make[byte](s, 1000)
		require.NoError(t, err)
		taken := statsOf(t, d).DeviceAllocs
		require.EqualValues(t, 2, taken)
		require.NoError(t, x.Close())
		require.NoError(t, y.Close())
		require.EqualValues(t, 1, statsOf(t, d).DeviceFrees)
		require.NoError(t, memory.EnableCaching(d, true))
		x, err = memory.Make[byte](s, 1000)
		require.NoError(t, err)
		require.Equal(t, taken, statsOf(t, d).DeviceAllocs, "of the cache")
		require.NoError(t, x.Close())
	})
}

// A device that was never used has statistics, and they are zero.
func TestUnusedDevice(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		require.Equal(t, memory.Stats{MaxSplitSize: -1}, statsOf(t, d))
		for _, read := range []func(*device.Device) (int64, error){memory.Allocated, memory.MaxAllocated, memory.Reserved, memory.MaxReserved} {
			n, err := read(d)
			require.NoError(t, err)
			require.Zero(t, n)
			_, err = read(nil)
			require.ErrorContains(t, err, "no device given")
		}
		require.NoError(t, errorsOf(memory.ResetPeakStats(d), memory.ResetAccumulatedStats(d), memory.EmptyCache(d)))
		snap, err := memory.TakeSnapshot(d)
		require.NoError(t, err)
		require.Empty(t, snap.Segments)
		require.Len(t, snap.Traces, d.Ordinal()+1)
		_, err = memory.TakeSnapshot(nil)
		require.ErrorContains(t, err, "no device given")
	})
}

// After the System was closed, what was not is in vain, and says why; nothing makes
// a context again.
func TestSystemClosed(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True", "backend:cudaMallocAsync"} {
		t.Run(conf, func(t *testing.T) {
			configure(t, conf)
			sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
			d := sys.Devices()[0]
			s, unused := newStreamOf(t, d), newStreamOf(t, d)
			p, late := memory.NewPool(nil), memory.NewPool(nil)
			x, err := memory.MakeFrom(s, random(1000))
			require.NoError(t, err)
			y, z := makeIn(t, p, s, 1000), makeIn(t, p, s, 30*mib)
			require.NoError(t, z.Close())
			raw, err := memory.AllocRaw(s, 3*mib)
			require.NoError(t, err)
			require.NoError(t, sys.Close(), "with memory in use")
			for name, err := range map[string]error{
				"Alloc": func() error { _, err := memory.Alloc(s, 1000); return err }(),
				"of the size that is freed": func() error {
					err := memory.FreeRaw(d, raw)
					_, again := memory.AllocRaw(s, 3*mib)
					return errors.Join(again, err)
				}(),
				"a stream that never allocated": func() error { _, err := memory.AllocRaw(unused, 1000); return err }(),
				"Use":                           p.Use(s, func() error { _, err := memory.Alloc(s, 1000); return err }),
				"Use of another pool":           late.Use(s, func() error { _, err := memory.Alloc(s, 1000); return err }),
				"StatsOf":                       func() error { _, err := memory.StatsOf(d); return err }(),
				"EmptyCache":                    memory.EmptyCache(d),
				"Close of memory":               x.Close(),
				"Close of memory of a pool":     y.Close(),
				"Close of the pool":             p.Close(),
				"Close of a stream":             errors.Join(s.Close(), unused.Close()),
			} {
				require.ErrorIs(t, err, device.ErrClosed, name)
				require.ErrorContains(t, err, "System was closed", name)
			}
			require.NoError(t, late.Close(), "it has nothing")
			active, err := d.Active()
			require.NoError(t, err)
			require.False(t, active)
			require.Empty(t, sys.Reports())
		})
	}
}

func newStreamOf(t testing.TB, d *device.Device) *stream.Stream {
	t.Helper()
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	return s
}

// Others may use the contexts too, so they would keep what a closed System has
// cached.
func TestClosedSystemKeepsNothing(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True", "backend:cudaMallocAsync"} {
		t.Run(conf, func(t *testing.T) {
			eachFresh(t, conf, func(t *testing.T, d *device.Device) {
				own, r := gpu.DeviceOf(d).Driver().DevicePrimaryCtxRetain(gpu.DeviceOf(d).Handle())
				require.Equal(t, cudadrv.Success, r)
				defer func() {
					require.Equal(t, cudadrv.Success, gpu.DeviceOf(d).Driver().DevicePrimaryCtxRelease(gpu.DeviceOf(d).Handle()))
				}()
				s, err := stream.New(d, nil)
				require.NoError(t, err)
				before, _, err := d.MemoryInfo()
				require.NoError(t, err)
				x, err := memory.Make[byte](s, 1<<28)
				require.NoError(t, err)
				require.NoError(t, errors.Join(x.Close(), s.Sync(testgpu.Context(t)), s.Close()))
				during, _, err := d.MemoryInfo()
				require.NoError(t, err)
				require.LessOrEqual(t, during, before-1<<28)
				require.NoError(t, d.System().Close())
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				require.Equal(t, cudadrv.Success, gpu.DeviceOf(d).Driver().CtxSetCurrent(own))
				after, _, r := gpu.DeviceOf(d).Driver().MemGetInfo()
				require.Equal(t, cudadrv.Success, r)
				require.Greater(t, uint64(after), before-1<<27)
			})
		})
	}
}

// The cache can be emptied, and memory run out, while a stream is captured: what
// waits for that stream stays.
func TestEmptyCacheInACapture(t *testing.T) {
	for _, conf := range []string{"", "expandable_segments:True"} {
		t.Run(conf, func(t *testing.T) {
			eachFresh(t, conf, func(t *testing.T, d *device.Device) {
				s := newStream(t, d)
				p := newPool(t, &memory.PoolConfig{Allocator: memory.Count(memory.Driver)})
				for _, n := range []int{1000, 40 * mib} {
					x, err := memory.Make[byte](s, n)
					require.NoError(t, err)
					require.NoError(t, x.Zero(s))
					require.NoError(t, x.Close())
					x = makeIn(t, p, s, n)
					require.NoError(t, x.Zero(s))
					require.NoError(t, x.Close())
				}
				var y memory.Slice[byte]
				g, err := graph.Capture([]*stream.Stream{s}, func() (err error) {
					require.NoError(t, memory.EmptyCache(d))
					_, err = memory.Make[byte](s, 1<<50)
					require.ErrorIs(t, err, device.ErrorOutOfMemory)
					y, err = memory.Make[byte](s, 1000)
					return errors.Join(err, y.Zero(s))
				}, nil)
				require.NoError(t, err, "the capture goes on")
				require.NoError(t, g.Launch(s))
				require.NoError(t, s.Sync(testgpu.Context(t)))
				require.NoError(t, errors.Join(g.Close(), y.Close()))
				require.NoError(t, memory.EmptyCache(d))
			})
		})
	}
}

// Nor is an Allocator asked that may have memory yet.
func TestAllocatorOfAClosedSystem(t *testing.T) {
	sys := testgpu.System(t, &device.SystemConfig{VirtualDevices: 1})
	d := sys.Devices()[0]
	s, a := newStreamOf(t, d), memory.Count(memory.Driver)
	require.NoError(t, memory.ChangeAllocator(d, a))
	x, err := memory.Alloc(s, 1000)
	require.NoError(t, errors.Join(err, x.Close()))
	require.NoError(t, sys.Close())
	_, err = memory.Alloc(s, 1000)
	require.ErrorContains(t, err, "memory: allocate 1000 bytes on virtual:0: its System was closed")
	require.ErrorIs(t, errors.Join(err, s.Close()), device.ErrClosed)
}
