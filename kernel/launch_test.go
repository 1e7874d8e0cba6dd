package kernel_test

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// reach sums, in shared memory from its first to its last byte, the numbers of
// the blocks, and waits for all of them in between.
var reach = kernel.Source{
	Name: "reach.cu",
	CUDA: `extern "C" __global__ void __launch_bounds__(128) reach(unsigned* out, unsigned words) {
	extern __shared__ unsigned shared[];
	shared[0] = 1;
	shared[words - 1] += 1;
	atomicAdd(out, shared[0]);
}`,
	Kernels: []kernel.Def{{
		Name:   "reach",
		Params: []kernel.Param{kernel.Pointer, kernel.U32},
		Go: func(c *kernel.Call) {
			if g := c.Grid(); g.SharedBytes >= 4*kernel.Get[uint32](c, 1) {
				kernel.Update[uint32](c, 0, 1)[0] += g.Blocks[0] * g.Threads[0]
			}
		},
	}},
}

// together counts the blocks that have come, and each block waits for all.
var together = kernel.Source{
	Name: "together.cu",
	CUDA: `extern "C" __global__ void together(unsigned* come, unsigned* met) {
	atomicAdd(come, 1);
	while (*(volatile unsigned*)come < gridDim.x) {}
	atomicAdd(met, 1);
}`,
	Kernels: []kernel.Def{{
		Name:   "together",
		Params: []kernel.Param{kernel.Pointer, kernel.Pointer},
		Go: func(c *kernel.Call) {
			kernel.Update[uint32](c, 0, 1)[0] += c.Grid().Blocks[0]
			kernel.Update[uint32](c, 1, 1)[0] += c.Grid().Blocks[0]
		},
	}},
}

func compiled(t *testing.T, d *device.Device, src *kernel.Source) (*stream.Stream, *kernel.Kernel) {
	t.Helper()
	s, err := stream.New(d, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	m, err := kernel.Compile(d, src)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, m.Close()) })
	k, err := m.Kernel(src.Kernels[0].Name)
	require.NoError(t, err)
	return s, k
}

func zeros(t *testing.T, s *stream.Stream, n int) memory.Slice[uint32] {
	t.Helper()
	x, err := memory.MakeFrom(s, make([]uint32, n))
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, x.Close()) })
	return x
}

func first(t *testing.T, s *stream.Stream, x memory.Slice[uint32]) uint32 {
	t.Helper()
	got := make([]uint32, x.Len())
	require.NoError(t, x.CopyTo(s, got))
	return got[0]
}

func flat(blocks, threads, shared uint32) kernel.Grid {
	return kernel.Grid{Blocks: [3]uint32{blocks, 1, 1}, Threads: [3]uint32{threads, 1, 1}, SharedBytes: shared}
}

func TestDynamicSharedMemory(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, k := compiled(t, devs[0], &reach)
		x := zeros(t, s, 1)
		most := uint32(k.Attributes().MaxDynamicSharedBytes)
		require.GreaterOrEqual(t, most, uint32(48<<10))
		want := uint32(0)
		for _, bytes := range []uint32{8, 48 << 10, most, 1024, most} {
			require.NoError(t, k.Launch(s, flat(3, 1, bytes), kernel.Ptr(x), kernel.Scalar[uint32](bytes/4)))
			want += 3
			require.Equal(t, want, first(t, s, x), "%d bytes", bytes)
		}
		err := k.Launch(s, flat(1, 1, most+1), kernel.Ptr(x), kernel.Scalar[uint32](1))
		require.ErrorContains(t, err, "bytes of dynamic shared memory: a block has at most")
		require.Equal(t, want, first(t, s, x), "nothing ran, and the device is well")
	})
}

func TestSharedMemoryIsAllowedOnce(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: "cuFuncSetAttribute#2=CUDA_ERROR_INVALID_VALUE"})
	s, k := compiled(t, devs[0], &reach)
	x := zeros(t, s, 1)
	for _, bytes := range []uint32{60 << 10, 100 << 10, 64 << 10} {
		require.NoError(t, k.Launch(s, flat(1, 1, bytes), kernel.Ptr(x), kernel.Scalar[uint32](2)))
	}
	_, l := compiled(t, devs[0], &reach)
	require.ErrorIs(t, l.Launch(s, flat(1, 1, 60<<10), kernel.Ptr(x), kernel.Scalar[uint32](2)), device.ErrorInvalidValue)
}

func TestLaunchChecksGrid(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, k := compiled(t, devs[0], &reach)
		x := zeros(t, s, 1)
		most := uint32(k.Attributes().MaxThreads)
		for want, g := range map[string]kernel.Grid{
			"no threads in y: want 1 or more":            {Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 0, 1}, SharedBytes: 8},
			"2147483648 blocks in x: at most 2147483647": flat(1<<31, 1, 8),
			"65536 blocks in z: at most 65535":           {Blocks: [3]uint32{1, 1, 1 << 16}, Threads: [3]uint32{1, 1, 1}, SharedBytes: 8},
			"65 threads of a block in z: at most 64":     {Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{1, 1, 65}, SharedBytes: 8},
			"1025 threads of a block in x: at most 1024": flat(1, 1025, 8),
			"1056 threads of a block: at most":           {Blocks: [3]uint32{1, 1, 1}, Threads: [3]uint32{32, 33, 1}, SharedBytes: 8},
		} {
			err := k.Launch(s, g, kernel.Ptr(x), kernel.Scalar[uint32](2))
			require.ErrorContains(t, err, "kernel: launch reach on "+devs[0].String()+": ")
			require.ErrorContains(t, err, want)
		}
		if most < 1024 { // what the source binds; a stand-in has no such thing
			require.ErrorContains(t, k.Launch(s, flat(1, most+1, 8), kernel.Ptr(x), kernel.Scalar[uint32](2)), "threads of a block: at most 128 of this kernel")
		}
		require.NoError(t, k.Launch(s, flat(0, 1, 8), kernel.Ptr(x), kernel.Scalar[uint32](2)), "launches nothing")
		require.NoError(t, k.Launch(s, flat(2, most, 8), kernel.Ptr(x), kernel.Scalar[uint32](2)))
		require.Equal(t, 2*most, first(t, s, x))
	})
}

