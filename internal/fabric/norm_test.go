package fabric_test

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/graph"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// A normCase is the shape of a fused norm.
type normCase struct {
	rows, cols int
	algorithm  fabric.Algorithm
	scale      float32 // 0: the output has the type of the input
	inPlace    bool
	eps        float32
}

// A float describes a type of elements: half is the relative error of rounding to it, and least
// the error of its smallest numbers.
type float[T memory.Element] struct {
	of          func(float32) T
	value       func(T) float32
	half, least float64
}

var (
	half   = float[memory.Float16Bits]{memory.Float16Of, memory.Float16Bits.Float32, 0x1p-11, 0x1p-25}
	bfloat = float[memory.BFloat16Bits]{memory.BFloat16Of, memory.BFloat16Bits.Float32, 0x1p-8, 0}
	single = float[float32]{func(x float32) float32 { return x }, func(x float32) float32 { return x }, 0x1p-24, 0}
)

// margin is the number of elements before and after an output that a kernel must not write.
const margin = 16

// A normRank has the operands of one rank. The outputs are in the middle of poisoned memory.
type normRank[T memory.Element] struct {
	m           member
	in, weight  memory.Slice[T]
	residual    memory.Slice[T]
	out         memory.Slice[T]
	small       memory.Slice[memory.Float8E4M3Bits]
	scale       memory.Slice[float32]
	hostIn      []T
	hostWeight  []T
	hostAdd     []T
	norm        fabric.Norm
	gotSum, got []T
	gotSmall    []memory.Float8E4M3Bits
}

func newNormRank[T memory.Element](t testing.TB, m member, f float[T], c normCase, rng, shared *rand.Rand) *normRank[T] {
	n := c.rows * c.cols
	x := &normRank[T]{m: m, in: makeOf[T](t, m.s, n), weight: makeOf[T](t, m.s, c.cols), residual: makeOf[T](t, m.s, n+2*margin)}
	random := func(rng *rand.Rand, n int, spread float64) []T {
		list := make([]T, n)
		for i := range list {
			list[i] = f.of(float32(rng.NormFloat64() * spread))
		}
		return list
	}
	x.hostIn, x.hostWeight, x.hostAdd = random(rng, n, 2), random(shared, c.cols, 1), random(shared, n+2*margin, 3)
	x.out, x.small = makeOf[T](t, m.s, n+2*margin), makeOf[memory.Float8E4M3Bits](t, m.s, n+2*margin)
	x.scale = makeOf[float32](t, m.s, 1)
	require.NoError(t, errors.Join(x.weight.CopyFrom(m.s, x.hostWeight), x.scale.CopyFrom(m.s, []float32{c.scale})))
	x.norm = fabric.Norm{DType: x.in.DType(), Rows: c.rows, Cols: c.cols, In: x.in.Ptr(), Residual: x.middle(x.residual), Weight: x.weight.Ptr(), Out: x.middle(x.out), Eps: c.eps, Algorithm: c.algorithm}
	if c.inPlace {
		x.norm.Out = x.in.Ptr()
	}
	if c.scale != 0 {
		x.norm.Scale, x.norm.Out = x.scale.Ptr(), x.small.Slice(margin, margin+n).Ptr()
	}
	return x
}

func (x *normRank[T]) middle(s memory.Slice[T]) uint64 {
	return s.Slice(margin, s.Len()-margin).Ptr()
}

// begin sets the operands to their values before the operation.
func (x *normRank[T]) begin(f float[T]) error {
	wrong := slices.Repeat([]T{f.of(7)}, x.out.Len())
	small := slices.Repeat([]memory.Float8E4M3Bits{0x55}, x.small.Len())
	return errors.Join(x.in.CopyFrom(x.m.s, x.hostIn), x.residual.CopyFrom(x.m.s, x.hostAdd), x.out.CopyFrom(x.m.s, wrong), x.small.CopyFrom(x.m.s, small))
}

