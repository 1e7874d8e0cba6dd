package comm_test

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// Whichever call of the driver fails, the error comes back, nothing of the results is
// left, and the group goes on.
func TestTorchOverFaults(t *testing.T) { bothWays(t, torchOverFaults) }

func torchOverFaults(t *testing.T, _ bool) {
	for name, f := range map[string]func(g *comm.Group, xs []tensor.Tensor) ([]tensor.Tensor, error){
		"broadcast": func(g *comm.Group, xs []tensor.Tensor) ([]tensor.Tensor, error) {
			return comm.Broadcast(g, xs[0].T(), nil)
		},
		"broadcast-coalesced": func(g *comm.Group, xs []tensor.Tensor) (all []tensor.Tensor, err error) {
			yss, err := comm.BroadcastCoalesced(g, []tensor.Tensor{xs[0].T(), xs[0], xs[0]}, &comm.BroadcastCoalescedConfig{
				Devices: []*device.Device{g.Device(0), g.Device(1), g.Device(1), g.Device(0)}})
			for _, ys := range yss {
				all = append(all, ys...)
			}
			return all, err
		},
		"reduce-add": func(g *comm.Group, xs []tensor.Tensor) ([]tensor.Tensor, error) {
			y, err := comm.ReduceAdd(g, []tensor.Tensor{xs[0].T(), xs[1].T(), xs[1].T(), xs[0].T()}, nil)
			return []tensor.Tensor{y}, err
		},
		"reduce-add-coalesced": func(g *comm.Group, xs []tensor.Tensor) ([]tensor.Tensor, error) {
			return comm.ReduceAddCoalesced(g, [][]tensor.Tensor{{xs[0], xs[0].T()}, {xs[1], xs[1].T()}, {xs[1], xs[1].T()}},
				&comm.ReduceAddCoalescedConfig{BufferSize: 1})
		},
		"scatter": func(g *comm.Group, xs []tensor.Tensor) ([]tensor.Tensor, error) {
			return comm.Scatter(g, xs[0], &comm.ScatterConfig{Dim: 1, Devices: []*device.Device{g.Device(1), g.Device(0), g.Device(1)}})
		},
		"gather": func(g *comm.Group, xs []tensor.Tensor) ([]tensor.Tensor, error) {
			y, err := comm.Gather(g, []tensor.Tensor{xs[0], xs[1], xs[1].T()}, &comm.GatherConfig{Dim: 1})
			return []tensor.Tensor{y}, err
		},
	} {
		t.Run(name, func(t *testing.T) {
			for _, call := range []string{"cuMemcpyDtoDAsync", "cuLaunchKernel", "cuEventCreate", "cuEventRecord", "cuStreamWaitEvent"} {
				stride := testhost.Rounds(4, 1) // under the race detector, each fourth call fails
				failed, tried := 0, 0
				for n := 1 + rand.IntN(stride); failed == tried; n += stride {
					tried++
					fault := fmt.Sprintf("%s#%d=CUDA_ERROR_INVALID_VALUE", call, n)
					devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: fault})
					t.Run(fault, func(t *testing.T) {
						balanced(t, devs)
						g := local(t, devs)
						r := rand.New(rand.NewPCG(8, 8))
						var xs []tensor.Tensor
						for i := range 2 {
							xs = append(xs, onDevice(t, g.Stream(i), memory.Float32, []int{6, 6}, bytesOf(r, memory.Float32, 36)))
						}
						ys, err := f(g, xs)
						if err == nil {
							closing(t, ys...)
							return
						}
						failed++
						require.ErrorIs(t, err, device.ErrorInvalidValue)
						require.NotErrorIs(t, err, comm.ErrMismatch)
						require.NoError(t, g.Err())
						ys, err = f(g, xs) // the fault was one call
						require.NoError(t, err)
						closing(t, ys...)
					})
				}
			}
		})
	}
}
