package nccl_test

import (
	"fmt"
	"math"
	"testing"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
)

// A codec has an element type's numbers as float64, which has all that the tests
// use.
type codec[T memory.Element] struct {
	of   func(float64) T
	to   func(T) float64
	eps  float64 // by which rounding changes a number; 0 is an integer
	bits int     // numbers up to 2^bits and their sums over 8 ranks are exact
}

func whole[T int8 | uint8 | int16 | uint16 | int32 | uint32 | int64 | uint64]() codec[T] {
	return codec[T]{of: func(v float64) T { return T(v) }, to: func(v T) float64 { return float64(v) }, bits: 4}
}

func small[T interface {
	memory.Element
	Float32() float32
}](of func(float32) T, eps float64, bits int) codec[T] {
	return codec[T]{of: func(v float64) T { return of(float32(v)) }, to: func(v T) float64 { return float64(v.Float32()) }, eps: eps, bits: bits}
}

// The byte of a bool is looked at, because Go takes all but 0 for true.
var bools = codec[bool]{of: func(v float64) bool { return v != 0 }, to: func(v bool) float64 { return float64(*(*byte)(unsafe.Pointer(&v))) }}

// input is element i of a rank, such that the result of the reduction is exact.
func input(op nccl.Op, bits, rank, i int) float64 {
	switch {
	case op == nccl.Prod && (i+rank)%3 == 0:
		return float64(1 + min(bits, 1)) // few ranks have a 2
	case op == nccl.Prod:
		return 1
	}
	return float64((rank*7 + i*5 + i/3) % (1 << max(bits, 1)))
}

func (k codec[T]) isBool() bool { _, yes := any(k).(codec[bool]); return yes }

// reduced is what the ranks' elements come to.
func (k codec[T]) reduced(op nccl.Op, size, i int) float64 {
	v := input(op, k.bits, 0, i)
	for rank := 1; rank < size; rank++ {
		x := input(op, k.bits, rank, i)
		switch op {
		case nccl.Sum, nccl.Avg:
			v += x
		case nccl.Prod:
			v *= x
		case nccl.Max:
			v = max(v, x)
		case nccl.Min:
			v = min(v, x)
		}
	}
	if op == nccl.Avg {
		v /= float64(size)
		if k.eps == 0 {
			v = math.Trunc(v)
		}
	}
	if k.isBool() {
		v = min(v, 1)
	}
	return v
}

// A bench is a communicator over all devices with two buffers for each rank.
type bench[T memory.Element] struct {
	codec[T]
	t        *testing.T
	ranks    []rank
	n        int
	dst, src []memory.Slice[T]
}

const guard = 3 // elements behind what an operation may write

func newBench[T memory.Element](t *testing.T, k codec[T], ranks []rank, n int) *bench[T] {
	b := &bench[T]{codec: k, t: t, ranks: ranks, n: n}
	for _, r := range ranks {
		for _, list := range []*[]memory.Slice[T]{&b.dst, &b.src} {
			x, err := memory.Make[T](r.s, n*len(ranks)+guard)
			require.NoError(t, err)
			*list = append(*list, x)
		}
	}
	return b
}

func (b *bench[T]) close() {
	for i := range b.ranks {
		require.NoError(b.t, b.dst[i].Close())
		require.NoError(b.t, b.src[i].Close())
	}
}