func (x *normRank[T]) read(t *testing.T, c normCase) {
	x.gotSum, x.got, x.gotSmall = make([]T, x.residual.Len()), make([]T, x.out.Len()), make([]memory.Float8E4M3Bits, x.small.Len())
	require.NoError(t, errors.Join(x.residual.CopyTo(x.m.s, x.gotSum), x.out.CopyTo(x.m.s, x.got), x.small.CopyTo(x.m.s, x.gotSmall)))
	if c.inPlace && c.scale == 0 {
		require.NoError(t, x.in.CopyTo(x.m.s, x.got[margin:len(x.got)-margin]))
	}
	require.NoError(t, x.m.s.Sync(testgpu.Context(t)))
}

// check compares the results of a rank with a reference in float64.
func check[T memory.Element](t *testing.T, all []*normRank[T], x *normRank[T], f float[T], c normCase) {
	n := c.rows * c.cols
	for i := range margin {
		for _, at := range []int{i, margin + n + i} {
			require.Equal(t, x.hostAdd[at], x.gotSum[at], "around the residual")
			require.Equal(t, f.of(7), x.got[at], "around the output")
			require.Equal(t, memory.Float8E4M3Bits(0x55), x.gotSmall[at], "around the small output")
		}
	}
	sums := x.gotSum[margin:]
	for row := range c.rows {
		squares := 0.0
		for col := range c.cols {
			at := row*c.cols + col
			want := float64(f.value(x.hostAdd[margin+at]))
			size := math.Abs(want)
			for _, y := range all {
				v := float64(f.value(y.hostIn[at]))
				want, size = want+v, size+math.Abs(v)
			}
			have := float64(f.value(sums[at]))
			requireNear(t, want, have, f.half*math.Abs(want)*1.01+f.least+size*float64(len(all))*0x1p-23, "the sum of row %d, column %d", row, col)
			squares += have * have
		}
		factor := 1 / math.Sqrt(squares/float64(c.cols)+float64(c.eps))
		for col := range c.cols {
			at := row*c.cols + col
			want := float64(f.value(sums[at])) * factor * float64(f.value(x.hostWeight[col]))
			inexact := math.Abs(want) * (float64(c.cols) + 8) * 0x1p-24
			if c.scale == 0 {
				requireNear(t, want, float64(f.value(x.got[margin+at])), f.half*math.Abs(want)*1.01+f.least+inexact, "row %d, column %d", row, col)
				continue
			}
			q := min(max(want/float64(c.scale), -448), 448)
			requireNear(t, q, float64(x.gotSmall[margin+at].Float32()), math.Abs(q)*0x1p-4*1.01+0x1p-10+inexact/float64(c.scale), "row %d, column %d, small", row, col)
		}
	}
}

// requireNear is require.InDelta, whose bookkeeping takes longer than the norms.
func requireNear(t *testing.T, want, have, bound float64, format string, args ...any) {
	if !(math.Abs(want-have) <= bound) {
		require.InDelta(t, want, have, bound, fmt.Sprintf(format, args...))
	}
}

// runNorm runs a fused norm on all ranks, eagerly and in a graph, and checks it.
func runNorm[T memory.Element](t *testing.T, group []member, f float[T], c normCase, seed uint64) []*normRank[T] {
	all := make([]*normRank[T], len(group))
	for i, m := range group {
		all[i] = newNormRank(t, m, f, c, rand.New(rand.NewPCG(seed, uint64(i+1))), rand.New(rand.NewPCG(seed, 0)))
		require.True(t, m.TakesNorm(&all[i].norm))
	}
	for _, captured := range []bool{false, true} {
		execs := make([]*graph.Exec, len(group))
		for i, x := range all {
			require.NoError(t, x.begin(f))
			if captured {
				var err error
				execs[i], err = graph.Capture([]*stream.Stream{x.m.s}, func() error { return x.m.EnqueueNorm(x.m.s, &x.norm) }, nil)
				require.NoError(t, err)
			}
			require.NoError(t, x.m.s.Sync(testgpu.Context(t)))
		}
		errs := make([]error, len(group))
		atOnce(group, func(i int, m member) {
			if captured {
				errs[i] = execs[i].Launch(m.s)
			} else {
				errs[i] = m.EnqueueNorm(m.s, &all[i].norm)
			}
		})
		require.NoError(t, errors.Join(errs...))
		for i, x := range all {
			x.read(t, c)
			require.NoError(t, execs[i].Close())
		}
		for _, x := range all {
			check(t, all, x, f, c)
			require.Equal(t, all[0].gotSum, x.gotSum, "all ranks have the same bits")
			require.Equal(t, all[0].got, x.got)
			require.Equal(t, all[0].gotSmall, x.gotSmall)
		}
	}
	return all
}

