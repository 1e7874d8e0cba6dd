package conformance

import (
	"encoding/binary"
	"runtime"
	"testing"
	"unsafe"

	"github.com/gochorus/chorus/internal/cudadrv"
	"github.com/stretchr/testify/require"
)

// storePTX is the image of a kernel "store" that stores its second parameter, a
// 32-bit number, at the address in the first. Kernels needs such an image.
const storePTX = `.version 6.3
.target sm_75
.address_size 64
.visible .entry store(.param .u64 p, .param .u32 v) {
	.reg .b64 %rd<3>;
	.reg .b32 %r<2>;
	ld.param.u64 %rd1, [p];
	ld.param.u32 %r1, [v];
	cvta.to.global.u64 %rd2, %rd1;
	st.global.u32 [%rd2], %r1;
	ret;
}
`

// testKernels tests how an implementation of the driver launches kernels. image is
// storePTX, or an equivalent stand-in.
func testKernels(t *testing.T, drv cudadrv.Driver, image []byte) {
	r := newRig(t, drv)
	k := &kernelRig{rig: r}
	r.do(t, 0, func() (res cudadrv.Result) { k.m, res = drv.ModuleLoadData(image); return res })
	t.Cleanup(func() { r.do(t, 0, func() cudadrv.Result { return drv.ModuleUnload(k.m) }) })
	r.do(t, 0, func() (res cudadrv.Result) { k.f, res = drv.ModuleGetFunction(k.m, "store"); return res })
	res := r.on(t, 0, func() cudadrv.Result { _, res := drv.ModuleGetFunction(k.m, "none"); return res })
	require.Equal(t, cudadrv.ErrorNotFound, res)
	t.Run("Launch", k.testLaunch)
	t.Run("Shared", k.testShared)
	t.Run("Occupancy", k.testOccupancy)
	t.Run("Cooperative", k.testCooperative)
}

type kernelRig struct {
	*rig
	m cudadrv.Module
	f cudadrv.Function
}

type launchShape struct {
	grid, block [3]uint32
	shared      uint32
}

func one(threads uint32) launchShape {
	return launchShape{grid: [3]uint32{1, 1, 1}, block: [3]uint32{threads, 1, 1}}
}

// store launches the kernel with a launch shape and returns the status of the
// call.
func (k *kernelRig) store(t *testing.T, s cudadrv.Stream, p cudadrv.DevicePtr, v uint32, sh launchShape, together bool) cudadrv.Result {
	t.Helper()
	args := new(struct {
		p cudadrv.DevicePtr
		v uint32
	})
	args.p, args.v = p, v
	params := &[2]unsafe.Pointer{unsafe.Pointer(&args.p), unsafe.Pointer(&args.v)}
	var pin runtime.Pinner
	pin.Pin(args)
	defer pin.Unpin()
	return k.on(t, 0, func() cudadrv.Result {
		launch := k.drv.LaunchKernel
		if together {
			launch = k.drv.LaunchCooperativeKernel
		}
		return launch(k.f, sh.grid, sh.block, sh.shared, s, unsafe.Pointer(params))
	})
}

func (k *kernelRig) testLaunch(t *testing.T) {
	s, p := k.stream(t, 0), k.alloc(t, 0, 4)
	ok(t, k.store(t, s, p, 0xabcd1234, one(32), false))
	require.Equal(t, uint32(0xabcd1234), binary.LittleEndian.Uint32(k.download(t, 0, s, p, 4)))
	for name, bad := range map[string]launchShape{
		"no blocks":    {grid: [3]uint32{1, 0, 1}, block: [3]uint32{1, 1, 1}},
		"no threads":   {grid: [3]uint32{1, 1, 1}, block: [3]uint32{1, 1, 0}},
		"wide block":   one(1025),
		"many threads": {grid: [3]uint32{1, 1, 1}, block: [3]uint32{64, 32, 1}},
		"deep block":   {grid: [3]uint32{1, 1, 1}, block: [3]uint32{1, 1, 65}},
		"wide grid":    {grid: [3]uint32{1 << 31, 1, 1}, block: [3]uint32{1, 1, 1}},
		"high grid":    {grid: [3]uint32{1, 1 << 16, 1}, block: [3]uint32{1, 1, 1}},
		"deep grid":    {grid: [3]uint32{1, 1, 1 << 16}, block: [3]uint32{1, 1, 1}},
	} {
		require.Equal(t, cudadrv.ErrorInvalidValue, k.store(t, s, p, 1, bad, false), name)
	}
	k.sync(t, 0, s)
}

func (k *kernelRig) deviceAttribute(t *testing.T, a cudadrv.Attribute) int32 {
	t.Helper()
	v, res := k.drv.DeviceGetAttribute(a, k.devs[0])
	ok(t, res)
	return v
}

