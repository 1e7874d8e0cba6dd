package memory_test

import (
	"errors"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/dl"
	"github.com/gochorus/chorus/internal/dl/dltest"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// fill writes bytes of memory on s and waits.
func fill(t *testing.T, s *stream.Stream, ptr uint64, bytes int) {
	t.Helper()
	require.NoError(t, gpu.DeviceOf(s.Device()).Do(func(drv cudadrv.Driver) cudadrv.Result {
		return drv.MemsetD8Async(cudadrv.DevicePtr(ptr), 7, uintptr(bytes), gpu.StreamOf(s).Raw())
	}))
	require.NoError(t, s.Sync(testgpu.Context(t)))
}

func TestDriverAllocator(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := newStream(t, devs[0])
		p, err := memory.Driver.Alloc(s, 1000)
		require.NoError(t, err)
		fill(t, s, p, 1000)
		var q uint64
		g, err := graph.Capture([]*stream.Stream{s}, func() (err error) {
			q, err = memory.Driver.Alloc(s, 1000)
			return errorsOf(err, memory.Driver.Free(s, p, 1000))
		}, nil)
		require.NoError(t, err, "a capture does not mind")
		require.NoError(t, g.Close())
		fill(t, s, q, 1000)
		require.NoError(t, memory.Driver.Free(s, q, 1000))
		require.ErrorContains(t, memory.Driver.Free(s, 16, 1000), "memory: free 1000 bytes at 0x10")
		_, err = memory.Driver.Alloc(s, 1<<50)
		oom, ok := errors.AsType[*memory.OutOfMemoryError](err)
		require.True(t, ok)
		require.EqualValues(t, 1<<50, oom.Requested)
		for _, n := range []int{0, -1} {
			_, err = memory.Driver.Alloc(s, n)
			require.ErrorContains(t, err, "want more than none")
		}
		_, err = memory.Driver.Alloc(nil, 1)
		require.ErrorContains(t, err, "no stream given")
		require.ErrorContains(t, memory.Driver.Free(nil, 1, 1), "no stream given")
	})
}

// pluginC takes memory of CUDA where there is a GPU, and of C elsewhere. It
// refuses more than a GiB.
const pluginC = `
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/types.h>
static void *cuda(const char *name) { return dlsym(dlopen("libcuda.so.1", RTLD_NOW), name); }
long calls, lastSize, lastDevice; void *lastStream;
void *my_malloc(ssize_t size, int device, void *stream) {
	void *p = 0;
	calls++; lastSize = size; lastDevice = device; lastStream = stream;
	if (size > 1 << 30) return 0;
	if (!GPU) return malloc(size);
	int (*alloc)(void **, size_t) = (int (*)(void **, size_t))cuda("cuMemAlloc_v2");
	return alloc(&p, size) ? 0 : p;
}
void my_free(void *p, ssize_t size, int device, void *stream) {
	calls++; lastSize = size; lastDevice = device; lastStream = stream;
	if (!GPU) { free(p); return; }
	int (*release)(void *) = (int (*)(void *))cuda("cuMemFree_v2");
	release(p);
}
long told(int which) { return which == 0 ? calls : which == 1 ? lastSize : which == 2 ? lastDevice : (long)lastStream; }
`

func TestPlugin(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		onGPU := devs[0].System().Backend() == "cuda"
		path := dltest.Compile(t, pluginC, "libplugin.so", map[bool]string{true: "-DGPU=1", false: "-DGPU=0"}[onGPU])
		told := pluginTold(t, path)
		a, err := memory.OpenPlugin(path, "my_malloc", "my_free")
		require.NoError(t, err)
		s := newStream(t, devs[0])
		p, err := a.Alloc(s, 5000)
		require.NoError(t, err)
		require.Equal(t, []int64{1, 5000, 0, int64(s.Handle())}, told())
		if onGPU {
			fill(t, s, p, 5000)
		}
		require.NoError(t, a.Free(s, p, 5000))
		require.Equal(t, []int64{2, 5000, 0, int64(s.Handle())}, told())
		_, err = a.Alloc(s, 1<<30+1)
		oom, ok := errors.AsType[*memory.OutOfMemoryError](err)
		require.True(t, ok)
		require.ErrorIs(t, err, device.ErrorOutOfMemory)
		require.ErrorContains(t, err, "libplugin.so returned NULL")
		require.EqualValues(t, 1<<30+1, oom.Requested)
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			p, err := a.Alloc(s, 64)
			return errorsOf(err, a.Free(s, p, 64))
		}, nil)
		require.NoError(t, err, "a capture does not mind")
		require.NoError(t, g.Close())
		_, err = a.Alloc(s, 0)
		require.ErrorContains(t, err, "want more than none")
		require.ErrorContains(t, a.Free(nil, p, 1), "no stream given")
		require.EqualValues(t, 5, told()[0])
	})
}

