package comm

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/tensor"
)

// A tensorCall is one collective of tensors.
type tensorCall struct {
	kind     flight.Kind
	op       Op
	root     int               // or the peer
	dst, src [][]tensor.Tensor // one list for each local rank
	inPlace  bool              // dst is src too
	first    tensor.Tensor     // the first tensor that is used
	part     tensor.Tensor     // the first tensor that is one part
	count    int               // elements of a part, once first is set
}

// name returns the name of the operation in errors.
func (c *tensorCall) name() string { return c.kind.Plain() }

// addTo validates the call and adds it to a batch.
func (c *tensorCall) addTo(b *Batch) error {
	g := b.g
	if err := g.check(c.name()); err != nil {
		return err
	}
	if b.ended {
		return errBatchEnded
	}
	c.count = -1
	n := len(g.members)
	if flight.Kinds[c.kind].Peer {
		n = 1
	}
	if err := c.check(g, n); err != nil {
		return err
	}
	return b.add(n, func(i int, m *member) error {
		dst, src, err := c.flatten(b, i, m)
		if err != nil {
			return err
		}
		return opsByType[c.first.DType()].issue(m, c, dst, src)
	})
}

// writes and reads report whether a rank uses its list of dst or of src.
func (c *tensorCall) writes(rank int) bool {
	d := &flight.Kinds[c.kind]
	return d.Dst != flight.None && (!d.DstRoot || rank == c.root)
}

func (c *tensorCall) reads(rank int) bool {
	d := &flight.Kinds[c.kind]
	return !c.inPlace && d.Src != flight.None && (!d.SrcRoot || rank == c.root)
}

// check validates the tensors of the first n local ranks, and makes the group's streams keep
// their memory.
func (c *tensorCall) check(g *Group, n int) error {
	d := &flight.Kinds[c.kind]
	dst, src := operand{"destination", c.dst, d.Dst, d.DstRoot}, operand{"source", c.src, d.Src, d.SrcRoot}
	if d.Dst != flight.None && !dst.complete(n) || d.Src != flight.None && !c.inPlace && !src.complete(n) {
		return badArgument(c.name(), "destinations of %d and sources of %d ranks for %s", len(c.dst), len(c.src), plural(n, "local rank"))
	}
	for i := range n {
		rank := g.members[i].comm.Rank()
		if c.writes(rank) {
			if err := c.checkOperand(g, i, &dst); err != nil {
				return err
			}
		}
		if c.reads(rank) {
			if err := c.checkOperand(g, i, &src); err != nil {
				return err
			}
		}
	}
	return nil
}

// An operand is the destination or the source of a call.
type operand struct {
	name  string
	lists [][]tensor.Tensor
	size  flight.Sizing
	roots bool // only the root has it
}

// complete reports whether there is a list for each local rank. The operand of the root may be
// missing on other ranks.
func (x *operand) complete(n int) bool { return len(x.lists) == n || x.roots && len(x.lists) == 0 }

// checkOperand validates the list of local rank i.
func (c *tensorCall) checkOperand(g *Group, i int, x *operand) error {
	rank := g.members[i].comm.Rank()
	if i >= len(x.lists) {
		return badArgument(c.name(), "rank %d has no %s", rank, x.name)
	}
	list := x.lists[i]
	whole := x.size == flight.All && len(list) == 1
	if !whole && (x.size == flight.One && len(list) != 1 || x.size == flight.All && len(list) != g.size) {
		want := "1"
		if x.size == flight.All {
			want = fmt.Sprintf("1 for each of %s, or 1 with the parts of all", plural(g.size, "rank"))
		}
		return badArgument(c.name(), "rank %d has %s as its %s: want %s", rank, plural(len(list), "tensor"), x.name, want)
	}
	for k, t := range list {
		if err := c.checkTensor(&g.members[i], x, t); err != nil {
			return err
		}
		if err := c.checkCount(g, rank, x, t, whole); err != nil {
			return err
		}
		for j := 0; j < k && x.name == "destination"; j++ {
			if strided.Overlaps(t, list[j]) {
				return badArgument(c.name(), "%s tensors %d and %d of rank %d share some memory", x.name, j, k, rank)
			}
		}
	}
	return nil
}

