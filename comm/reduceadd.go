package comm

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/collective"
	"github.com/gochorus/chorus/internal/gpu"
	"github.com/gochorus/chorus/internal/inside"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// ReduceAddConfig are the options of ReduceAdd; nil means their zero values.
type ReduceAddConfig struct {
	// Destination is the device of the sum; one of the tensors must be on it. nil means
	// the device of rank 0.
	Destination *device.Device
	// Deterministic prevents sums by NCCL, whose order of additions is unspecified. Groups with
	// Config.Deterministic without OnRequest always do that.
	Deterministic bool
}

// ReduceAdd enqueues the sum of tensors of one shape, which are on devices of the group,
// on the destination (torch.cuda.comm.reduce_add), and returns it; the caller closes it.
// The sum of a single tensor is a new reference to its memory.
//
// One kernel of the destination adds contiguous tensors of one type, if at most 16 MiB of
// them are on other devices, or less than 1 MiB in case of two tensors. For more bytes
// NCCL adds, in an unspecified order, if each device of the group has exactly one tensor,
// and the tensors are contiguous and of one type that NCCL can add. In all other cases the
// tensors are added one by one. Without NCCL, the order is: first the last of the tensors
// on the destination, then the others in their order. Each sum is rounded to the result
// type, which is torch's promotion of the first two types.
func ReduceAdd(g *Group, ts []tensor.Tensor, cfg *ReduceAddConfig) (tensor.Tensor, error) {
	const op = "reduce-add"
	c := *cmp.Or(cfg, new(ReduceAddConfig))
	return locked(g, op, func() (tensor.Tensor, error) {
		sum, err := newSum(g, op, ts, &c)
		if err != nil {
			return tensor.Tensor{}, err
		}
		return sum.enqueue()
	})
}

// A sum is a validated ReduceAdd.
type sum struct {
	g     *Group
	ts    []tensor.Tensor
	root  int          // the index of the one on the destination
	dtype memory.DType // of the result
	nccl  bool
}

func newSum(g *Group, op string, ts []tensor.Tensor, c *ReduceAddConfig) (*sum, error) {
	if len(ts) == 0 {
		return nil, badArgument(op, "expected at least one tensor to add")
	}
	to, err := g.destination(op, c.Destination)
	if err != nil {
		return nil, err
	}
	x := &sum{g: g, ts: ts, root: -1, dtype: ts[0].DType()}
	for i, t := range ts {
		if err := g.checkSource(op, "tensor", i, t); err != nil {
			return nil, err
		}
		if t.IsHost() {
			return nil, badArgument(op, "expects all tensors to be on devices, but tensor %d is on the host", i)
		}
		if t.Device() == to {
			x.root = i
		}
		if !strided.SameShape(t, ts[0]) {
			return nil, badArgument(op, "tensor %d has invalid size: got %s, but expected %s", i, times(t.Shape()), times(ts[0].Shape()))
		}
	}
	if x.root < 0 {
		return nil, badArgument(op, "expects the destination %s to be the device of one of the tensors", to)
	}
	x.nccl = !c.Deterministic && !g.alwaysInOrder() && len(ts) > 1 && g.onePerDevice(ts...) && addable(ts[0].DType())
	return x, x.promote(op)
}

// destination validates the device of a result; nil means the device of rank 0.
func (g *Group) destination(op string, d *device.Device) (*device.Device, error) {
	if d == nil {
		return g.Device(0), nil
	}
	if g.rankOn(d) < 0 {
		return nil, badArgument(op, "the destination is %s, which no rank of the group is on", d)
	}
	return d, nil
}

// times formats a shape as torch does in this error, such as 2x3.
func times(shape []int) string {
	var parts []string
	for _, n := range shape {
		parts = append(parts, fmt.Sprint(n))
	}
	return strings.Join(parts, "x")
}

// addable reports whether NCCL adds elements of a type as torch does.
func addable(t memory.DType) bool {
	switch t {
	case memory.Int16, memory.Uint16, memory.Float8E4M3, memory.Float8E5M2:
		return false
	}
	return true
}

