package comm_test

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testgpu/streamtest"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// noise is a sample whose bytes are all there are, so that no row is like another one.
func noise(t testing.TB, g *comm.Group, r *rand.Rand, rank int, shape ...int) *sample {
	m := &sample{dtype: memory.Int32, shape: shape}
	n := 4
	for _, k := range shape {
		n *= k
	}
	m.want = make([]byte, n)
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], r.Uint64())
	_, _ = rand.NewChaCha8(seed).Read(m.want)
	m.x = onDevice(t, g.Stream(rank), m.dtype, shape, m.want)
	return m
}

// Copy engines scatter what is too large for one kernel, whether it is runs or long rows
// of a matrix, on the stream of its device; rows are gathered by one kernel.
func TestLargeTensors(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		comm.SetDirectBytes(t, 0)
		g := local(t, devs)
		r := rand.New(rand.NewPCG(11, 11))
		x := noise(t, g, r, 0, 96, 3*4096)
		for _, c := range []struct {
			dim             int
			scatter, gather map[string]int // calls, two of them to other devices
		}{
			{0, map[string]int{"cuMemcpyDtoDAsync": 2}, map[string]int{"cuMemcpyDtoDAsync": 3}},
			{1, map[string]int{"cuMemcpy2DAsync": 2}, map[string]int{"cuLaunchKernel": 1}},
		} {
			scatter := func() []tensor.Tensor {
				parts, err := comm.Scatter(g, x.x, &comm.ScatterConfig{Dim: c.dim})
				require.NoError(t, err)
				return parts
			}
			gather := func(parts []tensor.Tensor) tensor.Tensor {
				whole, err := comm.Gather(g, parts, &comm.GatherConfig{Dim: c.dim})
				require.NoError(t, err)
				return whole
			}
			first := scatter()
			closing(t, append(first, gather(first))...) // which allocate and compile
			var parts []tensor.Tensor
			var whole tensor.Tensor
			copies := func(want map[string]int, f func()) {
				count := countCalls(devs[0])
				f()
				got := count()
				for _, call := range []string{"cuLaunchKernel", "cuMemcpyDtoDAsync", "cuMemcpy2DAsync"} {
					if got != nil {
						require.Equal(t, want[call], got[call], "%s along %d", call, c.dim)
					}
				}
			}
			copies(c.scatter, func() { parts = scatter() })
			for i, p := range parts {
				x.along(c.dim, i*x.shape[c.dim]/3, x.shape[c.dim]/3).holds(t, g, nil, p)
			}
			copies(c.gather, func() { whole = gather(parts) })
			x.holds(t, g, nil, whole)
			closing(t, append(parts, whole)...)
		}
	})
}

// countCalls begins to count the calls of the driver on virtual devices.
func countCalls(d *device.Device) func() map[string]int {
	if m := gpu.DeviceOf(d).System().Machine; m != nil {
		return m.CountCalls()
	}
	return func() map[string]int { return nil }
}

// Large chunks are copied behind what their streams and the source's have to do, and in
// front of what comes after.
func TestLargeTensorsAreInTheOrderOfTheStreams(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		comm.SetDirectBytes(t, 0)
		g := local(t, devs)
		other, late := newStream(t, devs[1]), []*streamtest.Spinner{streamtest.NewSpinner(t, devs[0]), streamtest.NewSpinner(t, devs[1])}
		r := rand.New(rand.NewPCG(12, 12))
		for dim := range 2 {
			was, is, zero := noise(t, g, r, 0, 128, 8192), noise(t, g, r, 0, 128, 8192), noise(t, g, r, 0, 128, 8192)
			half := is.along(dim, is.shape[dim]/2, is.shape[dim]/2)
			mine, out, poison := noise(t, g, r, 0, half.shape...), noise(t, g, r, 1, half.shape...), noise(t, g, r, 1, half.shape...)
			late[0].On(g.Stream(0), 3*time.Millisecond)
			require.NoError(t, tensor.Copy(g.Stream(0), was.x, is.x)) // late
			require.NoError(t, other.WaitStream(g.Stream(1)))
			late[1].On(other, 6*time.Millisecond)
			require.NoError(t, tensor.Copy(other, out.x, poison.x)) // later
			ys, err := comm.Scatter(g, was.x, &comm.ScatterConfig{Dim: dim, Streams: []*stream.Stream{nil, other}, Out: []tensor.Tensor{mine.x, out.x}})
			require.NoError(t, err)
			closing(t, ys...)
			require.NoError(t, tensor.Copy(g.Stream(0), was.x, zero.x)) // not too early
			half.holds(t, g, other, out.x)
			is.along(dim, 0, is.shape[dim]/2).holds(t, g, nil, mine.x)
			require.NoError(t, g.Stream(1).WaitStream(other))
		}
	})
}

