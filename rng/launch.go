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

// A policy is the grid of torch's fills on a device.
type policy struct{ blocks uint32 } // maximum number of blocks

// grid returns the number of blocks for n elements, n > 0.
func (p policy) grid(n int) uint32 { return uint32(min((n-1)/block+1, int(p.blocks))) }

// increment returns the advance of the offset: 4 words for each draw of a thread,
// and each draw gives unroll elements.
func (p policy) increment(n, unroll int) uint64 {
	return uint64((n-1)/(block*int(p.grid(n))*unroll)+1) * 4
}

// fits reports whether torch fills n elements at once: the offset of the last
// element must fit into 31 bits. Otherwise torch fills the two halves one after
// the other.
func fits(n, size int) bool { return n <= math.MaxInt32 && (n-1)*size < math.MaxInt32 }

// advance returns the advance of the offset for a fill of n elements, possibly in parts.
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

// run performs a fill. a, b and c are the parameters of the distribution.
func run[T memory.Element](g *Generator, s *stream.Stream, x memory.Slice[T], d dist, a, b, c uint64) error {
	g, err := check(ops[d], g, s, x)
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
		// torch first draws the numbers for the whole fill, and then the numbers
		// for the parts.
		skip = j.policy.increment(n, j.unroll)
	}
	if j.place, err = g.draw(s, skip+total); err != nil {
		return fmt.Errorf("%s: %w", ops[d], err)
	}
	_, err = enqueue(&j, x, j.place.offset+skip)
	return err
}

// enqueue launches the kernel for x, or for its halves, and returns the next
// offset.
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
	err := j.kernel.Launch(j.stream, grid, kernel.Ptr(x), kernel.Scalar(int32(n)),
		low(j.place.seed), high(j.place.seed), low(offset), high(offset),
		low(j.a), high(j.a), low(j.b), high(j.b), low(j.c), high(j.c), j.place.launch)
	return offset + j.policy.increment(n, j.unroll), err
}

// low and high pass a 64-bit number in halves, as Philox and the stand-ins need
// it.
func low(v uint64) kernel.Arg  { return kernel.Scalar(int32(uint32(v))) }
func high(v uint64) kernel.Arg { return kernel.Scalar(int32(uint32(v >> 32))) }
