package fabric_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/quant"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
)

// A quantizedCase is an all-reduce of elements in blocks of 8-bit numbers. They begin skip elements after an
// aligned address.
type quantizedCase struct {
	n, skip  int
	format   memory.DType
	mean     bool
	feedback bool
}

// runQuantized runs a case on a group, and returns the elements and errors of all ranks before and after.
func runQuantized[T memory.Element](t *testing.T, group []member, f float[T], c quantizedCase, r *rand.Rand) (xs, gotXs [][]T, errs, gotErrs [][]float32) {
	t.Helper()
	for range group {
		x, e := make([]T, c.n), make([]float32, c.n)
		size := 0
		for k := range x {
			if k%20 == 0 {
				size = r.IntN(24) - 12
			}
			x[k], e[k] = f.of(float32(math.Ldexp(2*r.Float64()-1, size))), float32(math.Ldexp(2*r.Float64()-1, size-5))
		}
		xs, errs = append(xs, x), append(errs, e)
	}
	gotXs, gotErrs = make([][]T, len(group)), make([][]float32, len(group))
	atOnce(group, func(i int, m member) {
		x, e := makeOf[T](t, m.s, c.n+c.skip), makeOf[float32](t, m.s, c.n+c.skip)
		x1, e1 := x.Slice(c.skip, c.n+c.skip), e.Slice(c.skip, c.n+c.skip)
		require.NoError(t, x1.CopyFrom(m.s, xs[i]))
		require.NoError(t, e1.CopyFrom(m.s, errs[i]))
		op := fabric.Quantized{DType: memory.DTypeOf[T](), Format: c.format, N: c.n, X: x1.Ptr(), Mean: c.mean}
		if c.feedback {
			op.Errors = e1.Ptr()
		}
		require.True(t, m.TakesQuantized(&op))
		require.NoError(t, m.LoadQuantized(&op))
		require.NoError(t, m.EnqueueQuantized(m.s, &op))
		gotXs[i], gotErrs[i] = fetch(t, m, x1), fetch(t, m, e1)
		require.NoError(t, errors.Join(x.Close(), e.Close()))
	})
	for i := range gotXs {
		require.True(t, testgpu.SameBits(gotXs[0], gotXs[i]), "ranks 0 and %d have other bits", i)
	}
	return xs, gotXs, errs, gotErrs
}

// TestQuantizedSourceOnTheHost compiles the CUDA source for the host, and compares its bits with the results of
// virtual devices.
func TestQuantizedSourceOnTheHost(t *testing.T) {
	onHost(t, quantizedOnHost[memory.Float16Bits], quantizedOnHost[memory.BFloat16Bits], quantizedOnHost[float32])
}

func quantizedOnHost[T memory.Element](h *hostSource, f float[T]) {
	t, rng := h.t, h.rng
	format, code := memory.Float8E4M3, "E4M3"
	if rng.IntN(2) == 0 {
		format, code = memory.Int8, "Int8"
	}
	h.compile(fabric.QuantizedSourceOnHost(), &fabric.Config{Bytes: 64 << 10}, "-DCHORUS_CODE="+code)
	number := map[bool]uint32{true: 1}
	for i := range 5 {
		c := quantizedCase{n: 1 + rng.IntN(20000), skip: rng.IntN(2), format: format, mean: rng.IntN(2) == 0, feedback: rng.IntN(2) == 0}
		xs, gotXs, errs, gotErrs := runQuantized(t, h.group, f, c, rng)
		share := quant.ShareLen(c.n, h.ranks)
		length, warps := share, 1+rng.IntN(2)
		if i > 0 { // chunks, with a warp that moves no data
			length, warps = quant.WarpLen*(1+rng.IntN(1+share/quant.WarpLen/8)), warps+1
		}
		put(t, &h.in, []uint32{uint32(h.ranks), uint32(c.n), uint32(share), uint32(length), uint32(1 + rng.IntN(2)), uint32(32 * warps), number[c.mean], number[c.feedback], uint32(c.skip)})
		for i := range xs {
			put(t, &h.in, xs[i])
			put(t, &h.want, gotXs[i])
			if c.feedback {
				put(t, &h.in, errs[i])
				put(t, &h.want, gotErrs[i])
			}
		}
		h.compare("%+v, in chunks of %d", c, length)
	}
}