// A chunk is ready by itself: who waits for it does not wait for a device behind it.
func TestScatteredChunksAreReadyByThemselves(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		comm.SetDirectBytes(t, 0)
		g := local(t, devs)
		r := rand.New(rand.NewPCG(13, 13))
		for dim := range 2 {
			x := noise(t, g, r, 0, 96, 3*4096)
			warm, err := comm.Scatter(g, x.x, &comm.ScatterConfig{Dim: dim})
			require.NoError(t, err)
			closing(t, warm...)
			open := streamtest.Hold(t, g.Stream(2))
			parts, err := comm.Scatter(g, x.x, &comm.ScatterConfig{Dim: dim})
			require.NoError(t, err)
			require.NoError(t, g.Stream(1).Sync(testgpu.Context(t)))
			open()
			for i, p := range parts {
				x.along(dim, i*x.shape[dim]/3, x.shape[dim]/3).holds(t, g, nil, p)
			}
			closing(t, parts...)
		}
	})
}

// Tensors are gathered from all devices at the same time: none waits for another one's copy.
func TestGatheredTensorsDoNotWaitForEachOther(t *testing.T) {
	testgpu.Each(t, 3, func(t *testing.T, devs []*device.Device) {
		comm.SetDirectBytes(t, 0)
		g := local(t, devs)
		x := noise(t, g, rand.New(rand.NewPCG(16, 16)), 0, 96, 3*4096)
		parts, err := comm.Scatter(g, x.x, nil)
		require.NoError(t, err)
		warm, err := comm.Gather(g, parts, nil)
		require.NoError(t, err)
		closing(t, warm)
		open := streamtest.Hold(t, g.Stream(1))
		whole, err := comm.Gather(g, parts, nil)
		require.NoError(t, err)
		require.NoError(t, g.Stream(2).Sync(testgpu.Context(t)))
		open()
		x.holds(t, g, nil, whole)
		closing(t, append(parts, whole)...)
	})
}

// Copies of large tensors are nodes of a graph.
func TestLargeTensorsInGraph(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		comm.SetDirectBytes(t, 0)
		g := local(t, devs)
		r := rand.New(rand.NewPCG(14, 14))
		for dim := range 2 {
			x, next := noise(t, g, r, 0, 128, 8192), noise(t, g, r, 0, 128, 8192)
			parts, err := comm.Scatter(g, x.x, &comm.ScatterConfig{Dim: dim})
			require.NoError(t, err)
			whole, err := comm.Gather(g, parts, &comm.GatherConfig{Dim: dim})
			require.NoError(t, err)
			copied, err := tensor.MakeLike(g.Stream(0), parts[0], parts[0].DType())
			require.NoError(t, err)
			to := []tensor.Tensor{copied, parts[1]}
			exec, err := graph.Capture(g.Streams(), func() error {
				ys, err := comm.Scatter(g, x.x, &comm.ScatterConfig{Dim: dim, Out: to})
				if err != nil {
					return err
				}
				closing(t, ys...)
				y, err := comm.Gather(g, to, &comm.GatherConfig{Dim: dim, Out: &whole})
				if err != nil {
					return err
				}
				return y.Close()
			}, nil)
			require.NoError(t, err)
			require.NoError(t, tensor.Copy(g.Stream(0), x.x, next.x))
			require.NoError(t, exec.Launch(g.Stream(0)))
			require.NoError(t, g.Stream(1).WaitStream(g.Stream(0)))
			next.holds(t, g, nil, whole)
			next.along(dim, next.shape[dim]/2, next.shape[dim]/2).holds(t, g, nil, parts[1])
			require.NoError(t, g.Wait(testgpu.Context(t)))
			require.NoError(t, exec.Close())
			closing(t, append(parts, whole, copied)...)
		}
	})
}

// Where the driver refuses one of the copies, the error comes back, nothing of the results
// is left, and the group goes on.
func TestLargeTensorsOverFaults(t *testing.T) {
	for _, fault := range []string{"cuMemcpy2DAsync#1", "cuMemcpy2DAsync#2", "cuEventRecord#2", "cuStreamWaitEvent#4"} {
		t.Run(fault, func(t *testing.T) {
			comm.SetDirectBytes(t, 0)
			devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, Faults: fault + "=CUDA_ERROR_INVALID_VALUE"})
			balanced(t, devs)
			g := local(t, devs)
			x := noise(t, g, rand.New(rand.NewPCG(15, 15)), 0, 96, 3*4096)
			_, err := comm.Scatter(g, x.x, &comm.ScatterConfig{Dim: 1})
			require.ErrorIs(t, err, device.ErrorInvalidValue)
			require.NotErrorIs(t, err, comm.ErrMismatch)
			require.NoError(t, g.Err())
			parts, err := comm.Scatter(g, x.x, &comm.ScatterConfig{Dim: 1})
			require.NoError(t, err)
			for i, p := range parts {
				x.along(1, i*4096, 4096).holds(t, g, nil, p)
			}
			closing(t, parts...)
		})
	}
}
