package memory

import (
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory/internal/alloc"
	"github.com/gochorus/chorus/stream"
)

// newHostWith returns an allocator with options.
func newHostWith(t *testing.T, options string) *host {
	t.Helper()
	opts, err := alloc.ParseSettings(options)
	require.NoError(t, err)
	h := newHost(func() (alloc.Settings, error) { return opts, nil })
	t.Cleanup(func() { require.NoError(t, h.Close()) })
	return h
}

func TestHostSize(t *testing.T) {
	opts, err := alloc.ParseSettings("pinned_max_round_threshold_mb:4")
	require.NoError(t, err)
	for bytes, want := range map[uintptr]uintptr{
		1: 1, 2: 2, 3: 4, 4096: 4096, 4097: 8192, 3 << 20: 4 << 20, 4 << 20: 4 << 20,
		4<<20 + 1: 4<<20 + 4096, 5 << 20: 5 << 20,
	} {
		require.Equal(t, want, hostSize(&opts, bytes), "%d bytes", bytes)
	}
	opts = alloc.DefaultSettings()
	require.Equal(t, uintptr(8<<30), hostSize(&opts, 4<<30+1))
	require.Equal(t, uintptr(1<<63-4096), hostSize(&opts, 1<<63-5000), "there is no power of two left")
}

// The options that say how memory is made give memory that copies, is used again
// and goes back.
func TestHostOptions(t *testing.T) {
	for options, made := range map[string]int64{
		"":                                   3,
		"pinned_use_cuda_host_register:True": 3,
		"pinned_use_cuda_host_register:True,pinned_num_register_threads:8":                                   3,
		"pinned_reserve_segment_size_mb:2":                                                                   3,
		"pinned_reserve_segment_size_mb:2,pinned_use_cuda_host_register:True,pinned_num_register_threads:64": 3,
		"pinned_max_cached_size_mb:1":                                                                        4,
		"pinned_use_background_threads:True":                                                                 3,
	} {
		t.Run(options, func(t *testing.T) {
			testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
				h := newHostWith(t, options)
				s, err := stream.New(devs[0], nil)
				require.NoError(t, err)
				defer s.Close()
				x, err := Make[byte](s, 3<<20)
				require.NoError(t, err)
				defer x.Close()
				var leases []*hostLease
				for i, n := range []int{100, 3 << 20, 5000} {
					b, l, err := h.take(devs[0], uintptr(n))
					require.NoError(t, err)
					leases = append(leases, l)
					p := unsafe.Slice((*byte)(b.ptr), n)
					for j := range p {
						p[j] = byte(i + j)
					}
					require.NoError(t, l.beginUse("test", s))
					require.NoError(t, x.Slice(0, n).upload(s, b.ptr))
					l.done()
					got := make([]byte, n)
					require.NoError(t, x.Slice(0, n).CopyTo(s, got))
					require.Equal(t, p, got)
				}
				require.EqualValues(t, 100+28+4<<20+8192, h.stats.ActiveBytes.Current)
				for _, l := range leases {
					l.close()
				}
				if opts, _ := h.settings(); opts.PinnedBackground {
					require.True(t, poll.UntilNoLaterThan(time.Minute, func() bool { return h.counts().ActiveBytes.Current == 0 }),
						"somebody looks after the streams while nobody allocates")
				}
				h.drain(t, s)
				for _, n := range []int{100, 3 << 20, 5000} {
					_, l, err := h.take(devs[0], uintptr(n))
					require.NoError(t, err)
					l.close()
				}
				c := h.counts()
				require.Zero(t, c.ActiveBytes.Current)
				require.Zero(t, c.ActiveRequests.Current)
				require.Equal(t, made, c.HostAllocTime.Count)
				require.NoError(t, h.discardAll(h.unused()))
				if opts, _ := h.settings(); opts.PinnedReserve == 0 {
					require.Zero(t, h.counts().AllocatedBytes.Current)
				} else {
					require.EqualValues(t, 128+8192, h.counts().AllocatedBytes.Current, "the slab stays; 4 MiB had no room in it")
				}
			})
		})
	}
}

// drain takes back all that waits for s.
func (h *host) drain(t *testing.T, s *stream.Stream) {
	h.endPassed()
	require.NoError(t, s.Sync(testgpu.Context(t)))
	h.endPassed()
}