// promote determines the type of the sum, which depends on the first addition only.
func (x *sum) promote(op string) error {
	x.dtype = x.ts[x.root].DType()
	first := true
	for i, t := range x.ts {
		if i == x.root {
			continue
		}
		wide, err := kernel.Promote(x.dtype, t.DType())
		switch {
		case err != nil:
			return badArgument(op, "tensor %d: %w", i, err)
		case first:
			x.dtype, first = wide, false
		case !kernel.CanCast(wide, x.dtype):
			return badArgument(op, "tensor %d is of %s: a sum of %s cannot be cast to %s, the type of the first two", i, t.DType(), wide, x.dtype)
		}
	}
	return nil
}

func (x *sum) enqueue() (result tensor.Tensor, err error) {
	root := x.ts[x.root]
	if len(x.ts) == 1 {
		return root.Retain(), nil
	}
	if err := x.g.recordStreams(x.ts...); err != nil {
		return tensor.Tensor{}, err
	}
	if result, err = tensor.MakeLike(x.g.streamOf(root), root, x.dtype); err != nil {
		return tensor.Tensor{}, err
	}
	if result.Len() > 0 {
		err = x.add(result)
	}
	if err != nil {
		_ = result.Close()
		return tensor.Tensor{}, err
	}
	return result, nil
}

// add adds by the fastest method.
func (x *sum) add(result tensor.Tensor) error {
	lists := make([][]tensor.Tensor, 1, len(x.ts))
	lists[0] = x.ts[x.root : x.root+1]
	for i := range x.ts {
		if i != x.root {
			lists = append(lists, x.ts[i:i+1])
		}
	}
	s := x.g.streamOf(result)
	if x.nccl && len(x.ts) == 2 && result.Bytes() >= pairBytes {
		return x.reduce(result)
	}
	switch alone, err := canAddByKernel(s, result, lists); {
	case err != nil:
		return err
	case alone:
		return x.g.addByKernel(s, result, lists)
	case x.nccl:
		return x.reduce(result)
	}
	return x.inOrder(result)
}

// reduce adds with NCCL.
func (x *sum) reduce(result tensor.Tensor) error {
	ranks, root := x.g.byRank(x.ts...), x.g.rankOn(result.Device())
	call := &tensorCall{kind: collective.Reduce, op: Sum, root: root}
	return x.g.enqueueAll(func(i int, m *member) error { return opsByType[x.dtype].issue(m, call, result, ranks[i]) })
}

// inOrder adds one tensor after the other.
func (x *sum) inOrder(result tensor.Tensor) error {
	so := x.ts[x.root] // the sum so far
	for i, t := range x.ts {
		if i == x.root {
			continue
		}
		if err := x.addOne(result, so, t); err != nil {
			return err
		}
		so = result
	}
	return nil
}

// addOne adds t, which may be on another device.
func (x *sum) addOne(result, so, t tensor.Tensor) (err error) {
	s := x.g.streamOf(result)
	if t.Device() != result.Device() {
		near, err := tensor.MakeLike(s, t, t.DType())
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, near.Close()) }()
		if err := transfer(near, t, s, x.g.streamOf(t)); err != nil {
			return err
		}
		return tensor.Add(s, result, so, near)
	}
	return tensor.Add(s, result, so, t)
}

// A limit is the maximum size of a bucket.
type limit struct {
	bytes int
	reach bool // the last tensor of a bucket reaches the limit; otherwise only a single tensor exceeds it
}

// buckets groups tensors of one type into buckets. The last, incomplete buckets come at
// the end, ordered by the first tensor of each type.
func (l limit) buckets(ts []tensor.Tensor) (buckets [][]int) {
	type open struct {
		indexes []int
		bytes   int
	}
	byType := map[memory.DType]*open{}
	var types []memory.DType
	var b *open
	for i := range ts {
		t := &ts[i]
		if i == 0 || t.DType() != ts[i-1].DType() {
			b = byType[t.DType()]
		}
		if b == nil {
			b = &open{indexes: make([]int, 0, len(ts)-i)}
			byType[t.DType()] = b
			types = append(types, t.DType())
		}
		if !l.reach && b.bytes > 0 && b.bytes+t.Bytes() > l.bytes {
			buckets = append(buckets, b.indexes)
			*b = open{}
		}
		b.indexes = append(b.indexes, i)
		if b.bytes += t.Bytes(); l.reach && b.bytes >= l.bytes {
			buckets = append(buckets, b.indexes)
			*b = open{}
		}
	}
	for _, d := range types {
		if b := byType[d]; len(b.indexes) > 0 {
			buckets = append(buckets, b.indexes)
		}
	}
	return buckets
}

