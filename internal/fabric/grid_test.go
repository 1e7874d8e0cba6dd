package fabric_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/env"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A kernel has no more blocks than the device with the fewest multiprocessors could run
// at once, of whole warps, and a thread for each word until that is not enough.
func TestGrid(t *testing.T) {
	for _, multiprocessors := range []int{1, 3, 132, 200} {
		group := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualMultiprocessors: multiprocessors}), &fabric.Config{Bytes: 1})
		most := min(multiprocessors, 128)
		for steps := 1; steps <= 300_000; steps += 1 + steps/3 {
			blocks, threads := group[0].Grid(steps)
			b, n := group[1].Grid(steps)
			require.Equal(t, []int{blocks, threads}, []int{b, n}, "the same on all ranks")
			require.Zero(t, threads%32)
			require.True(t, threads >= 32 && threads <= 512 && blocks >= 1 && blocks <= most, "%d blocks of %d for %d", blocks, threads, steps)
			require.Less(t, (blocks-1)*threads, steps, "no block without work: %d of %d for %d", blocks, threads, steps)
			if steps <= most*512 {
				require.GreaterOrEqual(t, blocks*threads, steps)
			} else {
				require.Equal(t, []int{most, 512}, []int{blocks, threads})
			}
		}
		carryOut(t, group, floats(func(x float32) float32 { return x }), call{name: "all-reduce", algorithm: fabric.TwoShot, n: 16384})
	}
}

// TestGridOfSharedGPU checks that the kernels of all ranks on one GPU are resident at once, and
// leave multiprocessors to other kernels.
func TestGridOfSharedGPU(t *testing.T) {
	t.Setenv(env.ShareGPUs.Name, "yes")
	for _, multiprocessors := range []int{2, 9, 132} {
		devs := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualMultiprocessors: multiprocessors})
		group := open(t, []*device.Device{devs[0], devs[1], devs[0], devs[0]}, &fabric.Config{Bytes: 1})
		for _, m := range group {
			blocks, _ := m.Grid(1 << 20)
			require.Equal(t, max(multiprocessors/4, 1), blocks)
		}
		carryOut(t, group, floats(func(x float32) float32 { return x }), call{name: "all-reduce", algorithm: fabric.TwoShot, n: 16384})
	}
}

// TestNormGrid checks that a norm has at most the blocks that are resident at once, in whole teams, and
// that few rows get more blocks if the device has clusters.
func TestNormGrid(t *testing.T) {
	for _, multiprocessors := range []int{1, 14, 132, 200} {
		group := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2, VirtualMultiprocessors: multiprocessors}), &fabric.Config{Bytes: 1 << 20})
		most := min(multiprocessors, 128)
		for rows := 1; rows <= 300; rows += 1 + rows/3 {
			for cols := 4; cols <= 50_000; cols += 4 * (1 + cols/11) {
				x := &fabric.Norm{DType: memory.BFloat16, Rows: rows, Cols: cols}
				team, blocks, threads := group[0].NormGrid(x)
				words := cols / 4
				require.Contains(t, []int{1, 2, 4, 8}, team)
				require.Zero(t, threads%32)
				require.Zero(t, blocks%team)
				require.True(t, threads >= 32 && threads <= 512 && blocks >= team && blocks <= most, "%d blocks of %d in teams of %d", blocks, threads, team)
				require.True(t, team == 1 || team*rows == blocks, "each row has a team")
				require.True(t, team*threads >= min(words, 2048) || threads == 512 && team < 4, "%d blocks of %d threads for %d words", team, threads, words)
				group[0].SetClusters(false)
				team, _, _ = group[0].NormGrid(x)
				require.Equal(t, 1, team)
				group[0].SetClusters(true)
			}
		}
		few, _, threads := group[0].NormGrid(&fabric.Norm{DType: memory.BFloat16, Rows: 1, Cols: 6144})
		require.Equal(t, map[int][]int{1: {1, 512}, 14: {8, 192}, 132: {8, 192}, 200: {8, 192}}[multiprocessors], []int{few, threads})
	}
}
