package memory_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A peer may use pages that were mapped before it became one, and those that are
// mapped later.
func TestPeersUseMappedPages(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		configure(t, "expandable_segments:True")
		if can, err := devs[1].CanAccessPeer(devs[0]); err != nil || !can {
			t.Skip("the devices do not reach each other: ", err)
		}
		s, peer := newStream(t, devs[0]), newStream(t, devs[1])
		before, err := memory.Make[byte](s, 30*mib)
		require.NoError(t, err)
		require.NoError(t, gpu.DeviceOf(devs[1]).EnablePeer(gpu.DeviceOf(devs[0])))
		after, err := memory.Make[byte](s, 30*mib)
		require.NoError(t, err)
		for _, x := range []memory.Slice[byte]{before, after} {
			require.NoError(t, peer.WaitStream(s))
			require.NoError(t, x.RecordStream(peer))
			require.NoError(t, set(peer, cudadrv.DevicePtr(x.Ptr()), x.Len()))
			require.NoError(t, peer.Sync(testgpu.Context(t)))
			require.NoError(t, s.WaitStream(peer))
			out := make([]byte, x.Len())
			require.NoError(t, x.CopyTo(s, out))
			require.EqualValues(t, 1, out[0])
			require.Equal(t, out[0], out[len(out)-1])
			require.NoError(t, x.Close())
		}
		require.NoError(t, memory.EmptyCache(devs[0]))
	})
}