// selectAt returns the elements of xs at the indexes, in a slice that may be xs
// itself.
func selectAt[E any](xs []E, indexes []int) []E {
	if len(indexes) == len(xs) && slices.IsSorted(indexes) {
		return xs // all elements in order
	}
	part := make([]E, len(indexes))
	for k, i := range indexes {
		part[k] = xs[i]
	}
	return part
}

// storeAt is the inverse of selectAt: it stores parts at the indexes of all, and returns the
// result, which may be parts itself.
func storeAt[E any](all []E, indexes []int, parts []E) []E {
	if len(indexes) == len(all) && slices.IsSorted(indexes) {
		return parts // all elements in order
	}
	for k, i := range indexes {
		all[i] = parts[k]
	}
	return all
}

// flatten returns the elements of tensors of one type and device in one flat
// tensor, without copying a single contiguous tensor.
func (g *Group) flatten(ts []tensor.Tensor) (flat tensor.Tensor, err error) {
	if len(ts) == 1 && ts[0].Contiguous() {
		flat, err := ts[0].View(-1)
		return flat.Retain(), err
	}
	if err := g.recordStreams(ts...); err != nil {
		return flat, err
	}
	s := g.streamOf(ts[0])
	if flat, err = tensor.Make(s, ts[0].DType(), lengthOf(ts)); err != nil {
		return flat, err
	}
	if err := strided.Flatten(s, []tensor.Tensor{flat}, ts); err != nil {
		_ = flat.Close()
		return tensor.Tensor{}, err
	}
	return flat, nil
}

// lengthOf returns the total number of elements.
func lengthOf(ts []tensor.Tensor) int {
	n := 0
	for i := range ts {
		n += ts[i].Len()
	}
	return n
}

// A staging is contiguous memory that a batch uses in place of tensors with other layouts.
type staging struct {
	stream *stream.Stream
	temp   tensor.Tensor   // owns the memory
	parts  []tensor.Tensor // of temp, with the shapes of given
	given  []tensor.Tensor // the caller's
	in     bool            // copy given to temp before the batch
	out    bool            // copy temp to given after it
}

// stage allocates the staging of tensors of one type with n elements.
func stage(s *stream.Stream, given []tensor.Tensor, n int, in, out bool) (staging, error) {
	temp, err := tensor.Make(s, given[0].DType(), n)
	if err != nil {
		return staging{}, err
	}
	x := staging{stream: s, temp: temp, given: given, in: in, out: out}
	from := 0
	for _, t := range given {
		part, err := temp.Narrow(0, from, t.Len())
		if err == nil {
			part, err = part.View(t.Shape()...)
		}
		if err != nil {
			closeAll([]tensor.Tensor{temp})
			return staging{}, err
		}
		x.parts, from = append(x.parts, part), from+t.Len()
	}
	return x, nil
}

// copyIn enqueues the copies that precede the batch's operations.
func (b *Batch) copyIn() error {
	for i := range b.stagings {
		if x := &b.stagings[i]; x.in {
			if err := tensor.CopyAll(x.stream, x.parts, x.given); err != nil {
				return err
			}
		}
	}
	return nil
}

// copyOut enqueues the copies that follow the batch's operations.
func (b *Batch) copyOut() error {
	for i := range b.stagings {
		if x := &b.stagings[i]; x.out {
			if err := tensor.CopyAll(x.stream, x.given, x.parts); err != nil {
				return err
			}
		}
	}
	return nil
}

// freeStagings frees the memory, stream-ordered.
func (b *Batch) freeStagings() {
	for i := range b.stagings {
		_ = b.stagings[i].temp.Close() // the memory is the batch's, so there is nothing to report
	}
	clear(b.stagings)
	b.stagings = b.stagings[:0]
}

// directBytes is the maximum size of an operation of torch.cuda.comm that one kernel on one
// device executes for all devices. The kernel needs one call, but copies and NCCL need one or
// more for each device. It accesses all other devices at the speed of its links;
// NCCL's ring is faster only for more bytes. A negative value disables the kernel.
var directBytes = 16 << 20

