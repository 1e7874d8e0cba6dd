package optim

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
)

// The blocks of a table cover each element of each row once, whatever the chunk.
func TestTableCoversElements(t *testing.T) {
	for chunk := leastChunk; chunk <= mostChunk; chunk *= 2 {
		var x table[list]
		lens := []int{0, 1, leastChunk, mostChunk - 1, mostChunk, 3*mostChunk + 5}
		for _, n := range lens {
			x.add(list{n: uint64(n)}, n, chunk)
		}
		next := make([]int, len(lens))
		for _, b := range x.blocks {
			require.EqualValues(t, next[b.row], b.begin)
			require.Zero(t, b.begin%(threads*lanes), "packs of lanes cross chunks")
			next[b.row] = min(int(b.begin)+int(b.size), lens[b.row])
		}
		require.Equal(t, lens, next)
	}
}

// A small model has small chunks, and a large model has the largest.
func TestChunks(t *testing.T) {
	dev := testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1, VirtualMultiprocessors: 132})[0]
	for n, want := range map[int]int{0: leastChunk, 500_000: leastChunk, 2_000_000: 2048, 4 * 132 * mostChunk: mostChunk, 1 << 40: mostChunk} {
		got, err := chunkOf(dev, n)
		require.NoError(t, err)
		require.Equal(t, want, got, "%d elements", n)
	}
}