// TestNorm checks random shapes, with all types and algorithms.
func TestNorm(t *testing.T) {
	each(t, []int{2, 3, 4, 5, 6, 7, 8}, func(t *testing.T, devs []*device.Device) {
		group, rng := open(t, devs, &fabric.Config{Bytes: 1 << 20}), seeded(t)
		for range testgpu.Rounds(testhost.Rounds(2, 4), 40) {
			c := normCase{
				rows: 1 + rng.IntN(8), cols: 4 * (1 + rng.IntN(300)), inPlace: rng.IntN(2) == 0, eps: []float32{0, 1e-6, 0.5}[rng.IntN(3)],
				algorithm: []fabric.Algorithm{fabric.Auto, fabric.OneShot, fabric.TwoShotPackets}[rng.IntN(3)], scale: []float32{0, 0, 0.01, 0.3}[rng.IntN(4)],
			}
			if rng.IntN(3) == 0 { // more words than a block of threads has registers for
				c.rows, c.cols, c.algorithm = 1+rng.IntN(2), 4*(1500+rng.IntN(1000)), fabric.TwoShotPackets
			}
			switch rng.IntN(3) {
			case 0:
				runNorm(t, group, half, c, rng.Uint64())
			case 1:
				runNorm(t, group, bfloat, c, rng.Uint64())
			default:
				runNorm(t, group, single, c, rng.Uint64())
			}
			if t.Failed() {
				t.Fatalf("case %+v", c)
			}
		}
	})
}

// TestNormBits checks that the bits of a row do not depend on the algorithm, on the other rows, on
// clusters, or on whether the kernel of one rank does it. Only GPUs check clusters: the Go
// functions of virtual devices ignore the grid.
func TestNormBits(t *testing.T) {
	each(t, []int{3}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 1 << 20})
		for _, cols := range []int{1204, 6144, 10_000} { // teams of 2 and 8 blocks, and more words than slots
			want := bitsOf(t, group, normCase{rows: 1, cols: cols, algorithm: fabric.OneShot})[0]
			for _, clusters := range []bool{true, false} {
				for _, m := range group {
					m.SetClusters(clusters)
				}
				for _, c := range []normCase{{rows: 1, algorithm: fabric.TwoShotPackets}, {rows: 5, algorithm: fabric.OneShot}, {rows: 5, algorithm: fabric.TwoShotPackets}} {
					c.cols = cols
					for _, got := range bitsOf(t, group, c) {
						require.Equal(t, want, got, "%+v, clusters %t", c, clusters)
					}
				}
			}
			for _, m := range group {
				m.SetClusters(true)
			}
		}
	})
}

// bitsOf returns the rows of a norm whose rows have the same operands. It checks that the
// kernel of one rank normalizes the sums to the same bits.
func bitsOf(t *testing.T, group []member, c normCase) (rows [][]memory.BFloat16Bits) {
	const seed = 7
	c.eps = 1e-5
	all := make([]*normRank[memory.BFloat16Bits], len(group))
	for i, m := range group {
		x := newNormRank(t, m, bfloat, c, rand.New(rand.NewPCG(seed, uint64(i+1))), rand.New(rand.NewPCG(seed, 0)))
		for r := range c.rows {
			copy(x.hostIn[r*c.cols:], x.hostIn[:c.cols])
			copy(x.hostAdd[margin+r*c.cols:][:c.cols], x.hostAdd[margin:])
		}
		all[i] = x
		require.NoError(t, x.begin(bfloat))
	}
	for _, x := range all {
		require.NoError(t, x.m.EnqueueNorm(x.m.s, &x.norm))
	}
	for _, x := range all {
		x.read(t, c)
		require.Equal(t, all[0].got, x.got)
	}
	x := all[0]
	reduced := x.got
	copy(x.hostIn, x.gotSum[margin:])
	clear(x.hostAdd)
	require.NoError(t, errors.Join(x.begin(bfloat), fabric.AddNorm(x.m.s, &x.norm)))
	x.read(t, c)
	require.Equal(t, reduced, x.got, "the kernel of one rank")
	for r := range c.rows {
		rows = append(rows, reduced[margin+r*c.cols:][:c.cols])
	}
	return rows
}