// directRow is the minimum length in bytes of the rows of a strided copy that a kernel copies
// at the full speed of a link. It does not matter if copy engines can copy the rows.
const directRow = 512

// pairBytes is the minimum size for copy engines or NCCL if the operation uses only one other
// device. They then need as few calls as a kernel, and do not wait for the other device's
// stream before and after every operation.
var pairBytes = 1 << 20

// canCopyByKernel reports whether a kernel on s copies src to dst.
func canCopyByKernel(s *stream.Stream, dst, src []tensor.Tensor) (bool, error) {
	if directBytes < 0 || s == nil {
		return false, nil
	}
	far, links := 0, 0 // bytes copied between devices, and the number of these copies
	for i := range dst {
		if dst[i].IsHost() || src[i].IsHost() {
			return false, nil
		}
		to, from := dst[i].Device(), src[i].Device()
		if to != from {
			far += dst[i].Bytes()
			links++
		}
		if near, err := inside.Reach(s.Device(), to, from); err != nil || !near {
			return false, err
		}
	}
	if links == 1 && (len(dst) == 1 || far >= pairBytes) && canCopyByEngines(dst, src) {
		return false, nil
	}
	if far <= directBytes {
		return true, nil
	}
	for i := range dst {
		if strided.ByEngine(dst[i], src[i]) || strided.RowBytes(dst[i], src[i]) < directRow {
			return false, nil
		}
	}
	return true, nil
}

// canCopyByEngines reports whether copy engines can copy all tensors with their strides.
func canCopyByEngines(dst, src []tensor.Tensor) bool {
	for i := range dst {
		if !strided.ByEngine(dst[i], src[i]) {
			return false
		}
	}
	return true
}

// runOn runs work on s with tensors of the other streams, which may be all streams of the
// operation. s waits for the other streams before, and they wait for s after it.
func runOn(s *stream.Stream, others []*stream.Stream, used [][]tensor.Tensor, work func() error) error {
	if err := gpu.Join(s, others); err != nil {
		return err
	}
	err := work()
	if e := gpu.Fork(s, others); e != nil {
		// The other streams do not wait for the work, so s must keep the memory.
		err = errors.Join(err, e)
		for _, t := range slices.Concat(used...) {
			err = errors.Join(err, t.RecordStream(s))
		}
	}
	return err
}

// copyByKernel lets a kernel on s copy src to dst, whose use is ordered by the other streams.
func copyByKernel(s *stream.Stream, others []*stream.Stream, dst, src []tensor.Tensor) error {
	return runOn(s, others, [][]tensor.Tensor{dst, src}, func() error { return strided.CopyByKernel(s, dst, src) })
}

// canAddByKernel reports whether a kernel on s adds lists of tensors, each list on one device,
// to dst.
func canAddByKernel(s *stream.Stream, dst tensor.Tensor, lists [][]tensor.Tensor) (bool, error) {
	far := 0
	for _, list := range lists {
		if len(list) > 0 && list[0].Device() != s.Device() {
			far += dst.Bytes()
		}
	}
	if directBytes < 0 || far > directBytes {
		return false, nil
	}
	return strided.CanAddAll(s, dst, lists)
}

// addByKernel lets a kernel on s add lists of tensors, each list on one device, to dst one
// after the other.
func (g *Group) addByKernel(s *stream.Stream, dst tensor.Tensor, lists [][]tensor.Tensor) error {
	var others []*stream.Stream
	for _, list := range lists {
		if len(list) > 0 {
			others = withStream(others, g.streamOf(list[0]))
		}
	}
	return runOn(s, others, lists, func() error { return strided.AddAll(s, dst, lists) })
}

// streamsOf returns the group's streams that order the use of tensors, without duplicates.
func (g *Group) streamsOf(ts []tensor.Tensor) []*stream.Stream {
	list := make([]*stream.Stream, 0, len(g.members))
	for i := range ts {
		list = withStream(list, g.streamOf(ts[i]))
	}
	return list
}

// withStream adds a stream unless the list has it.
func withStream(list []*stream.Stream, s *stream.Stream) []*stream.Stream {
	if slices.Contains(list, s) {
		return list
	}
	return append(list, s)
}