func TestAttributes(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		_, k := compiled(t, devs[0], &reach)
		a := k.Attributes()
		require.Positive(t, a.MaxThreads)
		require.GreaterOrEqual(t, a.MaxDynamicSharedBytes, 48<<10)
		if devs[0].System().Backend() == "cuda" {
			require.Equal(t, 128, a.MaxThreads, "as __launch_bounds__ says")
			require.Positive(t, a.Registers)
			require.Zero(t, a.LocalBytes)
		}
	})
}

func TestOccupancy(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		_, k := compiled(t, devs[0], &together)
		p, err := devs[0].Properties()
		require.NoError(t, err)
		all, err := k.Occupancy(256, 0)
		require.NoError(t, err)
		require.Equal(t, p.ThreadsPerMultiproc/256, all)
		few, err := k.Occupancy(256, k.Attributes().MaxDynamicSharedBytes)
		require.NoError(t, err)
		require.Equal(t, 1, few)
		for _, limit := range []int{0, 100, 5000} {
			threads, blocks, err := k.BestBlock(0, limit)
			require.NoError(t, err)
			each, err := k.Occupancy(threads, 0)
			require.NoError(t, err)
			require.Equal(t, each*p.Multiprocessors, blocks)
			if limit == 100 {
				require.LessOrEqual(t, threads, 100)
			} else {
				require.Equal(t, p.ThreadsPerMultiproc, each*threads)
			}
		}
		for _, bad := range [][2]int{{0, 0}, {1025, 0}, {-1, 0}, {32, -1}, {32, 1 << 20}} {
			_, err := k.Occupancy(bad[0], bad[1])
			require.ErrorContains(t, err, "kernel: occupancy of together: ", bad)
		}
		_, _, err = k.BestBlock(0, -1)
		require.ErrorContains(t, err, "a limit of -1 threads")
		_, _, err = k.BestBlock(1<<20, 0)
		require.ErrorContains(t, err, "1048576 bytes of dynamic shared memory: want 0 to")
	})
}

func TestCooperativeLaunch(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		s, k := compiled(t, devs[0], &together)
		p, err := devs[0].Properties()
		require.NoError(t, err)
		each, err := k.Occupancy(64, 0)
		require.NoError(t, err)
		blocks := uint32(each * p.Multiprocessors)
		come, met := zeros(t, s, 1), zeros(t, s, 1)
		// One thread of each block counts.
		err = k.LaunchCooperative(s, flat(blocks+1, 64, 0), kernel.Ptr(come), kernel.Ptr(met))
		require.ErrorIs(t, err, device.ErrorCooperativeLaunchTooLarge)
		require.ErrorContains(t, err, "kernel: launch together together: ")
		require.Equal(t, uint32(0), first(t, s, come))
		each, err = k.Occupancy(1, 0)
		require.NoError(t, err)
		blocks = uint32(each * p.Multiprocessors)
		require.NoError(t, k.LaunchCooperative(s, flat(blocks, 1, 0), kernel.Ptr(come), kernel.Ptr(met)))
		require.Equal(t, blocks, first(t, s, met))
		require.ErrorContains(t, k.LaunchCooperative(s, flat(1, 1, 0), kernel.Ptr(come)), "1 arguments: want 2: [pointer pointer]")
	})
}

func TestAttributesFail(t *testing.T) {
	for _, fault := range []string{"cuFuncGetAttribute#3=CUDA_ERROR_INVALID_HANDLE", "cuDeviceGetAttribute#2=CUDA_ERROR_INVALID_HANDLE"} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, Faults: fault})
		_, err := kernel.Compile(devs[0], &reach)
		require.ErrorIs(t, err, device.ErrorInvalidHandle, fault)
	}
}

func TestBadDefinitions(t *testing.T) {
	devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})
	stand := func(*kernel.Call) {}
	for want, defs := range map[string][]kernel.Def{
		`has no name, or the same name as another kernel: ""`:  {{Go: stand}},
		`has no name, or the same name as another kernel: "a"`: {{Name: "a", Go: stand}, {Name: "a", Go: stand}},
		"a has 33 parameters: at most 32":                      {{Name: "a", Go: stand, Params: make([]kernel.Param, 33)}},
		"parameter 1 of a has no type":                         {{Name: "a", Go: stand, Params: []kernel.Param{kernel.I32, 99}}},
	} {
		_, err := kernel.Compile(devs[0], &kernel.Source{Name: "bad.cu", Kernels: defs})
		require.ErrorContains(t, err, "kernel: compile bad.cu: ")
		require.ErrorContains(t, err, want)
	}
}

func TestCover(t *testing.T) {
	for n, blocks := range map[int]uint32{-5: 0, 0: 0, 1: 1, 256: 1, 257: 2, 1 << 20: 1 << 12, 1 << 45: math.MaxUint32} {
		require.Equal(t, flat(blocks, 256, 0), kernel.Cover(n), "%d threads", n)
	}
}
