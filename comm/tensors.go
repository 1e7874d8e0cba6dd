package comm

import (
	"errors"
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// The package documentation describes the common behavior of the functions of
// torch.cuda.comm.

// checkWhole is check for functions that need all ranks in this process.
func (g *Group) checkWhole(op string) error {
	if err := g.check(op); err != nil {
		return err
	}
	if len(g.members) != g.size {
		return badArgument(op, "%d of the group's %d ranks are in this process, and it needs all: use Local, or the collectives of slices",
			len(g.members), g.size)
	}
	return nil
}

// locked runs fn, which enqueues operations of all ranks, while g enqueues
// nothing else. All ranks must be in this process.
func locked[R any](g *Group, op string, fn func() (R, error)) (r R, err error) {
	if err := g.checkWhole(op); err != nil {
		return r, err
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	return fn()
}

// badArgument returns the error of an invalid argument.
func badArgument(op, format string, args ...any) error {
	return &argumentError{fmt.Errorf("comm: %s: "+format, append([]any{op}, args...)...)}
}

// asBadArgument turns the error of another package into one of an invalid argument.
func asBadArgument(err error) error { return &argumentError{err} }

// rankOn returns the rank on a device, or -1.
func (g *Group) rankOn(d *device.Device) int {
	for i := range g.members {
		if g.members[i].comm.Device() == d {
			return i
		}
	}
	return -1
}

// streamOf returns the group's stream that orders the use of t, or nil for a host tensor.
func (g *Group) streamOf(t tensor.Tensor) *stream.Stream {
	if t.IsHost() {
		return nil
	}
	return g.members[g.rankOn(t.Device())].stream
}

// devices validates a list of devices; nil means all devices of the group, by rank.
func (g *Group) devices(op string, list []*device.Device) ([]*device.Device, error) {
	if list == nil {
		list = make([]*device.Device, 0, len(g.members))
		for i := range g.members {
			list = append(list, g.Device(i))
		}
		return list, nil
	}
	for i, d := range list {
		if d == nil || g.rankOn(d) < 0 {
			return nil, badArgument(op, "device %d of %d is %v, which no rank of the group is on", i, len(list), d)
		}
	}
	return list, nil
}

// checkSource validates a tensor that is read: argument i of several, or the only one. It must
// be on a device of the group or on the host.
func (g *Group) checkSource(op, what string, i int, t tensor.Tensor) error {
	if t.IsHost() || t.Device() != nil && g.rankOn(t.Device()) >= 0 {
		if strided.Check(what, t, nil) != nil {
			return badArgument(op, "%w", strided.Check(nth(what, i), t, nil))
		}
		return nil
	}
	if t.Device() == nil {
		return badArgument(op, "%s: no tensor given", nth(what, i))
	}
	return badArgument(op, "%s is on %s, which no rank of the group is on", nth(what, i), t.Device())
}

// only is the index of an argument that is not in a list.
const only = -1

func nth(what string, i int) string {
	if i == only {
		return "the " + what
	}
	return fmt.Sprintf("%s at index %d", what, i)
}

// checkOuts validates device tensors that are written.
func (g *Group) checkOuts(op string, list []tensor.Tensor) error {
	for i, o := range list {
		if err := g.checkSource(op, "output tensor", i, o); err != nil {
			return err
		}
		if o.IsHost() {
			return badArgument(op, "expected all output tensors to be on devices, but output tensor at index %d is on the host", i)
		}
		for j, p := range list[:i] {
			if strided.Overlaps(o, p) {
				return badArgument(op, "the output tensors at indexes %d and %d share some memory", j, i)
			}
		}
	}
	return nil
}

// onePerDevice reports whether all tensors are contiguous, have the same type,
// and are on different devices of the group, so that NCCL can transfer them.
func (g *Group) onePerDevice(ts ...tensor.Tensor) bool {
	seen := make([]bool, g.size)
	for _, t := range ts {
		if t.IsHost() || !t.Contiguous() || t.DType() != ts[0].DType() || seen[g.rankOn(t.Device())] {
			return false
		}
		seen[g.rankOn(t.Device())] = true
	}
	return len(ts) == g.size
}

// byRank sorts tensors on different devices by rank.
func (g *Group) byRank(ts ...tensor.Tensor) []tensor.Tensor {
	list := make([]tensor.Tensor, g.size)
	for _, t := range ts {
		list[g.rankOn(t.Device())] = t
	}
	return list
}

// recordStreams records that the group's streams use the tensors, except host
// tensors, whose copies do so themselves.
func (g *Group) recordStreams(ts ...tensor.Tensor) error {
	var last *device.Device
	var s *stream.Stream
	for i := range ts {
		t := &ts[i]
		if t.IsHost() {
			continue
		}
		if d := t.Device(); d != last {
			last, s = d, g.streamOf(*t)
		}
		if err := t.RecordStream(s); err != nil {
			return err
		}
	}
	return nil
}

// transfer enqueues a copy of src, whose use is ordered by from, to dst, whose
// use is ordered by to. The stream of a host tensor is nil. If only one of the
// tensors has strides, the copy runs on its device, so that contiguous data
// goes over the link. Otherwise it runs on the source, as in torch, so that
// copies from one device follow each other without gaps.
func transfer(dst, src tensor.Tensor, to, from *stream.Stream) error {
	if to == nil || from == nil || to == from {
		if to == nil {
			to = from
		}
		return tensor.Copy(to, dst, src)
	}
	by, other := from, to
	if !atSource(dst, src) {
		by, other = to, from
	}
	if err := by.WaitStream(other); err != nil {
		return err
	}
	if err := tensor.Copy(by, dst, src); err != nil {
		return err
	}
	if err := other.WaitStream(by); err != nil {
		// The other stream does not wait for the copy, so this stream must keep the
		// memory.
		return errors.Join(err, dst.RecordStream(by), src.RecordStream(by))
	}
	return nil
}

// atSource reports whether a copy between devices runs on the source. It runs on the
// destination if only the destination has strides.
func atSource(dst, src tensor.Tensor) bool { return !src.Contiguous() || dst.Contiguous() }

// closeAll closes results after an error.
func closeAll(ts []tensor.Tensor) {
	for _, t := range ts {
		_ = t.Close() // the earlier error is returned
	}
}

// A typedOps issues collectives of contiguous tensors of one type.
type typedOps interface {
	// issue issues the operation of one rank. The zero Tensor is an operand that the rank does
	// not use.
	issue(m *member, c *tensorCall, dst, src tensor.Tensor) error
	// allToAllV exchanges elements of contiguous tensors.
	allToAllV(on Issuer, dst []tensor.Tensor, recvs [][]int, src []tensor.Tensor, sends [][]int) error
}

type typedOpsOf[T memory.Element] struct{}

func (typedOpsOf[T]) issue(m *member, c *tensorCall, dst, src tensor.Tensor) error {
	to, err := sliceOf[T](dst)
	if err != nil {
		return err
	}
	from, err := sliceOf[T](src)
	if err != nil {
		return err
	}
	switch c.kind {
	case collective.AllReduce:
		return nccl.AllReduce(m.on, m.stream, to, from, c.op)
	case collective.Reduce:
		return nccl.Reduce(m.on, m.stream, to, from, c.op, c.root)
	case collective.Broadcast:
		return nccl.Broadcast(m.on, m.stream, to, from, c.root)
	case collective.AllGather:
		return nccl.AllGather(m.on, m.stream, to, from)
	case collective.ReduceScatter:
		return nccl.ReduceScatter(m.on, m.stream, to, from, c.op)
	case collective.AllToAll:
		return nccl.AllToAll(m.on, m.stream, to, from)
	case collective.Gather:
		return nccl.Gather(m.on, m.stream, to, from, c.root)
	case collective.Scatter:
		return nccl.Scatter(m.on, m.stream, to, from, c.root)
	case collective.Send:
		return nccl.Send(m.on, m.stream, from, c.root)
	}
	return nccl.Recv(m.on, m.stream, to, c.root)
}

// sliceOf returns the elements of a contiguous tensor; the zero Slice if there are none. An empty
// view may begin behind the end of its memory.
func sliceOf[T memory.Element](t tensor.Tensor) (memory.Slice[T], error) {
	if t.Len() == 0 {
		return memory.Slice[T]{}, nil
	}
	return tensor.Slice[T](t)
}

var opsByType = map[memory.DType]typedOps{
	memory.Bool: typedOpsOf[bool]{}, memory.Int8: typedOpsOf[int8]{}, memory.Uint8: typedOpsOf[uint8]{},
	memory.Int16: typedOpsOf[int16]{}, memory.Uint16: typedOpsOf[uint16]{}, memory.Int32: typedOpsOf[int32]{},
	memory.Uint32: typedOpsOf[uint32]{}, memory.Int64: typedOpsOf[int64]{}, memory.Uint64: typedOpsOf[uint64]{},
	memory.Float16: typedOpsOf[memory.Float16Bits]{}, memory.BFloat16: typedOpsOf[memory.BFloat16Bits]{},
	memory.Float32: typedOpsOf[float32]{}, memory.Float64: typedOpsOf[float64]{},
	memory.Float8E4M3: typedOpsOf[memory.Float8E4M3Bits]{}, memory.Float8E5M2: typedOpsOf[memory.Float8E5M2Bits]{},
}

// plural returns a number of things, such as "2 ranks".
func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}

// A TensorIssuer issues collectives of tensors of any layout; see OfTensors.
type TensorIssuer struct{ on Issuer }

// OfTensors returns the collectives of torch.distributed for tensors, which may have any
// strides. They are the functions of the same names for slices, on the same streams and under
// the same rules:
//
//	err := comm.OfTensors(g).AllReduce(comm.Sum, a.T())
//
// Each call takes one tensor for each local rank, on its device and all of one type. A
// contiguous tensor is used directly. Tensors of other layouts are copied to and from
// contiguous memory, which the caching allocator provides, on the group's stream; elements are
// sent in row-major order, so that the ranks may have different strides. Like the functions for
// slices, a call validates all arguments before it enqueues anything, and errors of arguments
// match ErrMismatch. In a Batch the tensors are read and written when the batch is enqueued.
//
// An operand with a part for each rank is a list for each local rank: either one tensor, which
// holds the parts by rank (all_gather_into_tensor), or one tensor for each rank (all_gather).
// Adjacent parts of contiguous memory, such as the result of Tensor.Chunk along dimension 0,
// are not copied.
func OfTensors(on Issuer) TensorIssuer { return TensorIssuer{on} }

// AllReduce enqueues, in place, the reduction of one tensor of each rank
// (torch.distributed.all_reduce). Collective.
func (x TensorIssuer) AllReduce(op Op, ts ...tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.AllReduce, op: op, dst: single(ts), inPlace: true})
}

