package comm_test

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// Each result of a call with Out owns a reference of its own: the caller's tensors stay
// open when the results close, and the results stay open when the caller's tensors close.
func TestResultsInOutOwnReferences(t *testing.T) {
	calls := map[string]func(g *comm.Group, x tensor.Tensor, out []tensor.Tensor) ([]tensor.Tensor, error){
		"broadcast": func(g *comm.Group, x tensor.Tensor, out []tensor.Tensor) ([]tensor.Tensor, error) {
			return comm.Broadcast(g, x, &comm.BroadcastConfig{Out: out})
		},
		"scatter": func(g *comm.Group, x tensor.Tensor, out []tensor.Tensor) ([]tensor.Tensor, error) {
			return comm.Scatter(g, x, &comm.ScatterConfig{Out: out})
		},
		"gather": func(g *comm.Group, x tensor.Tensor, out []tensor.Tensor) ([]tensor.Tensor, error) {
			y, err := comm.Gather(g, []tensor.Tensor{x}, &comm.GatherConfig{Out: &out[0]})
			return []tensor.Tensor{y}, err
		},
	}
	for name, call := range calls {
		t.Run(name, func(t *testing.T) {
			testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
				g := local(t, devs)
				r := rand.New(rand.NewPCG(21, 21))
				src := sampleOf(t, g, r, 0, memory.Float32, []int{6}, false)
				for _, resultsFirst := range []bool{true, false} {
					out, err := tensor.Make(g.Stream(0), memory.Float32, 6)
					require.NoError(t, err)
					ys, err := call(g, src.x, []tensor.Tensor{out})
					require.NoError(t, err)
					require.Len(t, ys, 1)
					first, second := out, ys[0]
					if resultsFirst {
						first, second = ys[0], out
					}
					closing(t, first)
					src.holds(t, g, nil, second)
					closing(t, second)
					require.ErrorIs(t, tensor.Copy(g.Stream(0), second, src.x), device.ErrClosed)
				}
			})
		})
	}
}