func (k *kernelRig) attribute(t *testing.T, a cudadrv.FuncAttribute) (v int32) {
	t.Helper()
	k.do(t, 0, func() (res cudadrv.Result) { v, res = k.drv.FuncGetAttribute(a, k.f); return res })
	return v
}

// testShared raises the limit of a kernel's dynamic shared memory.
func (k *kernelRig) testShared(t *testing.T) {
	require.Positive(t, k.attribute(t, cudadrv.FuncMaxThreadsPerBlock))
	require.Zero(t, k.attribute(t, cudadrv.FuncSharedBytes))
	require.Zero(t, k.attribute(t, cudadrv.FuncLocalBytes))
	require.GreaterOrEqual(t, k.attribute(t, cudadrv.FuncConstBytes), int32(0))
	require.GreaterOrEqual(t, k.attribute(t, cudadrv.FuncRegisters), int32(0))
	usual := k.deviceAttribute(t, cudadrv.AttrMaxSharedMemoryPerBlock)
	most := k.deviceAttribute(t, cudadrv.AttrMaxSharedMemoryOptin)
	require.Equal(t, usual, k.attribute(t, cudadrv.FuncMaxDynamicSharedBytes))
	if most == usual {
		t.Skip("the device has no more shared memory than a block usually gets")
	}
	s, p := k.stream(t, 0), k.alloc(t, 0, 4)
	big := one(32)
	big.shared = uint32(most)
	require.Equal(t, cudadrv.ErrorInvalidValue, k.store(t, s, p, 1, big, false))
	set := func(n int32) cudadrv.Result {
		return k.on(t, 0, func() cudadrv.Result {
			return k.drv.FuncSetAttribute(k.f, cudadrv.FuncMaxDynamicSharedBytes, n)
		})
	}
	require.Equal(t, cudadrv.ErrorInvalidValue, set(most+1))
	ok(t, set(most))
	require.Equal(t, most, k.attribute(t, cudadrv.FuncMaxDynamicSharedBytes))
	ok(t, k.store(t, s, p, 7, big, false))
	require.Equal(t, uint32(7), binary.LittleEndian.Uint32(k.download(t, 0, s, p, 4)))
	ok(t, set(usual))
}

func (k *kernelRig) blocks(t *testing.T, threads int32, shared uintptr) (n int32) {
	t.Helper()
	k.do(t, 0, func() (res cudadrv.Result) {
		n, res = k.drv.OccupancyMaxActiveBlocksPerMultiprocessor(k.f, threads, shared)
		return res
	})
	return n
}

func (k *kernelRig) testOccupancy(t *testing.T) {
	most := k.deviceAttribute(t, cudadrv.AttrMaxThreadsPerMultiprocessor)
	sms := k.deviceAttribute(t, cudadrv.AttrMultiprocessorCount)
	for _, threads := range []int32{1, 32, 33, 256, 1024} {
		n := k.blocks(t, threads, 0)
		require.Positive(t, n)
		require.LessOrEqual(t, n*threads, most)
		require.LessOrEqual(t, k.blocks(t, threads, 32<<10), n, "shared memory is shared")
	}
	require.Equal(t, most/256, k.blocks(t, 256, 0), "the kernel needs next to nothing")
	res := k.on(t, 0, func() cudadrv.Result {
		_, res := k.drv.OccupancyMaxActiveBlocksPerMultiprocessor(k.f, 0, 0)
		return res
	})
	require.Equal(t, cudadrv.ErrorInvalidValue, res)
	for _, limit := range []int32{0, 1024, 100, 32} {
		var grid, block int32
		k.do(t, 0, func() (res cudadrv.Result) {
			grid, block, res = k.drv.OccupancyMaxPotentialBlockSize(k.f, 0, limit)
			return res
		})
		require.Positive(t, block)
		require.LessOrEqual(t, block, int32(1024))
		if limit > 0 {
			require.LessOrEqual(t, block, limit)
		}
		require.Equal(t, sms*k.blocks(t, block, 0), grid)
	}
}

func (k *kernelRig) testCooperative(t *testing.T) {
	if k.deviceAttribute(t, cudadrv.AttrCooperativeLaunch) == 0 {
		t.Skip("the device launches no cooperative kernels")
	}
	s, p := k.stream(t, 0), k.alloc(t, 0, 4)
	full := one(256)
	full.grid[0] = uint32(k.blocks(t, 256, 0) * k.deviceAttribute(t, cudadrv.AttrMultiprocessorCount))
	ok(t, k.store(t, s, p, 5, full, true))
	require.Equal(t, uint32(5), binary.LittleEndian.Uint32(k.download(t, 0, s, p, 4)))
	full.grid[0]++
	require.Equal(t, cudadrv.ErrorCooperativeLaunchTooLarge, k.store(t, s, p, 6, full, true))
	ok(t, k.store(t, s, p, 7, full, false))
	require.Equal(t, uint32(7), binary.LittleEndian.Uint32(k.download(t, 0, s, p, 4)))
}