// BroadcastFrom enqueues, in place, the copy of rank root's tensor to all ranks
// (torch.distributed.broadcast). Collective.
func (x TensorIssuer) BroadcastFrom(root int, ts ...tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.Broadcast, root: root, dst: single(ts), inPlace: true})
}

// ReduceTo enqueues the reduction of src over all ranks into dst on rank root
// (torch.distributed.reduce, which works in place). Tensors of dst for other ranks are not
// used, and dst may be nil if root is not local. Collective.
func (x TensorIssuer) ReduceTo(root int, op Op, dst, src []tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.Reduce, op: op, root: root, dst: single(dst), src: single(src)})
}

// AllGather enqueues the copies of src of all ranks into dst on all ranks
// (torch.distributed.all_gather, all_gather_into_tensor). Collective.
func (x TensorIssuer) AllGather(dst [][]tensor.Tensor, src ...tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.AllGather, dst: dst, src: single(src)})
}

// ReduceScatter enqueues the reduction of src over all ranks; each rank gets its part in dst
// (torch.distributed.reduce_scatter, reduce_scatter_tensor). Collective.
func (x TensorIssuer) ReduceScatter(op Op, dst []tensor.Tensor, src ...[]tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.ReduceScatter, op: op, dst: single(dst), src: src})
}