// TestAddNorm checks the kernel of one rank, which normalizes sums.
func TestAddNorm(t *testing.T) {
	testgpu.Each(t, 1, func(t *testing.T, devs []*device.Device) {
		rng := seeded(t)
		m := member{s: newStream(t, devs[0])}
		for range 6 {
			c := normCase{rows: 1 + rng.IntN(9), cols: 4 * (1 + rng.IntN(3000)), eps: 1e-6, scale: []float32{0, 0.25}[rng.IntN(2)]}
			x := newNormRank(t, m, half, c, rng, rng)
			require.NoError(t, errors.Join(x.begin(half), fabric.AddNorm(m.s, &x.norm)))
			x.read(t, c)
			check(t, []*normRank[memory.Float16Bits]{x}, x, half, c)
		}
	})
}

// TestNormRefuses checks arguments.
func TestNormRefuses(t *testing.T) {
	group := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), &fabric.Config{Bytes: 1})
	m := group[0]
	good := newNormRank(t, m, bfloat, normCase{rows: 2, cols: 8}, rand.New(rand.NewPCG(1, 1)), rand.New(rand.NewPCG(1, 2))).norm
	for want, change := range map[string]func(x *fabric.Norm){
		"int32":                                  func(x *fabric.Norm) { x.DType = memory.Int32 },
		"want a multiple of 4":                   func(x *fabric.Norm) { x.Cols = 6 },
		"at least one element":                   func(x *fabric.Norm) { x.Cols = 0 },
		"-1 rows":                                func(x *fabric.Norm) { x.Rows = -1 },
		"not aligned":                            func(x *fabric.Norm) { x.Out += 2 },
		"the input and the output overlap":       func(x *fabric.Norm) { x.Out = x.In + 8 },
		"the input and the weight overlap":       func(x *fabric.Norm) { x.Weight = x.In + 8 },
		"the input and the residual overlap":     func(x *fabric.Norm) { x.Residual = x.In + 8 },
		"the input and the scale overlap":        func(x *fabric.Norm) { x.Scale = x.In + 4 },
		"the weight and the residual overlap":    func(x *fabric.Norm) { x.Residual = x.Weight },
		"the weight and the output overlap":      func(x *fabric.Norm) { x.Out = x.Weight },
		"the residual and the scale overlap":     func(x *fabric.Norm) { x.Scale = x.Residual },
		"the residual and the output overlap":    func(x *fabric.Norm) { x.Out = x.Residual },
		"the output and the scale overlap":       func(x *fabric.Norm) { x.Scale = x.Out },
		"the input and the output overlap: want": func(x *fabric.Norm) { x.Out, x.Scale = x.In, x.Weight },
		"eps is -1":                              func(x *fabric.Norm) { x.Eps = -1 },
		"algorithm is two-shot: ":                func(x *fabric.Norm) { x.Algorithm = fabric.TwoShot },
	} {
		x := good
		change(&x)
		require.ErrorContains(t, x.Check(), want)
		require.ErrorContains(t, fabric.AddNorm(m.s, &x), want)
		require.False(t, m.TakesNorm(&x))
		require.ErrorContains(t, m.EnqueueNorm(m.s, &x), "there is no kernel for that")
	}
	big := good
	big.Rows, big.In, big.Residual, big.Out = 100_000, 1<<40, 2<<40, 3<<40
	require.NoError(t, big.Check())
	require.False(t, m.TakesNorm(&big), "no room")
	good.DType = memory.Float64
	require.ErrorIs(t, good.Check(), errors.ErrUnsupported)
}