// try runs an operation on all ranks. The source of a rank has size·n elements,
// of which elements from at are given to the operation; want says what element i
// of a rank's destination is then, or NaN where it is not used.
func (b *bench[T]) try(name string, op nccl.Op, inPlace bool, issue func(r rank, i int, dst, src memory.Slice[T]) error, want func(rank, i int) float64) {
	t, total := b.t, b.n*len(b.ranks)
	t.Helper()
	const poison = 1
	for i, r := range b.ranks {
		in, old := make([]T, total), make([]T, total+guard)
		for j := range in {
			in[j] = b.of(input(op, b.bits, i, j))
		}
		for j := range old {
			old[j] = b.of(poison)
		}
		require.NoError(t, b.dst[i].CopyFrom(r.s, old))
		src := b.src[i]
		if inPlace {
			src = b.dst[i]
		}
		require.NoError(t, src.Slice(0, total).CopyFrom(r.s, in))
	}
	require.NoError(t, grouped(b.ranks, func(i int, r rank) error {
		if inPlace {
			return issue(r, i, b.dst[i], b.dst[i])
		}
		return issue(r, i, b.dst[i], b.src[i])
	}), name)
	for i, got := range contents(t, b.ranks, b.dst) {
		for j, v := range got {
			w := float64(poison)
			if j < total {
				w = want(i, j)
				switch {
				case math.IsNaN(w) && inPlace:
					continue // it may be of the source
				case math.IsNaN(w):
					w = poison
				}
			}
			if b.eps > 0 && op == nccl.Avg {
				// Each element is scaled and rounded, and so is each sum.
				require.InDelta(t, w, b.to(v), float64(len(b.ranks)+1)*b.eps*w, "%s, rank %d of %d, element %d", name, i, len(b.ranks), j)
			} else if w != b.to(v) {
				require.Equal(t, w, b.to(v), "%s in place %v, rank %d of %d, element %d", name, inPlace, i, len(b.ranks), j)
			}
		}
	}
}

func nowhere(rank, i int) float64 { return math.NaN() }

// all runs every collective, with every reduction where the type has them.
func (b *bench[T]) all(reductions []nccl.Op) {
	n, size := b.n, len(b.ranks)
	root := size / 2
	type slice = memory.Slice[T]
	part := func(x slice, rank int) slice { return x.Slice(rank*n, (rank+1)*n) }
	in := func(op nccl.Op, rank, i int) float64 {
		return b.to(b.of(input(op, b.bits, rank, i)))
	}
	within := func(i, from, to int, then func() float64) float64 {
		if i >= from && i < to {
			return then()
		}
		return math.NaN()
	}
	for _, inPlace := range []bool{false, true} {
		for _, op := range reductions {
			b.try("all-reduce "+op.String(), op, inPlace, func(k rank, r int, dst, src slice) error {
				return nccl.AllReduce(k.on(), k.s, dst.Slice(0, n), src.Slice(0, n), op)
			}, func(_, i int) float64 { return within(i, 0, n, func() float64 { return b.reduced(op, size, i) }) })
			b.try("reduce "+op.String(), op, inPlace, func(k rank, r int, dst, src slice) error {
				return nccl.Reduce(k.on(), k.s, dst.Slice(0, n), src.Slice(0, n), op, root)
			}, func(r, i int) float64 {
				if r != root {
					return nowhere(r, i)
				}
				return within(i, 0, n, func() float64 { return b.reduced(op, size, i) })
			})
			b.try("reduce-scatter "+op.String(), op, inPlace, func(k rank, r int, dst, src slice) error {
				to := dst.Slice(0, n)
				if inPlace {
					to = part(dst, r)
				}
				return nccl.ReduceScatter(k.on(), k.s, to, src.Slice(0, n*size), op)
			}, func(r, i int) float64 {
				if inPlace {
					return within(i, r*n, r*n+n, func() float64 { return b.reduced(op, size, i) })
				}
				return within(i, 0, n, func() float64 { return b.reduced(op, size, r*n+i) })
			})
		}
		const op = nccl.Sum // only for the numbers
		b.try("broadcast", op, inPlace, func(k rank, r int, dst, src slice) error {
			return nccl.Broadcast(k.on(), k.s, dst.Slice(0, n), src.Slice(0, n), root)
		}, func(_, i int) float64 { return within(i, 0, n, func() float64 { return in(op, root, i) }) })
		b.try("all-gather", op, inPlace, func(k rank, r int, dst, src slice) error {
			return nccl.AllGather(k.on(), k.s, dst.Slice(0, n*size), part(src, r))
		}, func(_, i int) float64 { return in(op, i/n, i) })
		b.try("gather", op, inPlace, func(k rank, r int, dst, src slice) error {
			return nccl.Gather(k.on(), k.s, dst.Slice(0, n*size), part(src, r), root)
		}, func(r, i int) float64 {
			if r != root {
				return nowhere(r, i)
			}
			return in(op, i/n, i)
		})
		b.try("scatter", op, inPlace, func(k rank, r int, dst, src slice) error {
			return nccl.Scatter(k.on(), k.s, part(dst, r), src.Slice(0, n*size), root)
		}, func(r, i int) float64 {
			return within(i, r*n, r*n+n, func() float64 { return in(op, root, i) })
		})
		if inPlace {
			continue
		}
		b.try("all-to-all", op, false, func(k rank, r int, dst, src slice) error {
			return nccl.AllToAll(k.on(), k.s, dst.Slice(0, n*size), src.Slice(0, n*size))
		}, func(r, i int) float64 { return in(op, i/n, r*n+i%n) })
		b.try("send and receive", op, false, func(k rank, r int, dst, src slice) error {
			if err := nccl.Send(k.on(), k.s, src.Slice(0, n), (r+1)%size); err != nil {
				return err
			}
			return nccl.Recv(k.on(), k.s, dst.Slice(0, n), (r+size-1)%size)
		}, func(r, i int) float64 {
			return within(i, 0, n, func() float64 { return in(op, (r+size-1)%size, i) })
		})
	}
}

