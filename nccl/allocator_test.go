package nccl_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/poll"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
)

// Memory of NCCL is used on its stream, and given back when the stream is past it.
func TestAllocator(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s := streamtest.NewStream(t, devs[0])
		p, err := nccl.Allocator.Alloc(s, 1<<20)
		require.NoError(t, err)
		set := func() error {
			return gpu.DeviceOf(devs[0]).Do(func(drv cudadrv.Driver) cudadrv.Result {
				return drv.MemsetD8Async(cudadrv.DevicePtr(p), 3, 1<<20, gpu.StreamOf(s).Raw())
			})
		}
		require.NoError(t, set())
		g, err := graph.Capture([]*stream.Stream{s}, func() error {
			q, err := nccl.Allocator.Alloc(s, 1<<20)
			require.NoError(t, err)
			require.ErrorContains(t, nccl.Allocator.Free(s, q, 1<<20), "nccl: free")
			other, err := stream.New(devs[0], nil)
			require.NoError(t, err)
			require.NoError(t, nccl.Allocator.Free(other, q, 1<<20))
			return other.Close()
		}, nil)
		require.NoError(t, err, "a capture does not mind")
		require.NoError(t, g.Close())
		gate := make(chan struct{})
		require.NoError(t, s.Callback(func() { <-gate }))
		require.NoError(t, set())
		freed := make(chan error, 1)
		go func() { freed <- nccl.Allocator.Free(s, p, 1<<20) }()
		require.False(t, poll.UntilNoLaterThan(20*time.Millisecond, func() bool { return len(freed) > 0 }), "the stream still uses it")
		close(gate)
		require.NoError(t, <-freed)
		require.Error(t, nccl.Allocator.Free(s, 4096, 1<<20))
		for _, n := range []int{0, -1} {
			_, err = nccl.Allocator.Alloc(s, n)
			require.ErrorContains(t, err, "want more than none")
		}
		_, err = nccl.Allocator.Alloc(nil, 1)
		require.ErrorContains(t, err, "no stream given")
		require.ErrorContains(t, nccl.Allocator.Free(nil, p, 1), "no stream given")
	})
}

func TestAllocatorOutOfMemory(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	_, err := nccl.Allocator.Alloc(streamtest.NewStream(t, devs[0]), 1<<50)
	var oom *memory.OutOfMemoryError
	require.ErrorAs(t, err, &oom)
	require.EqualValues(t, 1<<50, oom.Requested)
	require.ErrorIs(t, err, device.ErrorOutOfMemory)
	require.ErrorIs(t, err, nccl.ErrorUnhandledCUDA)
}