func (h *host) counts() hostCounts {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.stats
}

// What one slab gives out does not overlap, begins at pages, and comes back.
func TestHostSlab(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	h := newHostWith(t, "pinned_reserve_segment_size_mb:1")
	var end uintptr
	for i := range 256 {
		b, _, err := h.take(devs[0], uintptr(1+i*16))
		require.NoError(t, err)
		require.Zero(t, uintptr(b.ptr)%hostPage)
		require.True(t, end == 0 || uintptr(b.ptr) == end)
		end = uintptr(b.ptr) + hostPage
		require.Nil(t, b.free)
	}
	b, l, err := h.take(devs[0], 1)
	require.NoError(t, err)
	require.NotNil(t, b.free, "the slab is full")
	l.close()
	again, l, err := h.take(devs[0], 1)
	require.NoError(t, err)
	require.Same(t, b, again)
	l.close()
}

// An event serves all that was closed since the last one, and none is recorded
// before somebody has to know.
func TestHostEventsAreShared(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		h := newHostWith(t, "")
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		gate := make(chan struct{})
		require.NoError(t, s.Callback(func() { <-gate }))
		closeMany := func(n int) {
			var leases []*hostLease
			for range n {
				_, l, err := h.take(devs[0], 64)
				require.NoError(t, err)
				require.NoError(t, l.beginUse("test", s))
				l.done()
				leases = append(leases, l)
			}
			w := h.marks.watches[s]
			for _, l := range leases {
				l.close()
				require.True(t, w == nil || len(w.events) == 1, "to close costs no call of the driver")
			}
		}
		closeMany(100)
		w := h.marks.watches[s]
		require.Empty(t, w.events)
		require.False(t, h.endPassed())
		require.Len(t, w.events, 1)
		require.False(t, h.endPassed())
		require.Len(t, w.events, 1, "nothing was closed since")
		closeMany(50)
		require.False(t, h.endPassed())
		require.Len(t, w.events, 2)
		require.EqualValues(t, 150, h.counts().ActiveRequests.Current)
		close(gate)
		require.NoError(t, s.Sync(testgpu.Context(t)))
		require.True(t, h.endPassed())
		require.Zero(t, h.counts().ActiveRequests.Current)
		require.Empty(t, h.marks.watches)
		require.Empty(t, h.pending)
		require.Equal(t, 2, h.marks.free.Len(gpu.DeviceOf(devs[0])), "the events are used again")
	})
}

// While a stream is captured nothing is recorded on it.
func TestHostLeavesCapturesAlone(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		h := newHostWith(t, "")
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		b, l, err := h.take(devs[0], 64)
		require.NoError(t, err)
		require.NoError(t, l.beginUse("test", s))
		l.done()
		l.close()
		pool := inside.PoolOf(newPrivatePool())
		g := &fakeGraph{}
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		require.NoError(t, gpu.StreamOf(s).BeginCapture(0, g, pool))
		other, l, err := h.take(devs[0], 64)
		require.NoError(t, err)
		require.NotSame(t, b, other)
		l.close()
		_, err = gpu.StreamOf(s).EndCapture(g)
		require.NoError(t, err, "the capture is still good")
		pool.LetGo(g)
		h.drain(t, s)
		require.Zero(t, h.counts().ActiveRequests.Current)
	})
}

type fakeGraph struct{}

func (*fakeGraph) String() string { return "a graph" }
func (*fakeGraph) Close() error   { return nil }

