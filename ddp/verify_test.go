package ddp_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/ddp"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A step with a missing gradient and a NaN leaves nothing that the next step is blamed for.
func TestVerifyForgetsAFailedStep(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		m, red := powerModel(t, g, memory.Float32, &ddp.ReducerConfig{Verify: true}, []int{2}, []int{3})
		s := g.Stream(0)
		write(t, g, 0, m.grads[0][1], []float64{1, math.NaN(), 1})
		require.NoError(t, red.Ready(s, 1))
		require.ErrorContains(t, red.Finish(s), "gradient 0 of 2 is not ready")
		write(t, g, 0, m.grads[0][1], []float64{1, 1, 1})
		reduceAll(t, g, red, 2)
	})
}