// Operations of any length run on each backend, also between other operations of the ranks.
func TestQuantized(t *testing.T) {
	rng := seeded(t)
	each(t, []int{2, 3, 8}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 64 << 10})
		for range 4 {
			c := quantizedCase{n: 1 + rng.IntN(100000), skip: rng.IntN(2), format: []memory.DType{memory.Float8E4M3, memory.Int8}[rng.IntN(2)], feedback: rng.IntN(2) == 0}
			xs, got, errs, after := runQuantized(t, group, single, c, rng)
			for k := range c.n {
				sum, left := 0.0, 0.0
				most := 0.0
				for i := range xs {
					sum += float64(xs[i][k])
					most += math.Abs(float64(xs[i][k]))
					if c.feedback {
						sum += float64(errs[i][k])
						left += float64(after[i][k])
					}
				}
				if c.feedback {
					require.InDelta(t, sum, float64(got[0][k])+left, 1e-3*(1+most), "the result and the errors are everything")
				} else {
					block := k / quant.BlockLen * quant.BlockLen
					for i := range xs {
						for _, x := range xs[i][block:min(c.n, block+quant.BlockLen)] {
							most = max(most, math.Abs(float64(x)))
						}
					}
					require.InDelta(t, sum, float64(got[0][k]), most*float64(len(xs)+1)/8)
				}
			}
		}
	})
}

// Small operations have one chunk, and four chunks of larger ones fit in the scratch memory. All threads but those of the
// first warp have at most one unit of a chunk.
func TestQuantizedChunks(t *testing.T) {
	for _, ranks := range []int{2, 3, 8} {
		for _, multiprocessors := range []int{1, 3, 132} {
			for _, bytes := range []int{1, 1 << 20, 8 << 20} {
				group := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: ranks, VirtualMultiprocessors: multiprocessors}), &fabric.Config{Bytes: bytes})
				slot, whole := group[0].Sizes()
				for n := 1; n < 200<<20; n += 1 + n/3 {
					length, blocks, threads := group[0].QuantizedChunks(n)
					share := quant.ShareLen(n, ranks)
					room := 1
					if length < share {
						room = 4
						require.GreaterOrEqual(t, blocks*(threads-32)*quant.Unit, length, "a unit for each thread")
					} else {
						require.LessOrEqual(t, n, 4<<20)
					}
					require.True(t, length > 0 && length <= share && length%quant.WarpLen == 0, "%d of %d elements", length, share)
					require.True(t, room*quant.ChunkBytes(length) <= slot && room*ranks*quant.ChunkBytes(length) <= whole, "%d ranks, %d elements: chunks of %d in %d and %d bytes", ranks, n, length, slot, whole)
					require.True(t, blocks >= 1 && blocks <= min(multiprocessors, 128) && threads%32 == 0 && threads <= 512, "%d blocks of %d threads", blocks, threads)
				}
				closeAll(t, group)
			}
		}
	}
}

// An operation that the other ranks do not join ends when its rank is aborted.
func TestQuantizedAborted(t *testing.T) {
	for _, n := range []int{1000, 100_000} { // one chunk, and several
		t.Run(fmt.Sprint(n, " elements"), func(t *testing.T) {
			each(t, []int{2}, func(t *testing.T, devs []*device.Device) {
				group := open(t, devs, &fabric.Config{Bytes: 64 << 10})
				m := group[0]
				x := makeOf[float32](t, m.s, n)
				require.NoError(t, m.EnqueueQuantized(m.s, &fabric.Quantized{DType: memory.Float32, Format: memory.Int8, N: n, X: x.Ptr()}))
				ended, err := m.s.Query()
				require.NoError(t, err)
				require.False(t, ended, "it waits for the other rank")
				m.Abort()
				require.NoError(t, m.s.Sync(testgpu.Context(t)))
				require.ErrorIs(t, m.Err(), fabric.ErrAborted)
				require.ErrorContains(t, m.Err(), "an operation was given up")
			})
		})
	}
}