func types[T memory.Element](t *testing.T, k codec[T], ranks []rank, reductions ...nccl.Op) {
	t.Run(memory.DTypeOf[T]().String(), func(t *testing.T) {
		b := newBench(t, k, ranks, 19)
		defer b.close()
		b.all(reductions)
	})
}

var everyOp = []nccl.Op{nccl.Sum, nccl.Prod, nccl.Max, nccl.Min, nccl.Avg}

func everyType(t *testing.T, devs []*device.Device, float8 bool) {
	ranks := connect(t, devs)
	types(t, whole[int8](), ranks, everyOp...)
	types(t, whole[uint8](), ranks, everyOp...)
	types(t, whole[int32](), ranks, everyOp...)
	types(t, whole[uint32](), ranks, everyOp...)
	types(t, whole[int64](), ranks, everyOp...)
	types(t, whole[uint64](), ranks, everyOp...)
	types(t, codec[float32]{of: func(v float64) float32 { return float32(v) }, to: func(v float32) float64 { return float64(v) }, eps: 0x1p-24, bits: 12}, ranks, everyOp...)
	types(t, codec[float64]{of: func(v float64) float64 { return v }, to: func(v float64) float64 { return v }, eps: 0x1p-53, bits: 30}, ranks, everyOp...)
	types(t, small(memory.Float16Of, 0x1p-11, 6), ranks, everyOp...)
	types(t, small(memory.BFloat16Of, 0x1p-9, 4), ranks, everyOp...)
	types(t, bools, ranks, everyOp[:4]...)
	types(t, whole[int16](), ranks)
	types(t, whole[uint16](), ranks)
	if float8 {
		types(t, small(memory.Float8E4M3Of, 0x1p-4, 1), ranks, everyOp...)
		types(t, small(memory.Float8E5M2Of, 0x1p-3, 1), ranks, everyOp...)
	} else {
		types(t, small(memory.Float8E5M2Of, 0x1p-3, 1), ranks)
	}
}

// Every collective, of every type, with every reduction, in place and not, on 1 to
// 8 ranks.
func TestEveryCollective(t *testing.T) {
	turns := testgpu.TurnsRaced(t, 5)
	for n := 1; n <= 8; n++ {
		if n > 3 && !turns(0, n-4) {
			continue
		}
		t.Run(fmt.Sprintf("%d ranks", n), func(t *testing.T) {
			testgpu.Each(t, n, func(t *testing.T, devs []*device.Device) { everyType(t, devs, true) })
		})
	}
}

// A library that lacks some collectives gets others in their place.
func TestEveryCollectiveOfOldNCCL(t *testing.T) {
	everyType(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 3, VirtualNCCL: "2.23.4"}), false)
}
