package nccl_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// Every reduction of a single rank is what it had, of every type and length.
func TestSingleRank(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := connect(t, devs)[0]
		alone(t, r, func(v uint32) memory.BFloat16Bits { return memory.BFloat16Bits(v & 0x3fff) })
		alone(t, r, func(v uint32) memory.Float16Bits { return memory.Float16Bits(v & 0x3fff) })
		alone(t, r, func(v uint32) memory.Float8E4M3Bits { return memory.Float8E4M3Bits(v & 0x3f) })
		alone(t, r, func(v uint32) memory.Float8E5M2Bits { return memory.Float8E5M2Bits(v & 0x3f) })
		alone(t, r, func(v uint32) float32 { return float32(v) })
		alone(t, r, func(v uint32) float64 { return float64(v) })
		alone(t, r, func(v uint32) int8 { return int8(v) })
		alone(t, r, func(v uint32) int64 { return int64(v) })
	})
}

func alone[T memory.Element](t *testing.T, r rank, of func(uint32) T) {
	t.Helper()
	for _, n := range []int{1, 7, 33001} {
		in := make([]T, n)
		for i := range in {
			in[i] = of(rand.Uint32())
		}
		src, dst := made(t, r.s, in...), room[T](t, r.s, n)
		for _, op := range []nccl.Op{nccl.Sum, nccl.Prod, nccl.Max, nccl.Min, nccl.Avg} {
			for name, reduce := range map[string]func() error{
				"all-reduce":     func() error { return nccl.AllReduce(r.c, r.s, dst, src, op) },
				"reduce":         func() error { return nccl.Reduce(r.c, r.s, dst, src, op, 0) },
				"reduce-scatter": func() error { return nccl.ReduceScatter(r.c, r.s, dst, src, op) },
			} {
				require.NoError(t, dst.Zero(r.s))
				require.NoError(t, reduce(), "%s %s of %s", name, op, src.DType())
				require.Equal(t, in, read(t, r.s, dst), "%s %s of %d %s", name, op, n, src.DType())
			}
		}
	}
}

// A PreMulSum of a single rank multiplies every element, also of sizes for which NCCL's kernel omits
// the last ones, at any address. NCCL has no kernel for 8-bit floats.
func TestSingleRankPreMulSum(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		r := connect(t, devs)[0]
		multiplied[int8](t, r, 3, 2, 6)
		multiplied[uint8](t, r, 3, 2, 6)
		multiplied[int32](t, r, 3, 2, 6)
		multiplied[uint32](t, r, 3, 2, 6)
		multiplied[int64](t, r, 3, 2, 6)
		multiplied[uint64](t, r, 3, 2, 6)
		multiplied[float32](t, r, 3, 2, 6)
		multiplied[float64](t, r, 3, 2, 6)
		multiplied[memory.Float16Bits](t, r, 0x3c00, 0x4000, 0x4000)
		multiplied[memory.BFloat16Bits](t, r, 0x3f80, 0x4000, 0x4000)
		small := room[memory.Float8E4M3Bits](t, r.s, 4)
		sum, err := nccl.NewPreMulSum(r.c, memory.Float8E4M3Bits(0x40))
		require.NoError(t, err)
		require.ErrorIs(t, nccl.AllReduce(r.c, r.s, small, small, sum.Op()), nccl.ErrorInvalidArgument)
		require.NoError(t, sum.Close())
	})
}

// multiplied multiplies elements of a value by a factor.
func multiplied[T memory.Element](t *testing.T, r rank, value, factor, want T) {
	t.Helper()
	sum, err := nccl.NewPreMulSum(r.c, factor)
	require.NoError(t, err)
	defer func() { require.NoError(t, sum.Close()) }()
	const longest = 131_105
	in := slices.Repeat([]T{value}, longest+3)
	src, dst := made(t, r.s, in...), room[T](t, r.s, len(in))
	for _, n := range []int{1, 7, 8193, 33_001, 100_001, 131_073, longest} {
		for _, at := range []int{0, 1, 3} {
			x, y := src.Slice(at, at+n), dst.Slice(at, at+n)
			for name, reduce := range map[string]func() error{
				"all-reduce":     func() error { return nccl.AllReduce(r.c, r.s, y, x, sum.Op()) },
				"reduce":         func() error { return nccl.Reduce(r.c, r.s, y, x, sum.Op(), 0) },
				"reduce-scatter": func() error { return nccl.ReduceScatter(r.c, r.s, y, x, sum.Op()) },
				"in place":       func() error { return errors.Join(y.CopyFrom(r.s, in[:n]), nccl.AllReduce(r.c, r.s, y, y, sum.Op())) },
			} {
				require.NoError(t, dst.Zero(r.s))
				require.NoError(t, reduce())
				wrong := slices.IndexFunc(read(t, r.s, y), func(v T) bool { return v != want })
				require.Equal(t, -1, wrong, "%s of %d %s from element %d: the first wrong element", name, n, src.DType(), at)
			}
		}
	}
}
