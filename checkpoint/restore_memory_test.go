package checkpoint

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
)

// restorePeaks restores the parts, and returns by device the most memory that Restore needed besides
// the parts.
func restorePeaks(t *testing.T, s *Saved, g *comm.Group, devs []*device.Device, parts [][]Part, round int) (peaks []int64) {
	held := heldMemory(t, devs)
	for _, d := range devs {
		require.NoError(t, memory.ResetPeakStats(d))
	}
	_, err := s.Restore(t.Context(), g, parts, &RestoreConfig{RoundBytes: round})
	require.NoError(t, err)
	for i, d := range devs {
		most, err := memory.MaxAllocated(d)
		require.NoError(t, err)
		peaks = append(peaks, most-held[i])
	}
	return peaks
}

// memoryParts are parts of tensors of 64 rows. If n is 1, each rank has the whole tensors. Otherwise
// the ranks have n parts along dimension dim.
func memoryParts(t *testing.T, g *comm.Group, tensors, columns, dim, n int) [][]Part {
	parts := make([][]Part, g.Locals())
	for rank := range parts {
		for k := range tensors {
			p := Part{Name: fmt.Sprint("layer.", k), Shape: []int{64, columns}, Dim: dim}
			shape := []int{64, columns}
			shape[dim] /= n
			p.Start = rank % n * shape[dim]
			p.Data = makeTensor(t, g.Stream(rank), make([]int32, product(shape)), shape)
			parts[rank] = append(parts[rank], p)
		}
	}
	return parts
}

// TestRestoreKeepsToRoundBytes restores many more bytes than RoundBytes allows at a time. Whole tensors
// need at most RoundBytes. Columns of tensors that are cut by rows need as much again, because the
// ranks exchange rows.
func TestRestoreKeepsToRoundBytes(t *testing.T) {
	const round = 128 << 10
	for _, x := range []struct{ ranks, tensors, columns int }{{1, 16, 256}, {2, 16, 256}, {4, 64, 64}, {4, 8, 1024}, {2, 2, 4096}} {
		t.Run(fmt.Sprint(x), func(t *testing.T) {
			onVirtual(t, x.ranks, func(t *testing.T, devs []*device.Device) {
				g, folder := localGroup(t, devs), t.TempDir()
				v, err := NewSaver(t.Context(), g, folder, memoryParts(t, g, x.tensors, x.columns, 0, x.ranks), nil)
				require.NoError(t, err)
				require.NoError(t, v.Save(t.Context(), 1, groupStreams(g)))
				require.NoError(t, v.Close())
				s, _, err := Latest(t.Context(), g, folder)
				require.NoError(t, err)
				defer s.Close()
				stored := 64 * x.columns / x.ranks * 4 // bytes of a part in the checkpoint
				for _, peak := range restorePeaks(t, s, g, devs, memoryParts(t, g, x.tensors, x.columns, 0, 1), round) {
					require.LessOrEqual(t, peak, int64(max(round, stored)), "whole tensors")
				}
				for _, peak := range restorePeaks(t, s, g, devs, memoryParts(t, g, x.tensors, x.columns, 1, x.ranks), round) {
					require.LessOrEqual(t, peak, int64(max(round, stored/x.ranks)+round), "columns")
				}
			})
		})
	}
}