// AllToAll enqueues the exchange of parts between all ranks: part i of src goes to rank i, and
// part i of dst comes from rank i (torch.distributed.all_to_all, all_to_all_single). All parts
// have the same number of elements; AllToAllV exchanges different numbers of rows. Collective.
func (x TensorIssuer) AllToAll(dst [][]tensor.Tensor, src ...[]tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.AllToAll, dst: dst, src: src})
}

// GatherTo enqueues the copies of src of all ranks into dst on rank root
// (torch.distributed.gather). Lists of dst for other ranks are not used, and dst may be nil if
// root is not local. Collective.
func (x TensorIssuer) GatherTo(root int, dst [][]tensor.Tensor, src ...tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.Gather, root: root, dst: dst, src: single(src)})
}

// ScatterFrom enqueues a copy of each rank's part of src on rank root into that rank's dst
// (torch.distributed.scatter). Lists of src for other ranks are not used, and src may be empty
// if root is not local. Collective.
func (x TensorIssuer) ScatterFrom(root int, dst []tensor.Tensor, src ...[]tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.Scatter, root: root, dst: single(dst), src: src})
}

// Send enqueues a send of t from the first local rank to rank peer, which receives the same
// number of elements (torch.distributed.isend). Sends and receives that could wait for each
// other must be issued in one Batch (torch.distributed.batch_isend_irecv).
func (x TensorIssuer) Send(peer int, t tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.Send, root: peer, src: [][]tensor.Tensor{{t}}})
}

