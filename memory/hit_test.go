package memory

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory/internal/alloc"
	"github.com/gochorus/chorus/stream"
)

// A hit costs no memory of Go, and no call of the driver. Virtual devices write
// down each block that they are told of, so here they are told of none.
func TestHitsAllocateNothing(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		d := devs[0]
		h, err := heapOf(d)
		require.NoError(t, err)
		if d.System().Backend() == "virtual" {
			h.native = alloc.NewDevice(alloc.Config{Source: driverSource{h}, Total: h.total}, options)
		}
		s, err := stream.New(d, nil)
		require.NoError(t, err)
		defer s.Close()
		for _, n := range []int{1, 512, 1 << 20, 30 << 20} {
			hit := func() {
				p, err := AllocRaw(s, n)
				if err == nil {
					err = FreeRaw(d, p)
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			hit()
			before := h.native.Counts()
			require.Zero(t, testing.AllocsPerRun(1000, hit), "%d bytes", n)
			require.Equal(t, before, h.native.Counts())
		}
	})
}