// checkTensor validates one tensor, and records that the group's stream uses its memory.
func (c *tensorCall) checkTensor(m *member, x *operand, t tensor.Tensor) error {
	rank := m.comm.Rank()
	if strided.Check(c.name(), t, m.comm.Device()) != nil {
		return badArgument(c.name(), "%w", strided.Check(fmt.Sprintf("the %s of rank %d", x.name, rank), t, m.comm.Device()))
	}
	if c.first.DType() == 0 {
		c.first = t
	}
	if t.DType() != c.first.DType() {
		return badArgument(c.name(), "the %s of rank %d is %s, and another tensor is %s: want one type", x.name, rank, t, c.first)
	}
	if a := strided.Of(t); x.name == "destination" && a.Repeats() {
		return badArgument(c.name(), "the %s of rank %d is %s with strides %v: several elements have one place", x.name, rank, t, t.Strides())
	}
	return t.RecordStream(m.stream)
}

// checkCount compares the elements of a tensor with the tensors before it. whole says that it
// has the parts of all ranks.
func (c *tensorCall) checkCount(g *Group, rank int, x *operand, t tensor.Tensor, whole bool) error {
	n, first := t.Len(), c.count < 0
	if whole {
		if n%g.size != 0 {
			return badArgument(c.name(), "the %s of rank %d is %s: want as many elements for each of %s", x.name, rank, t, plural(g.size, "rank"))
		}
		n /= g.size
	} else if c.part.DType() == 0 {
		c.part = t
	} else if !slices.Equal(t.Shape(), c.part.Shape()) {
		return badArgument(c.name(), "the %s of rank %d is %s, and another tensor is %s: want one shape", x.name, rank, t, c.part)
	}
	if first {
		c.count = n
	}
	if n != c.count {
		return badArgument(c.name(), "the %s of rank %d is %s, which is %s for a rank: other tensors have %d", x.name, rank, t, plural(n, "element"), c.count)
	}
	return nil
}

// flatten returns contiguous operands of local rank i. A rank that does not use an operand has
// the zero Tensor.
func (c *tensorCall) flatten(b *Batch, i int, m *member) (dst, src tensor.Tensor, err error) {
	rank := m.comm.Rank()
	if c.reads(rank) {
		if src, err = b.flat(m, c.src[i], true, false); err != nil {
			return dst, src, err
		}
	}
	if c.writes(rank) {
		in := c.inPlace && (c.kind != flight.Broadcast || rank == c.root)
		if dst, err = b.flat(m, c.dst[i], in, c.kind != flight.Broadcast || rank != c.root); c.inPlace {
			src = dst
		}
	}
	return dst, src, err
}

// flat returns contiguous memory with the elements of tensors: their own if possible, and
// otherwise a staging of the batch.
func (b *Batch) flat(m *member, list []tensor.Tensor, in, out bool) (tensor.Tensor, error) {
	if adjacent(list) {
		return merged(list)
	}
	x, err := stage(m.stream, list, list[0].Len()*len(list), in, out)
	if err != nil {
		return tensor.Tensor{}, err
	}
	b.stagings = append(b.stagings, x)
	return x.temp, nil
}

// adjacent reports whether tensors of one shape are one piece of contiguous memory.
func adjacent(list []tensor.Tensor) bool {
	at := list[0].Offset()
	for i, t := range list {
		if !t.Contiguous() || t.Buffer() != list[0].Buffer() || t.Len() > 0 && t.Offset() != at+i*t.Bytes() {
			return false
		}
	}
	return true
}

// merged returns one tensor of adjacent tensors.
func merged(list []tensor.Tensor) (tensor.Tensor, error) {
	if len(list) == 1 || list[0].Len() == 0 {
		return list[0], nil
	}
	bytes, err := memory.View[uint8](list[0].Buffer(), list[0].Offset(), list[0].Bytes()*len(list))
	if err != nil {
		return tensor.Tensor{}, err
	}
	t, err := tensor.Of(bytes, bytes.Len())
	if err != nil {
		return tensor.Tensor{}, err
	}
	return t.ViewDType(list[0].DType())
}
