package nccl

// sliceBytes is the unit of transfer: small enough for a core's cache, large
// enough to amortize system calls and switches between processes.
const sliceBytes = 512 << 10

// A ring is this rank's position in the ring of all ranks.
type ring struct {
	c    *comm
	next *link
	prev *link
}

func (c *comm) ring() (r ring, err error) {
	r.c = c
	if r.next, err = c.to((c.rank + 1) % c.n); err != nil {
		return r, err
	}
	r.prev, err = c.from((c.rank + c.n - 1) % c.n)
	return r, err
}

// place returns the rank that is back positions before this one.
func (r *ring) place(back int) int { return ((r.c.rank-back)%r.c.n + r.c.n) % r.c.n }

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

// of returns one slice of a chunk of p.
func (k cut) of(p []byte, chunk, slice int) []byte {
	lo, hi := k.bounds(chunk, slice)
	return p[lo:hi]
}

// ringAllReduce passes chunks around the ring twice. In the first round each rank
// adds its input, so that it ends with one chunk of the result. In the second
// round the ranks forward the results.
func (c *comm) ringAllReduce(f combiner, src, dst []byte) error {
	k := cutEvenly(len(src), c.n)
	return c.around(2*(c.n-1)*k.slices, func(r *ring, out *sender) error { return r.allReduce(k, out, f, src, dst) })
}

// around runs fn with a sender of n slices to the next rank of the ring.
func (c *comm) around(n int, fn func(r *ring, out *sender) error) error {
	r, err := c.ring()
	if err != nil {
		return err
	}
	out := newSender(r.next, n)
	if err := fn(&r, out); err != nil {
		_ = out.finish()
		return err
	}
	return out.finish()
}

func (r *ring) allReduce(k cut, out *sender, f combiner, src, dst []byte) error {
	n := r.c.n
	scratch := make([]byte, k.slice)
	for j := range k.slices {
		out.send(k.of(src, r.place(0), j))
	}
	for step := 1; step < n; step++ {
		for j := range k.slices {
			to := k.of(dst, r.place(step), j)
			got := scratch[:len(to)]
			if err := r.prev.read(got); err != nil {
				return err
			}
			f(to, k.of(src, r.place(step), j), got)
			out.send(to)
		}
	}
	for step := range n - 1 {
		for j := range k.slices {
			// This slice was sent in the first round as number step·slices+j.
			// Wait for that before overwriting it.
			if err := out.await(step*k.slices + j + 1); err != nil {
				return err
			}
			to := k.of(dst, r.place(step), j)
			if err := r.prev.read(to); err != nil {
				return err
			}
			if step < n-2 {
				out.send(to)
			}
		}
	}
	return nil
}

// ringReduceScatter is the first round of ringAllReduce, shifted by one rank so
// that each rank ends with its own chunk.
func (c *comm) ringReduceScatter(f combiner, src, dst []byte) error {
	k := cutBy(len(src), len(dst))
	return c.around((c.n-1)*k.slices, func(r *ring, out *sender) error { return r.reduceScatter(k, out, f, src, dst) })
}

func (r *ring) reduceScatter(k cut, out *sender, f combiner, src, dst []byte) error {
	n := r.c.n
	scratch := make([]byte, k.slice)
	// Send the partial sums of a step while receiving the sums of the next step.
	partial := [2][]byte{}
	for i := range min(2, n-2) {
		partial[i] = make([]byte, len(dst))
	}
	for j := range k.slices {
		out.send(k.of(src, r.place(1), j))
	}
	for step := 1; step < n; step++ {
		chunk := r.place(step + 1)
		for j := range k.slices {
			lo := j * k.slice
			hi := min(lo+k.slice, len(dst))
			to := dst[lo:hi]
			if step < n-1 {
				to = partial[(step-1)%2][lo:hi]
				if err := out.await((step-2)*k.slices + j + 1); err != nil {
					return err
				}
			}
			got := scratch[:len(to)]
			if err := r.prev.read(got); err != nil {
				return err
			}
			f(to, k.of(src, chunk, j), got)
			if step < n-1 {
				out.send(to)
			}
		}
	}
	return nil
}

// allGather passes each rank's block around the ring.
func (c *comm) allGather(src, dst []byte) error {
	k := cutBy(len(dst), len(src))
	copy(dst[c.rank*len(src):], src)
	if c.n == 1 {
		return nil
	}
	return c.around((c.n-1)*k.slices, func(r *ring, out *sender) error { return r.allGather(k, out, dst) })
}

func (r *ring) allGather(k cut, out *sender, dst []byte) error {
	for j := range k.slices {
		out.send(k.of(dst, r.place(0), j))
	}
	for step := 1; step < r.c.n; step++ {
		for j := range k.slices {
			to := k.of(dst, r.place(step), j)
			if err := r.prev.read(to); err != nil {
				return err
			}
			if step < r.c.n-1 {
				out.send(to)
			}
		}
	}
	return nil
}
