package comm_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// What small operations cost is their calls of the driver: they may not become more
// unnoticed. With eight devices there are, for seven other streams, a record and a wait
// each before the kernel, and one record and seven waits behind it.
func TestCallsOfSmallOperations(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 8})
	g := local(t, devs)
	r := rand.New(rand.NewPCG(9, 9))
	whole := sampleOf(t, g, r, 0, memory.Float32, []int{32, 32}, false).x
	var all, many []tensor.Tensor
	lists := make([][]tensor.Tensor, 8)
	for i := range 8 {
		all = append(all, sampleOf(t, g, r, i, memory.Float32, []int{32, 32}, false).x)
		for k := range 300 {
			lists[i] = append(lists[i], sampleOf(t, g, r, i, memory.Float32, []int{1 + k%9}, false).x)
		}
	}
	many = lists[0]
	parts, err := comm.Scatter(g, whole, nil)
	require.NoError(t, err)
	defer closing(t, parts...)
	columns, err := comm.Scatter(g, whole, &comm.ScatterConfig{Dim: 1})
	require.NoError(t, err)
	defer closing(t, columns...)
	for name, c := range map[string]struct {
		launches int
		f        func() ([][]tensor.Tensor, error)
	}{
		"broadcast":            {1, func() ([][]tensor.Tensor, error) { return some(comm.Broadcast(g, whole, nil)) }},
		"scatter":              {1, func() ([][]tensor.Tensor, error) { return some(comm.Scatter(g, whole, nil)) }},
		"scatter columns":      {1, func() ([][]tensor.Tensor, error) { return some(comm.Scatter(g, whole, &comm.ScatterConfig{Dim: 1})) }},
		"gather":               {1, func() ([][]tensor.Tensor, error) { return one(comm.Gather(g, parts, nil)) }},
		"gather columns":       {1, func() ([][]tensor.Tensor, error) { return one(comm.Gather(g, columns, &comm.GatherConfig{Dim: 1})) }},
		"reduce-add":           {1, func() ([][]tensor.Tensor, error) { return one(comm.ReduceAdd(g, all, nil)) }},
		"broadcast-coalesced":  {1, func() ([][]tensor.Tensor, error) { return comm.BroadcastCoalesced(g, many, nil) }},
		"reduce-add-coalesced": {6, func() ([][]tensor.Tensor, error) { return some(comm.ReduceAddCoalesced(g, lists, nil)) }},
	} {
		t.Run(name, func(t *testing.T) {
			for range 2 { // the first allocates
				ys, err := c.f()
				require.NoError(t, err)
				closing(t, slices.Concat(ys...)...)
			}
			require.NoError(t, g.Wait(testgpu.Context(t)))
			stop := gpu.DeviceOf(devs[0]).System().Machine.CountCalls()
			ys, err := c.f()
			closing(t, slices.Concat(ys...)...)
			got := stop()
			require.NoError(t, err)
			delete(got, "cuCtxSetCurrent") // which is part of every call on CUDA
			require.Equal(t, map[string]int{"cuEventRecord": 8, "cuStreamWaitEvent": 14, "cuLaunchKernel": c.launches}, got)
		})
	}
}

// What goes to other devices is one kernel's up to some bytes, and rows that are long
// enough of any size; all arrives.
func TestWhatOneKernelCopies(t *testing.T) {
	testgpu.Each(t, 2, func(t *testing.T, devs []*device.Device) {
		g := local(t, devs)
		r := rand.New(rand.NewPCG(10, 10))
		x := sampleOf(t, g, r, 0, memory.Float32, []int{40, 512}, false)
		to := []*device.Device{devs[0], devs[1], devs[1]}
		for _, c := range []struct {
			dim      int
			sizes    []int
			launches map[int]int // of the scatter, by how many bytes are a kernel's
		}{
			{0, []int{20, 10, 10}, map[int]int{-1: 0, 0: 0, 40959: 0, 40960: 1}},    // else copies of the driver's
			{1, []int{256, 128, 128}, map[int]int{-1: 2, 0: 1, 40959: 1, 40960: 1}}, // else a kernel for each
			{1, []int{257, 128, 127}, map[int]int{-1: 2, 0: 2, 40799: 2, 40800: 1}}, // a row of less than 512 bytes
		} {
			for most, launches := range c.launches {
				comm.SetDirectBytes(t, most)
				count := func() map[string]int { return nil }
				if m := gpu.DeviceOf(devs[0]).System().Machine; m != nil {
					count = m.CountCalls()
				}
				parts, err := comm.Scatter(g, x.x, &comm.ScatterConfig{Dim: c.dim, ChunkSizes: c.sizes, Devices: to})
				require.NoError(t, err)
				if calls := count(); calls != nil {
					require.Equal(t, launches, calls["cuLaunchKernel"], "%v up to %d", c, most)
				}
				at := 0
				for i, p := range parts {
					x.along(c.dim, at, c.sizes[i]).holds(t, g, nil, p)
					at += c.sizes[i]
				}
				whole, err := comm.Gather(g, parts, &comm.GatherConfig{Dim: c.dim})
				require.NoError(t, err)
				x.holds(t, g, nil, whole)
				closing(t, append(parts, whole)...)
			}
		}
	})
}

