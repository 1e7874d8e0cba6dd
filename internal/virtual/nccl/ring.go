package nccl

import (
	"cmp"
	"math/bits"
	"slices"
)

// sliceBytes is the unit of transfer: small enough for a core's cache, large
// enough to amortize system calls and switches between processes.
const sliceBytes = 512 << 10

// A cut divides bytes into chunks, one for each rank, and each chunk into slices.
// The last chunks may be shorter or empty.
type cut struct {
	total, chunk, slice, slices int
}

// cutEvenly cuts at multiples of 64 bytes, which all element sizes divide.
func cutEvenly(total, chunks int) cut {
	return cutBy(total, ((total+chunks-1)/chunks+63)&^63)
}

// cutBy cuts into chunks of a given size.
func cutBy(total, chunk int) cut {
	slice := max(1, min(chunk, sliceBytes))
	return cut{total: total, chunk: chunk, slice: slice, slices: (chunk + slice - 1) / slice}
}

// bounds returns the bounds of one slice of a chunk.
func (k cut) bounds(chunk, slice int) (lo, hi int) {
	end := min((chunk+1)*k.chunk, k.total)
	lo = min(chunk*k.chunk+slice*k.slice, end)
	return lo, min(lo+k.slice, end)
}

// A step is what a rank does with a chunk. It receives it from the rank before it in the ring, adds its own input, keeps the
// result in its output, and sends it to the next rank. Each of these is optional. A chunk that is not received is the rank's own
// input.
type step struct {
	chunk                    int
	receive, add, keep, send bool
}

// pass executes the steps, slice by slice. src has the whole cut, and dst has
// it, too, or the chunk of this rank; both may be the same memory.
func (c *comm) pass(k cut, f combiner, src, dst []byte, steps []step) (err error) {
	var prev *link
	var out *sender
	if slices.ContainsFunc(steps, func(s step) bool { return s.send }) {
		next, err := c.to((c.rank + 1) % c.n)
		if err != nil {
			return err
		}
		out = newSender(next, len(steps)*k.slices, k.total)
		defer func() {
			end := out.finish()
			err = cmp.Or(err, end)
		}()
	}
	if slices.ContainsFunc(steps, func(s step) bool { return s.receive }) {
		if prev, err = c.from((c.rank + c.n - 1) % c.n); err != nil {
			return err
		}
	}
	first, scratch := 0, make([]byte, k.slice)
	if len(dst) < k.total {
		first = c.rank * k.chunk
	}
	for _, s := range steps {
		for j := range k.slices {
			lo, hi := k.bounds(s.chunk, j)
			p := src[lo:hi]
			if s.receive {
				mine := p
				if s.keep { // what this rank has sent from here has arrived: it is in what comes now
					p = dst[lo-first : hi-first]
				} else {
					p = make([]byte, hi-lo) // until it is sent
				}
				got := p
				if s.add {
					got = scratch[:hi-lo] // p may be the rank's own input
				}
				if err := prev.read(got); err != nil {
					return err
				}
				if s.add {
					f(p, mine, got)
				}
			}
			if s.send {
				out.send(p)
			}
		}
	}
	return nil
}

// back returns the rank that is some positions before this one in the ring.
func (c *comm) back(n int) int { return ((c.rank-n)%c.n + c.n) % c.n }

// allReduce passes chunks around the ring twice. In the first round each rank
// adds its input, so that it ends with one chunk of the result, which the ranks
// forward in the second round. The order of a sum depends on the element's
// place and on the size, as it does if NCCL chooses its algorithm by the size.
func (c *comm) allReduce(f combiner, src, dst []byte) error {
	shift := bits.Len(uint(len(src)))
	steps := []step{{chunk: c.back(shift), send: true}}
	for i := 1; i < c.n; i++ {
		steps = append(steps, step{chunk: c.back(shift + i), receive: true, add: true, keep: true, send: true})
	}
	for i := range c.n - 1 {
		steps = append(steps, step{chunk: c.back(shift + i), receive: true, keep: true, send: i < c.n-2})
	}
	return c.pass(cutEvenly(len(src), c.n), f, src, dst, steps)
}

// reduceScatter is the first round of allReduce, after which each rank has its own chunk.
func (c *comm) reduceScatter(f combiner, src, dst []byte) error {
	steps := []step{{chunk: c.back(1), send: true}}
	for i := 1; i < c.n; i++ {
		steps = append(steps, step{chunk: c.back(i + 1), receive: true, add: true, keep: i == c.n-1, send: i < c.n-1})
	}
	return c.pass(cutBy(len(src), len(dst)), f, src, dst, steps)
}

// allGather passes each rank's block around the ring.
func (c *comm) allGather(src, dst []byte) error {
	copy(dst[c.rank*len(src):], src)
	if c.n == 1 {
		return nil
	}
	steps := []step{{chunk: c.rank, send: true}}
	for i := 1; i < c.n; i++ {
		steps = append(steps, step{chunk: c.back(i), receive: true, keep: true, send: i < c.n-1})
	}
	return c.pass(cutBy(len(dst), len(src)), nil, dst, dst, steps)
}

// broadcast passes the root's data around the ring once.
func (c *comm) broadcast(root int, src, dst []byte) error {
	if c.rank == root {
		copy(dst, src)
	}
	if c.n == 1 {
		return nil
	}
	at := c.back(root)
	return c.pass(cutBy(len(dst), len(dst)), nil, dst, dst, []step{{receive: at > 0, keep: at > 0, send: at < c.n-1}})
}

// reduceTo passes partial sums around the ring once, ending at the root.
func (c *comm) reduceTo(root int, f combiner, src, dst []byte) error {
	at := c.back(root + 1)
	return c.pass(cutBy(len(src), len(src)), f, src, dst, []step{{receive: at > 0, add: at > 0, keep: at == c.n-1, send: at < c.n-1}})
}
