package comm

import (
	"errors"
	"fmt"
	"strings"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/kernel"
	"github.com/gochorus/chorus/memory"
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
	c := orZero(cfg)
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
	call := &tensorCall{kind: flight.Reduce, op: Sum, root: root}
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