// The statistics are those of a model that counts by itself.
func TestHostStatsAddUp(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	h := newHostWith(t, "pinned_max_cached_size_mb:1")
	var want HostStats
	cached, live := map[uintptr]int{}, []*hostLease{}
	sizes := map[*hostLease]uintptr{}
	owned := func(n uintptr, by int64) {
		want.Allocations.add(by)
		want.AllocatedBytes.add(by * int64(n))
	}
	used := func(n uintptr, by int64) {
		want.ActiveRequests.add(by)
		want.ActiveBytes.add(by * int64(n))
	}
	rnd := rand.New(rand.NewPCG(3, 1))
	for step := range 3000 {
		switch k := rnd.IntN(20); {
		case k < 9 && len(live) < 40:
			n := uintptr(1) << rnd.IntN(22)
			b, l, err := h.take(devs[0], n-n/4)
			require.NoError(t, err)
			require.Equal(t, n, b.bytes)
			if cached[n] > 0 {
				cached[n]--
			} else {
				owned(n, +1)
			}
			used(n, +1)
			live, sizes[l] = append(live, l), n
		case k < 18 && len(live) > 0:
			i := rnd.IntN(len(live))
			l := live[i]
			live = append(live[:i], live[i+1:]...)
			l.close()
			used(sizes[l], -1)
			if sizes[l] <= 1<<20 {
				cached[sizes[l]]++
			} else {
				owned(sizes[l], -1)
			}
		case k == 18 && rnd.IntN(20) == 0:
			require.NoError(t, h.discardAll(h.unused()))
			for n, c := range cached {
				for range c {
					owned(n, -1)
				}
			}
			clear(cached)
		}
		got := HostStats(h.counts())
		require.Equal(t, want.Allocations, got.Allocations, "step %d", step)
		require.Equal(t, want.AllocatedBytes, got.AllocatedBytes, "step %d", step)
		require.Equal(t, want.ActiveRequests, got.ActiveRequests, "step %d", step)
		require.Equal(t, want.ActiveBytes, got.ActiveBytes, "step %d", step)
	}
	for _, l := range live {
		l.close()
	}
}

// Statistics have torch's keys, and the resets do what torch's do.
func TestHostStatsKeys(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	keys := []string{"num_host_alloc", "num_host_free"}
	for _, k := range []string{"allocations", "allocated_bytes", "active_requests", "active_bytes"} {
		for _, f := range []string{"current", "peak", "allocated", "freed"} {
			keys = append(keys, k+"."+f)
		}
	}
	for _, k := range []string{"host_alloc_time", "host_free_time"} {
		for _, f := range []string{"total", "max", "min", "count", "avg"} {
			keys = append(keys, k+"."+f)
		}
	}
	flat := ReadHostStats(devs[0]).Flat()
	require.Len(t, flat, len(keys))
	for _, k := range keys {
		require.Contains(t, flat, k)
	}
	for range 2 {
		h, err := MakePinned[int64](devs[0], 100)
		require.NoError(t, err)
		require.NoError(t, h.Close())
		require.NoError(t, EmptyHostCache(devs[0]))
	}
	flat = ReadHostStats(devs[0]).Flat()
	require.EqualValues(t, 2, flat["num_host_alloc"])
	require.EqualValues(t, 2, flat["num_host_free"])
	require.EqualValues(t, 2, flat["host_free_time.count"])
	require.EqualValues(t, 2048, flat["active_bytes.allocated"])
	require.EqualValues(t, 1024, flat["allocated_bytes.peak"])
	require.Zero(t, flat["allocated_bytes.current"])
	ResetPeakHostStats(devs[0])
	flat = ReadHostStats(devs[0]).Flat()
	require.Zero(t, flat["allocated_bytes.peak"])
	require.EqualValues(t, 2048, flat["allocated_bytes.freed"])
	ResetAccumulatedHostStats(devs[0])
	flat = ReadHostStats(devs[0]).Flat()
	for k, v := range flat {
		require.Zero(t, v, k)
	}
	h := hostCounts{}
	h.own(8, 1, 30*time.Microsecond)
	h.own(8, 1, 10*time.Microsecond)
	h.own(8, 1, 80*time.Microsecond)
	require.Equal(t, Timing{Total: 120, Max: 80, Min: 10, Count: 3, Avg: 40}, h.HostAllocTime)
}

// rangesMemory is a variable of the package because a growing stack moves what is on it, and ranges
// keep addresses.
var rangesMemory [1000]byte

// The ranges find what a list of them finds.
func TestRanges(t *testing.T) {
	at := func(i int) unsafe.Pointer { return unsafe.Pointer(&rangesMemory[i]) }
	var r ranges
	model := map[int]int{}
	rnd := rand.New(rand.NewPCG(5, 5))
	for range 5000 {
		start := rnd.IntN(900)
		n := 1 + rnd.IntN(20)
		clash := false
		for s, b := range model {
			clash = clash || s < start+n && start < s+b
		}
		if rnd.IntN(3) == 0 {
			for s := range model {
				r.remove(at(s))
				delete(model, s)
				break
			}
			continue
		}
		require.Equal(t, !clash, r.add(at(start), uintptr(n)))
		if !clash {
			model[start] = n
		}
		p, n := rnd.IntN(1000), 1+rnd.IntN(20)
		in, some := false, false
		for s, b := range model {
			in = in || p >= s && p+n <= s+b
			some = some || p < s+b && s < p+n
		}
		whole, partly := r.covers(at(p), uintptr(n))
		require.Equal(t, in, whole)
		require.Equal(t, some && !in, partly)
	}
}

