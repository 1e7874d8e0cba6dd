package fabric_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/fabric"
	"github.com/gochorus/chorus/internal/testgpu"
	"github.com/gochorus/chorus/internal/testhost"
	"github.com/gochorus/chorus/memory"
)

const poison = 0xa5

// An arena is device memory of one rank with what should be in it at the end.
type arena[T memory.Element] struct {
	mem  memory.Slice[T]
	want []T
}

// guard is how many elements around the operands must stay as they are.
const guard = 16

// newArena allocates poisoned memory with room for n elements from the skip-th on.
func newArena[T memory.Element](t testing.TB, m member, n, skip int) (*arena[T], memory.Slice[T]) {
	a := &arena[T]{want: make([]T, skip+n+guard)}
	b := bytesOf(a.want)
	for i := range b {
		b[i] = poison
	}
	if memory.DTypeOf[T]() == memory.Bool {
		clear(b)
	}
	var err error
	a.mem, err = memory.Make[T](m.s, len(a.want))
	require.NoError(t, err)
	return a, a.mem.Slice(skip, skip+n)
}

func (a *arena[T]) check(t testing.TB, m member, what string) {
	got := make([]T, len(a.want))
	require.NoError(t, a.mem.CopyTo(m.s, got))
	require.NoError(t, a.mem.Close())
	if !bytes.Equal(bytesOf(got), bytesOf(a.want)) {
		for i := range got {
			if got[i] != a.want[i] {
				t.Fatalf("%s: element %d of %d on rank %d is %v, want %v", what, i, len(got), m.Rank.Rank(), got[i], a.want[i])
			}
		}
	}
}

// manyChunks is the size of some chunks of a pipelined operation, with the smallest scratch memory.
const manyChunks = 5 * 32 << 10

// A call is one collective of all ranks.
type call struct {
	name      string
	op        collective.Reduction
	algorithm fabric.Algorithm
	n         int // elements of a rank's part
	skip      int // elements before the operands
	inPlace   bool
	root      int
}

func (c call) String() string {
	return fmt.Sprintf("%s %s %s of %d from %d, in place %v, root %d", c.name, c.op, c.algorithm, c.n, c.skip, c.inPlace, c.root)
}

// input is the number that a rank has at a place.
func input(rank, i int) int { return 1 + (i*7+rank*3+i/64)%3 }

// carryOut runs a collective on fresh memory and checks every element, and what is
// around them.
func carryOut[T memory.Element](t testing.TB, group []member, k kit[T], c call) {
	t.Helper()
	ranks := len(group)
	dstN, srcN := c.n, c.n
	switch c.name {
	case "all-gather":
		dstN = c.n * ranks
	case "reduce-scatter":
		srcN = c.n * ranks
	case "all-to-all":
		dstN, srcN = c.n*ranks, c.n*ranks
	}
	var arenas [][]*arena[T]
	dsts, srcs := make([]memory.Slice[T], ranks), make([]memory.Slice[T], ranks)
	for r, m := range group {
		a, x := newArena[T](t, m, max(dstN, srcN), c.skip)
		list := []*arena[T]{a}
		dsts[r], srcs[r] = x.Slice(0, dstN), x.Slice(0, srcN)
		from := a.want[c.skip:]
		switch {
		case !c.inPlace:
			b, y := newArena[T](t, m, srcN, c.skip)
			list, srcs[r], from = append(list, b), y, b.want[c.skip:]
		case c.name == "all-gather":
			srcs[r], from = x.Slice(r*c.n, (r+1)*c.n), from[r*c.n:]
		case c.name == "reduce-scatter":
			dsts[r] = x.Slice(r*c.n, (r+1)*c.n)
		}
		for i := range srcN {
			from[i] = k.of(input(r, i))
		}
		for _, a := range list {
			require.NoError(t, a.mem.CopyFrom(m.s, a.want))
		}
		arenas = append(arenas, list)
	}
	for r, m := range group {
		require.NoError(t, c.enqueue(m, anySlice[T]{dsts[r], srcs[r]}), "%v of %s", c, memory.DTypeOf[T]())
	}
	for r, m := range group {
		at := dsts[r].Offset()/sizeOf[T]() - arenas[r][0].mem.Offset()/sizeOf[T]()
		expect(k, c, r, ranks, arenas[r][0].want[at:at+dstN])
		for _, a := range arenas[r] {
			a.check(t, m, fmt.Sprint(c, " of ", memory.DTypeOf[T]()))
		}
	}
}

// anySlice are the operands of a rank.
type anySlice[T memory.Element] struct{ dst, src memory.Slice[T] }

type operands interface {
	enqueue(c call, m member) error
}

func (c call) enqueue(m member, x operands) error { return x.enqueue(c, m) }

func (x anySlice[T]) enqueue(c call, m member) error {
	switch c.name {
	case "all-reduce":
		return fabric.AllReduce(m.Rank, m.s, x.dst, x.src, c.op, &fabric.AllReduceConfig{Algorithm: c.algorithm})
	case "all-gather":
		return fabric.AllGather(m.Rank, m.s, x.dst, x.src, c.algorithm)
	case "reduce-scatter":
		return fabric.ReduceScatter(m.Rank, m.s, x.dst, x.src, c.op, c.algorithm)
	case "broadcast":
		return fabric.Broadcast(m.Rank, m.s, x.dst, x.src, c.root)
	}
	return fabric.AllToAll(m.Rank, m.s, x.dst, x.src, c.algorithm)
}