// Between two devices a broadcast or a scatter is one copy of the driver's, of any size; NCCL
// and kernels take no part.
func TestCallsOfTwoDevices(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, Faults: "ncclBroadcast#*=ncclInternalError"})
	g := local(t, devs)
	x := sampleOf(t, g, rand.New(rand.NewPCG(11, 11)), 0, memory.Float32, []int{32, 32}, false).x
	for _, most := range []int{-1, 100, 1 << 20} {
		comm.SetDirectBytes(t, most)
		for name, f := range map[string]func() ([]tensor.Tensor, error){
			"broadcast": func() ([]tensor.Tensor, error) { return comm.Broadcast(g, x, nil) },
			"scatter":   func() ([]tensor.Tensor, error) { return comm.Scatter(g, x, nil) },
		} {
			ys, err := f() // the first copy tries the way
			require.NoError(t, err, name)
			closing(t, ys...)
			stop := gpu.DeviceOf(devs[0]).System().Machine.CountCalls()
			ys, err = f()
			got := stop()
			require.NoError(t, err, name)
			closing(t, ys...)
			require.Equal(t, 1, got["cuMemcpyDtoDAsync"], "%s with a kernel up to %d", name, most)
			require.Zero(t, got["cuLaunchKernel"], "%s with a kernel up to %d", name, most)
		}
	}
}

// With one other device copy engines gather what is large, where they take it as it is, and
// NCCL adds it.
func TestPairs(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2})
	g := local(t, devs)
	r := rand.New(rand.NewPCG(12, 12))
	x, y := sampleOf(t, g, r, 0, memory.Int32, []int{32, 32}, false), sampleOf(t, g, r, 1, memory.Int32, []int{32, 32}, false)
	parts, err := comm.Scatter(g, x.x, nil)
	require.NoError(t, err)
	columns, err := comm.Scatter(g, x.x, &comm.ScatterConfig{Dim: 1})
	require.NoError(t, err)
	defer closing(t, append(parts, columns...)...)
	gather := func() (tensor.Tensor, error) { return comm.Gather(g, parts, nil) }
	add := func(inOrder bool) func() (tensor.Tensor, error) {
		return func() (tensor.Tensor, error) {
			return comm.ReduceAdd(g, []tensor.Tensor{x.x, y.x}, &comm.ReduceAddConfig{Deterministic: inOrder})
		}
	}
	for name, c := range map[string]struct {
		from                     int // pairBytes
		copies, launches, byNCCL int
		f                        func() (tensor.Tensor, error)
		want                     *sample // or nil
	}{
		"a part of 2048": {2048, 2, 0, 0, gather, x},
		"a smaller part": {2049, 0, 1, 0, gather, x},
		"columns":        {0, 0, 1, 0, func() (tensor.Tensor, error) { return comm.Gather(g, columns, &comm.GatherConfig{Dim: 1}) }, x},
		"a sum of 4096":  {4096, 0, 0, 1, add(false), nil},
		"a smaller sum":  {4097, 0, 1, 0, add(false), nil},
		"a sum in order": {0, 0, 1, 0, add(true), nil},
	} {
		t.Run(name, func(t *testing.T) {
			comm.SetPairBytes(t, c.from)
			z, err := c.f() // the first copy tries the way
			require.NoError(t, err)
			closing(t, z)
			before := g.Communicator(0).Progress().Issued.Record
			stop := gpu.DeviceOf(devs[0]).System().Machine.CountCalls()
			z, err = c.f()
			calls := stop()
			require.NoError(t, err)
			defer closing(t, z)
			require.Equal(t, []int{c.copies, c.launches, c.byNCCL},
				[]int{calls["cuMemcpyDtoDAsync"], calls["cuLaunchKernel"], int(g.Communicator(0).Progress().Issued.Record - before)})
			if c.want != nil {
				c.want.holds(t, g, nil, z)
			}
		})
	}
}
