package comm_test

import (
	"testing"

	"github.com/gochorus/chorus/comm"
	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
	"github.com/stretchr/testify/require"
)

// Rows go to the ranks that the counts say, and come in the order of the ranks.
func TestRows(t *testing.T) {
	for _, ranks := range []int{1, 2, 4} {
		testgpu.Each(t, ranks, func(t *testing.T, devs []*device.Device) {
			g := local(t, devs)
			r := seededPCG(t)(0)
			for range 5 {
				width := 1 + r.IntN(9)
				sends := make([][]int, ranks)
				for i := range sends {
					for range ranks {
						sends[i] = append(sends[i], r.IntN(6))
					}
				}
				recvs, err := comm.ExchangeCounts(t.Context(), g, sends)
				require.NoError(t, err)
				const experts = 3
				many := make([][]int, ranks) // several numbers for each rank
				for i := range many {
					for range experts * ranks {
						many[i] = append(many[i], r.IntN(1<<40))
					}
				}
				each, err := comm.ExchangeCounts(t.Context(), g, many)
				require.NoError(t, err)
				for i := range ranks {
					require.Len(t, each[i], experts*ranks)
					for k, n := range each[i] {
						require.Equal(t, many[k/experts][i*experts+k%experts], n)
					}
				}
				src, dst := make([]tensor.Tensor, ranks), make([]tensor.Tensor, ranks)
				want := make([][]int32, ranks)
				for i := range ranks {
					require.Len(t, recvs[i], ranks)
					rows, in := 0, []int32{}
					for to, n := range sends[i] {
						require.Equal(t, n, recvs[to][i])
						for k := range n * width {
							in = append(in, int32(10000*i+1000*to+k))
						}
						rows += n
					}
					src[i] = filled(t, g, i, rows, width, in)
					got := 0
					for from, n := range recvs[i] {
						for k := range n * width {
							want[i] = append(want[i], int32(10000*from+1000*i+k))
						}
						got += n
					}
					dst[i] = filled(t, g, i, got, width, make([]int32, got*width))
				}
				require.NoError(t, comm.OfTensors(g).AllToAllV(dst, recvs, src, sends))
				for i, x := range dst {
					host, err := tensor.MakeHost(memory.Int32, x.Shape()...)
					require.NoError(t, err)
					require.NoError(t, tensor.Copy(g.Stream(i), host, x))
					got, err := tensor.Data[int32](host)
					require.NoError(t, err)
					require.Equal(t, want[i], append([]int32(nil), got...))
				}
				for i := range ranks {
					require.NoError(t, src[i].Close())
					require.NoError(t, dst[i].Close())
				}
			}
		})
	}
}

func filled(t *testing.T, g *comm.Group, i, rows, width int, in []int32) tensor.Tensor {
	t.Helper()
	x, err := tensor.Make(g.Stream(i), memory.Int32, rows, width)
	require.NoError(t, err)
	if len(in) > 0 {
		data, err := tensor.Slice[int32](x)
		require.NoError(t, err)
		require.NoError(t, data.CopyFrom(g.Stream(i), in))
	}
	return x
}

func TestRowsRefuse(t *testing.T) {
	g := local(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}))
	for want, sends := range map[string][][]int{
		"counts of 1 ranks for 2 local ranks":                      {{1, 1}},
		"local rank 1 has 1 counts: want 1 for each of 2 ranks":    {{1, 1}, {1}},
		"local rank 0 has the count -1 for rank 1: want 0 or more": {{1, -1}, {1, 1}},
	} {
		_, err := comm.ExchangeCounts(t.Context(), g, sends)
		require.ErrorContains(t, err, want)
		require.ErrorIs(t, err, comm.ErrMismatch)
	}
	one := [][]int{{1, 1}, {1, 1}}
	make2 := func(rows, width int) []tensor.Tensor {
		var list []tensor.Tensor
		for i := range 2 {
			x := filled(t, g, i, rows, width, nil)
			t.Cleanup(func() { require.NoError(t, x.Close()) })
			list = append(list, x)
		}
		return list
	}
	good, wide, long := make2(2, 3), make2(2, 4), make2(3, 3)
	float, err := tensor.Make(g.Stream(0), memory.Float32, 2, 3)
	require.NoError(t, err)
	defer float.Close()
	issue := comm.OfTensors(g)
	require.ErrorContains(t, issue.AllToAllV(good[:1], one, good, one), "1 destination tensors for 2 local ranks")
	require.ErrorContains(t, issue.AllToAllV(wide, one, good, one), "rows of 4 and of 3 elements")
	require.ErrorContains(t, issue.AllToAllV(long, one, good, one), "has 3 rows, and its counts have 2")
	require.ErrorContains(t, issue.AllToAllV(good, one, []tensor.Tensor{good[1], good[0]}, one), "want one on virtual:0")
	require.ErrorContains(t, issue.AllToAllV([]tensor.Tensor{float, good[1]}, one, good, one), "has elements of float32, the first source of int32")
	require.ErrorContains(t, issue.AllToAllV([]tensor.Tensor{wide[0].T(), good[1]}, one, good, one), "not a contiguous tensor of rows")
}