// expect writes what a rank should have.
func expect[T memory.Element](k kit[T], c call, rank, ranks int, out []T) {
	xs := make([]int, ranks)
	for i := range out {
		switch c.name {
		case "broadcast":
			out[i] = k.of(input(c.root, i))
			continue
		case "all-gather":
			out[i] = k.of(input(i/c.n, i%c.n))
			continue
		case "all-to-all":
			out[i] = k.of(input(i/c.n, rank*c.n+i%c.n))
			continue
		}
		at := i
		if c.name == "reduce-scatter" {
			at += rank * c.n
		}
		for r := range xs {
			xs[r] = input(r, at)
		}
		out[i] = k.reduce(c.op, xs)
	}
}

var allOps = []collective.Reduction{collective.Sum, collective.Prod, collective.Max, collective.Min, collective.Avg}

// lengths are those around words, and, if all are wanted, blocks and the limit of bytes.
func lengths[T memory.Element](limit int, all bool) []int {
	size := sizeOf[T]()
	ns, most := []int{1, 7, 8, 9, 63, 64, 65}, limit/size
	if all {
		ns = append(ns, 511*8/size, 512*8/size, 513*8/size, most-9, most-1, most)
	}
	return slices.DeleteFunc(ns, func(n int) bool { return n < 1 || n > most })
}

// calls runs fn with every collective of a type, each length and reduction, aligned
// or not and in place or not in turns. What is long differs by the reduction in
// nothing, and is summed.
func calls[T memory.Element](group []member, k kit[T], fn func(call)) {
	limits, turn := group[0].Limits(), 0
	all := func(c call, limit int) {
		for _, n := range lengths[T](limit, c.op == collective.Sum) {
			for range 2 {
				c.n, c.skip, c.inPlace, c.root = n, turn%2, turn/2%2 == 0 && c.name != "all-to-all", turn%len(group)
				turn++
				fn(c)
			}
		}
		turn++
	}
	for _, name := range []string{"all-gather", "broadcast", "all-to-all"} {
		all(call{name: name}, limits.Part)
		if name != "broadcast" {
			all(call{name: name, algorithm: fabric.Pipelined}, manyChunks/len(group))
		}
	}
	if k.reduce == nil {
		return
	}
	for _, op := range allOps {
		all(call{name: "reduce-scatter", op: op}, limits.Part)
		all(call{name: "all-reduce", op: op, algorithm: fabric.OneShot}, limits.OneShot)
		all(call{name: "all-reduce", op: op, algorithm: fabric.TwoShotPackets}, limits.TwoShotPackets)
		all(call{name: "all-reduce", op: op, algorithm: fabric.TwoShot}, limits.TwoShot)
		all(call{name: "all-reduce", op: op, algorithm: fabric.TwoShotLines}, limits.TwoShotLines)
		all(call{name: "all-reduce", op: op, algorithm: fabric.Pipelined}, manyChunks)
		all(call{name: "reduce-scatter", op: op, algorithm: fabric.Pipelined}, manyChunks/len(group))
	}
	all(call{name: "all-reduce"}, limits.AllReduce())
}

func tabled[T memory.Element](t *testing.T, group []member, k kit[T]) {
	t.Run(memory.DTypeOf[T]().String(), func(t *testing.T) {
		drawn := func() bool { return true }
		if group[0].s.Device().System().Backend() != "cuda" {
			drawn = testgpu.Sample(t, testhost.Rounds(16, 8))
		}
		calls(group, k, func(c call) {
			if drawn() {
				carryOut(t, group, k, c)
			}
		})
	})
}

// Every collective of every type and reduction gives every element, and writes nothing
// else. Virtual devices run one call in 8, or in 16 under the race detector,
// which the seed draws, unless -thorough is set.
func TestCollectives(t *testing.T) {
	each(t, []int{2, 3, 8}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 1})
		tabled(t, group, kit[bool]{of: func(x int) bool { return x%2 == 0 }})
		tabled(t, group, integers[int8]())
		tabled(t, group, floats(memory.Float16Of))
		tabled(t, group, floats(func(x float32) float32 { return x }))
		tabled(t, group, integers[uint64]())
		if len(devs) > 3 && devs[0].System().Backend() != "cuda" {
			return // to the other types the number of ranks is nothing special
		}
		tabled(t, group, kit[int16]{of: func(x int) int16 { return int16(x * 0x1234) }})
		tabled(t, group, kit[uint16]{of: func(x int) uint16 { return uint16(x * 0x1234) }})
		tabled(t, group, kit[memory.Float8E4M3Bits]{of: func(x int) memory.Float8E4M3Bits { return memory.Float8E4M3Bits(x * 0x1d) }})
		tabled(t, group, kit[memory.Float8E5M2Bits]{of: func(x int) memory.Float8E5M2Bits { return memory.Float8E5M2Bits(x * 0x1d) }})
		tabled(t, group, integers[uint8]())
		tabled(t, group, integers[int32]())
		tabled(t, group, integers[uint32]())
		tabled(t, group, integers[int64]())
		tabled(t, group, floats(memory.BFloat16Of))
		tabled(t, group, floats(func(x float64) float64 { return x }))
	})
}

// A limit of the thread blocks applies to all ranks, and every collective still gives every element.
func TestFewBlocks(t *testing.T) {
	each(t, []int{2, 3}, func(t *testing.T, devs []*device.Device) {
		group := open(t, devs, &fabric.Config{Bytes: 1, Blocks: 3})
		k, drawn := floats(func(x float32) float32 { return x }), testgpu.Sample(t, testhost.Rounds(16, 8))
		for _, m := range group {
			require.Equal(t, 3, m.Blocks())
		}
		calls(group, k, func(c call) {
			if drawn() {
				carryOut(t, group, k, c)
			}
		})
	})
	_, err := fabric.Open(t.Context(), newStream(t, testgpu.Virtual(t, &device.SystemConfig{VirtualDevices: 1})[0]), 0, 1, nil, &fabric.Config{Blocks: -1})
	require.ErrorContains(t, err, "Blocks -1")
}
