package memory_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/dl/dltest"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A backend is a way that the memory of a device comes.
type backend struct {
	conf   string // of SetAllocatorSettings
	begin  func(t *testing.T, d *device.Device)
	name   string // what Backend says
	caches bool
	onCUDA bool // only there
}

var backends = map[string]backend{
	"native":     {name: "native", caches: true},
	"expandable": {conf: "expandable_segments:True", name: "native", caches: true},
	"split":      {conf: "max_split_size_mb:32,roundup_power2_divisions:4,garbage_collection_threshold:0.8", name: "native", caches: true},
	"async":      {conf: "backend:cudaMallocAsync", name: "cudaMallocAsync"},
	"uncached": {name: "native", begin: func(t *testing.T, d *device.Device) {
		require.NoError(t, memory.EnableCaching(d, false))
	}},
	"allocator": {name: "pluggable", begin: func(t *testing.T, d *device.Device) {
		require.NoError(t, memory.ChangeAllocator(d, memory.Count(memory.Driver)))
	}},
	"plugin": {name: "pluggable", onCUDA: true, begin: func(t *testing.T, d *device.Device) {
		a, err := memory.OpenPlugin(dltest.Compile(t, pluginC, "libplugin.so", "-DGPU=1"), "my_malloc", "my_free")
		require.NoError(t, err)
		require.NoError(t, memory.ChangeAllocator(d, a))
	}},
}

// configure sets the options of the process for one test.
func configure(t testing.TB, conf string) {
	t.Helper()
	was, err := memory.TakeSnapshot()
	require.NoError(t, err)
	require.NoError(t, memory.SetAllocatorSettings(conf))
	t.Cleanup(func() { require.NoError(t, memory.SetAllocatorSettings(was.Settings.Conf)) })
}

// fresh returns a device on which nothing was allocated, of a System of its own.
func fresh(t testing.TB, kind string) *device.Device {
	t.Helper()
	if kind == "virtual" {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
		t.Cleanup(func() { require.NoError(t, devs[0].System().Close()) })
		return devs[0]
	}
	testgpu.CUDA(t, 1)
	sys, err := device.NewSystem(&device.SystemConfig{Backend: "cuda"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, sys.Close()) })
	return sys.Devices()[0]
}

// eachFresh runs fn on a virtual device, and on a GPU where there is one, of which
// the allocator is new.
func eachFresh(t *testing.T, conf string, fn func(t *testing.T, d *device.Device)) {
	for _, kind := range []string{"virtual", "cuda"} {
		t.Run(kind, func(t *testing.T) {
			configure(t, conf)
			fn(t, fresh(t, kind))
		})
	}
}

// TestBackends: what every way must do alike.
func TestBackends(t *testing.T) {
	for name, b := range backends {
		for _, kind := range []string{"virtual", "cuda"} {
			if b.onCUDA && kind == "virtual" {
				continue
			}
			for _, c := range contract {
				t.Run(name+"/"+kind+"/"+c.name, func(t *testing.T) {
					configure(t, b.conf)
					d := fresh(t, kind)
					if b.begin != nil {
						b.begin(t, d)
					}
					got, err := memory.Backend(d)
					require.NoError(t, err)
					require.Equal(t, b.name, got)
					c.check(t, d, b)
					require.NoError(t, memory.EmptyCache(d))
					s := statsOf(t, d)
					consistent(t, s, b)
					require.Zero(t, s.Allocation.All.Current)
					require.Zero(t, s.AllocatedBytes.All.Current)
					require.Zero(t, s.RequestedBytes.All.Current)
					require.Zero(t, s.ReservedBytes.All.Current, "all went back")
					require.Equal(t, s.DeviceAllocs, s.DeviceFrees)
				})
			}
		}
	}
}

func statsOf(t testing.TB, d *device.Device) memory.Stats {
	t.Helper()
	s, err := memory.StatsOf(d)
	require.NoError(t, err)
	return s
}

// consistent checks what torch checks of its statistics after every step.
func consistent(t testing.TB, s memory.Stats, b backend) {
	t.Helper()
	for name, p := range map[string]memory.PoolStats{
		"allocation": s.Allocation, "segment": s.Segment, "active": s.Active, "inactive_split": s.InactiveSplit,
		"allocated_bytes": s.AllocatedBytes, "reserved_bytes": s.ReservedBytes, "active_bytes": s.ActiveBytes,
		"inactive_split_bytes": s.InactiveSplitBytes, "requested_bytes": s.RequestedBytes,
	} {
		for _, x := range []memory.Stat{p.All, p.Small, p.Large} {
			require.GreaterOrEqual(t, x.Current, int64(0), name)
			require.GreaterOrEqual(t, x.Peak, x.Current, name)
			if name != "reserved_bytes" || b.caches {
				require.Equal(t, x.Current, x.Allocated-x.Freed, name)
			}
		}
		if b.caches {
			require.Equal(t, p.All.Current, p.Small.Current+p.Large.Current, name)
			require.Equal(t, p.All.Allocated, p.Small.Allocated+p.Large.Allocated, name)
			require.Equal(t, p.All.Freed, p.Small.Freed+p.Large.Freed, name)
		}
	}
	require.GreaterOrEqual(t, s.AllocatedBytes.All.Current, s.RequestedBytes.All.Current-s.ActiveBytes.All.Current)
	require.GreaterOrEqual(t, s.ActiveBytes.All.Current, s.AllocatedBytes.All.Current)
	if b.caches {
		require.GreaterOrEqual(t, s.ReservedBytes.All.Current, s.ActiveBytes.All.Current)
	}
}