// pluginTold returns what the library was called with last.
func pluginTold(t *testing.T, path string) func() []int64 {
	lib, err := dl.Open(&dl.Spec{Name: "plug-in", Sonames: []string{path}})
	require.NoError(t, err)
	told, ok := lib.Symbol("told")
	require.True(t, ok)
	return func() (list []int64) {
		for which := range 4 {
			f := dl.Get().In(uintptr(which))
			list = append(list, int64(f.Call(told)))
			f.Put()
		}
		return list
	}
}

func TestOpenPluginRefuses(t *testing.T) {
	path := dltest.Compile(t, pluginC, "libplugin.so", "-DGPU=0")
	for _, c := range []struct{ path, alloc, free, want string }{
		{"", "my_malloc", "my_free", "no library given"},
		{path + ".none", "my_malloc", "my_free", "libplugin.so.none"},
		{path, "yours", "my_free", `has no function "yours"`},
		{path, "my_malloc", "", `has no function ""`},
	} {
		_, err := memory.OpenPlugin(c.path, c.alloc, c.free)
		require.ErrorContains(t, err, "memory: open plug-in: ")
		require.ErrorContains(t, err, c.want)
	}
}

// A meeting is an Allocator of which several goroutines are asking at the same time,
// and which says how much it has given out.
type meeting struct {
	memory.Allocator
	fails atomic.Bool
	asked chan bool // gets one for each that has come
	given chan bool // lets one go
}

func (m *meeting) Alloc(s *stream.Stream, bytes int) (uint64, error) {
	m.asked <- true
	<-m.given
	if m.fails.Load() {
		return 0, device.ErrorOutOfMemory
	}
	return m.Allocator.Alloc(s, bytes)
}

// Goroutines that allocate at the same time do not go beyond the fraction together,
// and what the allocator could not give is there for others.
func TestFractionOfManyGoroutines(t *testing.T) {
	eachFresh(t, "", func(t *testing.T, d *device.Device) {
		s := newStream(t, d)
		_, total, err := d.MemoryInfo()
		require.NoError(t, err)
		m := &meeting{Allocator: memory.Driver, asked: make(chan bool), given: make(chan bool)}
		require.NoError(t, memory.ChangeAllocator(d, m))
		require.NoError(t, memory.SetFraction(d, float64(10*mib+1000)/float64(total)))
		var group sync.WaitGroup
		var buffers [3]*memory.Buffer
		var errs [3]error
		begin := func(i, bytes int) {
			group.Go(func() { buffers[i], errs[i] = memory.Alloc(s, bytes) })
			<-m.asked
		}
		begin(0, 6*mib)
		begin(1, 4*mib)
		_, err = memory.Alloc(s, mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory, "what others are asking for is taken")
		m.fails.Store(true)
		m.given <- true
		m.given <- true
		group.Wait()
		for _, err := range errs[:2] {
			require.ErrorIs(t, err, device.ErrorOutOfMemory)
		}
		m.fails.Store(false)
		begin(2, 10*mib)
		m.given <- true
		group.Wait()
		require.NoError(t, errs[2], "nothing was given, so all may be asked for")
		_, err = memory.Alloc(s, mib)
		require.ErrorIs(t, err, device.ErrorOutOfMemory, "now it is")
		require.NoError(t, buffers[2].Close())
		require.EqualValues(t, 4, statsOf(t, d).OOMs)
		require.NoError(t, memory.SetFraction(d, 1))
	})
}
