package rng

import (
	"fmt"
	"math"

	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
)

// block is the number of threads of a block, as in torch.
const block = 256

// A policy is the shape of torch's fills on a device.
type policy struct{ blocks uint32 } // at most

// grid returns the number of blocks for n elements, n > 0.
func (p policy) grid(n int) uint32 { return uint32(min((n-1)/block+1, int(p.blocks))) }

// increment returns how far the offset moves: 4 words for each time that a
// thread draws, of which each time gives unroll elements.
func (p policy) increment(n, unroll int) uint64 {
	return uint64((n-1)/(block*int(p.grid(n))*unroll)+1) * 4
}

// fits reports whether torch fills n elements in one go: the offset of the last
// one must fit into 31 bits. Otherwise it fills the halves one after the other.
func fits(n, size int) bool { return n <= math.MaxInt32 && (n-1)*size < math.MaxInt32 }

// advance returns how far the offset moves when n elements are filled in parts.
func (p policy) advance(n, size, unroll int) uint64 {
	if fits(n, size) {
		return p.increment(n, unroll)
	}
	return p.advance(n/2, size, unroll) + p.advance(n-n/2, size, unroll)
}

// A job is one fill.
type job struct {
	kernel  *kernel.Kernel
	stream  *stream.Stream
	policy  policy
	unroll  int
	place   place
	a, b, c uint64
}

// run carries a fill out. The parameters a, b and c are the distribution's.
func run[T memory.Element](g *Generator, s *stream.Stream, x memory.Slice[T], d dist, a, b, c uint64) error {
	g, err := check(g, s, x, d)
	if err != nil || x.Len() == 0 {
		return err
	}
	t := tools(s.Device())
	k, err := kernelOf[T](t, s.Device(), d)
	if err != nil {
		return err
	}
	j := job{kernel: k, stream: s, policy: t.policy, unroll: d.unroll(formatOf[T]()), a: a, b: b, c: c}
	n, size := x.Len(), x.DType().Size()
	total := j.policy.advance(n, size, j.unroll)
	skip := uint64(0)
	if !fits(n, size) {
		// Torch takes the numbers for the whole before it sees that it has to
		// divide, and then those for the parts.
		skip = j.policy.increment(n, j.unroll)
	}
	if j.place, err = g.draw(s, skip+total); err != nil {
		return fmt.Errorf("%s: %w", ops[d], err)
	}
	_, err = enqueue(&j, x, j.place.offset+skip)
	return err
}

// enqueue launches the kernel for x, or for its halves, and returns the offset
// behind it.
func enqueue[T memory.Element](j *job, x memory.Slice[T], offset uint64) (uint64, error) {
	n := x.Len()
	if !fits(n, x.DType().Size()) {
		offset, err := enqueue(j, x.Slice(0, n/2), offset)
		if err != nil {
			return offset, err
		}
		return enqueue(j, x.Slice(n/2, n), offset)
	}
	grid := kernel.Grid{Blocks: [3]uint32{j.policy.grid(n), 1, 1}, Threads: [3]uint32{block, 1, 1}}
	err := j.kernel.Launch(j.stream, grid, kernel.Ptr(x), kernel.Int32(int32(n)),
		low(j.place.seed), high(j.place.seed), low(offset), high(offset),
		low(j.a), high(j.a), low(j.b), high(j.b), low(j.c), high(j.c), j.place.launch)
	return offset + j.policy.increment(n, j.unroll), err
}

// low and high pass a number of 64 bits in halves, which is how Philox wants the
// seed and how the stand-ins can read them.
func low(v uint64) kernel.Arg  { return kernel.Int32(int32(uint32(v))) }
func high(v uint64) kernel.Arg { return kernel.Int32(int32(uint32(v >> 32))) }