// Recv enqueues a receive into t on the first local rank from rank peer
// (torch.distributed.irecv).
func (x TensorIssuer) Recv(peer int, t tensor.Tensor) error {
	return x.issue(&tensorCall{kind: collective.Recv, root: peer, dst: [][]tensor.Tensor{{t}}})
}

// issue adds a call to the issuer's batch, or enqueues it if the issuer is a group.
func (x TensorIssuer) issue(c *tensorCall) error {
	g, b := groupOf(x.on)
	if b != nil {
		return b.markRefused(c.addTo(b))
	}
	if err := g.check(c.name()); err != nil {
		return err
	}
	return g.Batch(c.addTo)
}

// single returns a list of one tensor for each tensor.
func single(ts []tensor.Tensor) [][]tensor.Tensor {
	lists := make([][]tensor.Tensor, len(ts))
	for i := range ts {
		lists[i] = ts[i : i+1 : i+1]
	}
	return lists
}

// A tensorCall is one collective of tensors.
type tensorCall struct {
	kind     collective.Kind
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
	if collective.Kinds[c.kind].Peer {
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
	d := &collective.Kinds[c.kind]
	return d.Dst != collective.None && (!d.DstRoot || rank == c.root)
}

func (c *tensorCall) reads(rank int) bool {
	d := &collective.Kinds[c.kind]
	return !c.inPlace && d.Src != collective.None && (!d.SrcRoot || rank == c.root)
}

// check validates the tensors of the first n local ranks, and makes the group's streams keep
// their memory.
func (c *tensorCall) check(g *Group, n int) error {
	d := &collective.Kinds[c.kind]
	dst, src := operand{"destination", c.dst, d.Dst, d.DstRoot}, operand{"source", c.src, d.Src, d.SrcRoot}
	if d.Dst != collective.None && !dst.complete(n) || d.Src != collective.None && !c.inPlace && !src.complete(n) {
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
	size  collective.Sizing
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
	whole := x.size == collective.All && len(list) == 1
	if !whole && (x.size == collective.One && len(list) != 1 || x.size == collective.All && len(list) != g.size) {
		want := "1"
		if x.size == collective.All {
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
		in := c.inPlace && (c.kind != collective.Broadcast || rank == c.root)
		if dst, err = b.flat(m, c.dst[i], in, c.kind != collective.Broadcast || rank != c.root); c.inPlace {
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
