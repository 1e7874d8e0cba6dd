package ddp_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// As in torch, a gradient is compressed if that makes it smaller by more than MinCompression.
func TestPowerSGDChoosesGradients(t *testing.T) {
	s, err := stream.New(testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0], nil)
	require.NoError(t, err)
	defer s.Close()
	for _, c := range []struct {
		cfg   ddp.PowerSGD
		shape []int
		want  int
	}{
		{ddp.PowerSGD{}, []int{4, 4}, 0}, // 16 elements, or 8: exactly half
		{ddp.PowerSGD{}, []int{4, 5}, 1}, // 20 elements, or 9
		{ddp.PowerSGD{Rank: 2}, []int{8, 8}, 0},
		{ddp.PowerSGD{Rank: 2}, []int{8, 9}, 2},
		{ddp.PowerSGD{MinCompression: 4}, []int{8, 8}, 0},
		{ddp.PowerSGD{MinCompression: 3.99}, []int{8, 8}, 1},
		{ddp.PowerSGD{MinCompression: 4}, []int{8, 3, 3}, 1}, // 72 elements, or 17
		{ddp.PowerSGD{MinCompression: 1}, []int{2, 2}, 0},
		{ddp.PowerSGD{MinCompression: 0.5}, []int{2, 2}, 1},
		{ddp.PowerSGD{MinCompression: 0.5}, []int{4}, 0},
	} {
		grad, err := tensor.Make(s, memory.Float32, c.shape...)
		require.NoError(t, err)
		require.Equal(t, c.want, c.cfg.CompressedRank(grad), "%v of %v", &c.cfg, c.shape)
		require.NoError(t, grad.Close())
	}
}