// TestNormLeavesLargeRows checks that Auto refuses sizes for which an all-reduce and a separate kernel
// are faster, although there is room.
func TestNormLeavesLargeRows(t *testing.T) {
	m := open(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 2}), &fabric.Config{Bytes: 8 << 20})[0]
	x := newNormRank(t, m, bfloat, normCase{rows: 1, cols: 4096}, rand.New(rand.NewPCG(1, 1)), rand.New(rand.NewPCG(1, 2))).norm
	x.In, x.Residual, x.Out = 1<<40, 2<<40, 3<<40
	for rows, fused := range map[int]bool{1: true, 127: true, 128: false, 256: false} {
		x.Rows, x.Algorithm = rows, fabric.Auto
		require.Equal(t, fused, m.TakesNorm(&x), "%d rows", rows)
		for _, x.Algorithm = range []fabric.Algorithm{fabric.OneShot, fabric.TwoShotPackets} {
			require.True(t, m.TakesNorm(&x), "%d rows", rows)
		}
	}
}

// TestNormsThatDiffer checks that ranks that disagree about an operand wait until they are
// aborted.
func TestNormsThatDiffer(t *testing.T) {
	each(t, []int{2}, func(t *testing.T, devs []*device.Device) {
		for i, change := range []func(x *fabric.Norm){
			func(x *fabric.Norm) { x.Rows-- }, func(x *fabric.Norm) { x.Cols -= 4 }, func(x *fabric.Norm) { x.Eps = 1 },
			func(x *fabric.Norm) { x.Algorithm = fabric.TwoShotPackets }, func(x *fabric.Norm) { x.Scale = x.Weight },
		} {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				group := open(t, devs[:2], &fabric.Config{Bytes: 1})
				disagree(t, group, func(r int) error {
					x := newNormRank(t, group[r], single, normCase{rows: 2, cols: 8, algorithm: fabric.OneShot}, rand.New(rand.NewPCG(1, 1)), rand.New(rand.NewPCG(1, 2))).norm
					if r == 1 {
						change(&x)
					}
					return group[r].EnqueueNorm(group[r].s, &x)
				})
			})
		}
	})
}

// TestNormSourceOnTheHost compiles the CUDA source of norms for the host, and compares its bits
// with the results of virtual devices.
func TestNormSourceOnTheHost(t *testing.T) {
	onHost(t, normsOnHost[memory.Float16Bits], normsOnHost[memory.BFloat16Bits], normsOnHost[float32])
}

func normsOnHost[T memory.Element](h *hostSource, f float[T]) {
	t, rng := h.t, h.rng
	h.compile(fabric.NormSourceOnHost(t), &fabric.Config{Bytes: 1 << 20}, "-DCHORUS_OP=Sum")
	for i := range 8 {
		// A lane has one word, several or none, and a team may have several rows.
		team, small := 1<<(i/2), rng.IntN(2)
		c := normCase{rows: 1 + rng.IntN(5), cols: 4 * (1 + rng.IntN(150)), algorithm: fabric.OneShot, eps: 1e-5, scale: []float32{0, 0.1}[small]}
		threads, teams := 32, 1+rng.IntN(2)
		if team <= 2 {
			threads *= 1 + rng.IntN(2)
		} else {
			teams = 1 // a GPU thread is a thread of the host
		}
		if team == 1 { // more words than one warp has sums of warps, or than there are slots
			c.rows, c.cols = 1+rng.IntN(2), 4*(1030+rng.IntN(1500))
		}
		if i%2 == 1 {
			c.algorithm = fabric.TwoShotPackets
		}
		all := runNorm(t, h.group, f, c, rng.Uint64())
		var x T
		words := c.cols * int(unsafe.Sizeof(x)) / 8
		put(t, &h.in, []uint32{uint32(c.algorithm), uint32(h.ranks), uint32(c.rows), uint32(words), uint32(team * min(c.rows, teams)), uint32(threads), uint32(team), uint32(small)}, []float32{c.eps, c.scale}, all[0].hostWeight)
		for _, x := range all {
			n := len(x.hostIn)
			put(t, &h.in, x.hostIn, x.hostAdd[margin:margin+n])
			put(t, &h.want, x.gotSum[margin:margin+n])
			if c.scale == 0 {
				put(t, &h.want, x.got[margin:margin+n])
				continue
			}
			put(t, &h.want, x.gotSmall[margin:margin+n])
			h.want.Write(bytes.Repeat([]byte{0x55}, n*(int(unsafe.Sizeof(x.hostIn[0]))-1))) // the rest of the buffer
		}
		h.compare("%+v", c)
	}
}