// A call that is about to enqueue a copy keeps the memory, though another
// goroutine closes it meanwhile.
func TestHostWaitsForCalls(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	h := newHostWith(t, "")
	s, err := stream.New(devs[0], nil)
	require.NoError(t, err)
	defer s.Close()
	_, l, err := h.take(devs[0], 64)
	require.NoError(t, err)
	require.NoError(t, l.beginUse("test", s))
	l.close()
	require.ErrorIs(t, l.beginUse("test", s), device.ErrClosed)
	h.drain(t, s)
	require.EqualValues(t, 1, h.counts().ActiveRequests.Current)
	l.done()
	h.drain(t, s)
	require.Zero(t, h.counts().ActiveRequests.Current)
}

// Pinned memory is returned to the system when the devices are idle, because the driver waits for
// them: a program may still have to enqueue what their work waits for.
func TestFreesOfPinnedMemoryDoNotWait(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		for name, closes := range map[string]func(h *host, l *hostLease) error{
			"empty cache": func(h *host, l *hostLease) error { l.close(); return h.release(h.unused()) },
			"large":       func(_ *host, l *hostLease) error { l.close(); return nil },
		} {
			options := ""
			if name == "large" {
				options = "pinned_max_cached_size_mb:1"
			}
			h := newHostWith(t, options)
			s, err := stream.New(devs[1], nil)
			require.NoError(t, err)
			_, l, err := h.take(devs[0], 2<<20)
			require.NoError(t, err)
			gate := make(chan struct{})
			require.NoError(t, s.Callback(func() { <-gate }))
			require.NoError(t, closes(h, l)) // would wait for the callback
			require.EqualValues(t, 1, h.counts().Allocations.Current, name)
			close(gate)
			require.NoError(t, s.Sync(testgpu.Context(t)))
			require.Eventually(t, func() bool { return h.counts().Allocations.Current == 0 }, time.Minute, time.Millisecond)
			require.NoError(t, s.Close())
		}
	})
}

// Close of a pinned slice waits for all devices, but not forever.
func TestUnpinWhileADeviceIsBusy(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		defer func(d time.Duration) { unpinLimit = d }(unpinLimit)
		s, err := stream.New(devs[1], nil)
		require.NoError(t, err)
		defer s.Close()
		h, err := PinSlice(devs[0], make([]float32, 1<<20))
		require.NoError(t, err)
		gate := make(chan struct{})
		require.NoError(t, s.Callback(func() { <-gate }))
		unpinLimit = 50 * time.Millisecond
		require.ErrorContains(t, h.Close(), "has been busy for 50ms: enqueue what its work waits for")
		require.NotNil(t, h.Data())
		unpinLimit = time.Minute
		done := make(chan error, 1)
		go func() { done <- h.Close() }()
		select {
		case err := <-done:
			t.Fatalf("returned %v while the device was busy", err)
		case <-time.After(20 * time.Millisecond):
		}
		close(gate)
		require.NoError(t, <-done)
	})
}

// The engines of GPUs copy in any order.
func TestOverlappingCopy(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, err := stream.New(devs[0], nil)
		require.NoError(t, err)
		defer s.Close()
		x, err := Make[float32](s, 100)
		require.NoError(t, err)
		defer x.Close()
		require.NoError(t, x.Zero(s))
		require.NoError(t, Copy(s, x, x))
		require.NoError(t, Copy(s, x.Slice(0, 50), x.Slice(50, 100)))
		for _, by := range []int{1, 49} {
			require.ErrorContains(t, Copy(s, x.Slice(by, by+50), x.Slice(0, 50)), fmt.Sprintf("overlaps the source, %d elements away", by))
			require.ErrorContains(t, Copy(s, x.Slice(0, 50), x.Slice(by, by+50)), "overlaps the source")
		}
		require.NoError(t, s.Sync(testgpu.Context(t)))
	})
}
