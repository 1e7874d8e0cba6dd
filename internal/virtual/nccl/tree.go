package nccl

// Up to treeLimit bytes, reductions and broadcasts use a binary tree, which has
// few hops. Larger ones use all links at the same time.
const treeLimit = 64 << 10

// A tree is this rank's position in the binary tree of all ranks under a root.
type tree struct {
	c        *comm
	root     int
	parent   int // -1 at the root
	children []int
}

func (c *comm) tree(root int) tree {
	t := tree{c: c, root: root, parent: -1}
	at := (c.rank - root + c.n) % c.n
	if at > 0 {
		t.parent = ((at-1)/2 + root) % c.n
	}
	for child := 2*at + 1; child <= 2*at+2 && child < c.n; child++ {
		t.children = append(t.children, (child+root)%c.n)
	}
	return t
}

// up combines the inputs of all ranks. At the root it writes the result to dst.
func (t *tree) up(f combiner, src, dst []byte) error {
	sum := src
	for i, child := range t.children {
		in, err := t.c.from(child)
		if err != nil {
			return err
		}
		got := make([]byte, len(src))
		if err := in.read(got); err != nil {
			return err
		}
		if i == 0 {
			f(got, src, got)
			sum = got
		} else {
			f(sum, sum, got)
		}
	}
	if t.parent < 0 {
		copy(dst, sum)
		return nil
	}
	out, err := t.c.to(t.parent)
	if err != nil {
		return err
	}
	return out.write(sum)
}

// down broadcasts buf from the root to all ranks.
func (t *tree) down(buf []byte) error {
	if t.parent >= 0 {
		in, err := t.c.from(t.parent)
		if err != nil {
			return err
		}
		if err := in.read(buf); err != nil {
			return err
		}
	}
	for _, child := range t.children {
		out, err := t.c.to(child)
		if err != nil {
			return err
		}
		if err := out.write(buf); err != nil {
			return err
		}
	}
	return nil
}

func (c *comm) treeReduce(w *work, f combiner, src, dst []byte) error {
	if w.sig.Kind == kindReduce {
		t := c.tree(int(w.sig.Root))
		return t.up(f, src, dst)
	}
	t := c.tree(0)
	if err := t.up(f, src, dst); err != nil {
		return err
	}
	return t.down(dst)
}

func (c *comm) broadcast(root int, src, dst []byte) error {
	if c.rank == root {
		copy(dst, src)
	}
	switch {
	case c.n == 1:
		return nil
	case len(dst) <= treeLimit:
		t := c.tree(root)
		return t.down(dst)
	}
	return c.chainBroadcast(root, dst)
}

// chainBroadcast passes slices from the root around the ring once.
func (c *comm) chainBroadcast(root int, buf []byte) error {
	k := cutBy(len(buf), len(buf))
	at := (c.rank - root + c.n) % c.n
	if at == c.n-1 {
		in, err := c.from((c.rank + c.n - 1) % c.n)
		if err != nil {
			return err
		}
		return in.read(buf)
	}
	next, err := c.to((c.rank + 1) % c.n)
	if err != nil {
		return err
	}
	if at == 0 {
		return next.write(buf)
	}
	in, err := c.from((c.rank + c.n - 1) % c.n)
	if err != nil {
		return err
	}
	out := newSender(next, k.slices)
	for j := range k.slices {
		p := k.of(buf, 0, j)
		if err := in.read(p); err != nil {
			_ = out.finish()
			return err
		}
		out.send(p)
	}
	return out.finish()
}

// chainReduce passes partial sums around the ring once, ending at the root.
func (c *comm) chainReduce(root int, f combiner, src, dst []byte) error {
	at := (c.rank - root - 1 + c.n) % c.n // the root is last
	k := cutBy(len(src), len(src))
	if at == 0 {
		next, err := c.to((c.rank + 1) % c.n)
		if err != nil {
			return err
		}
		return next.write(src)
	}
	in, err := c.from((c.rank + c.n - 1) % c.n)
	if err != nil {
		return err
	}
	if at == c.n-1 {
		got := make([]byte, k.slice)
		for j := range k.slices {
			to := k.of(dst, 0, j)
			if err := in.read(got[:len(to)]); err != nil {
				return err
			}
			f(to, k.of(src, 0, j), got[:len(to)])
		}
		return nil
	}
	next, err := c.to((c.rank + 1) % c.n)
	if err != nil {
		return err
	}
	out := newSender(next, k.slices)
	if err := addAlong(k, in, out, f, src); err != nil {
		_ = out.finish()
		return err
	}
	return out.finish()
}

// addAlong adds src to the received data and forwards the sum. A chain has an
// end, so a few buffers suffice without a deadlock.
func addAlong(k cut, in *link, out *sender, f combiner, src []byte) error {
	var spare [4][]byte
	for j := range k.slices {
		b := &spare[j%len(spare)]
		if *b == nil {
			*b = make([]byte, k.slice)
		}
		if err := out.await(j - len(spare) + 1); err != nil {
			return err
		}
		p := k.of(src, 0, j)
		got := (*b)[:len(p)]
		if err := in.read(got); err != nil {
			return err
		}
		f(got, p, got)
		out.send(got)
	}
	return nil
}
