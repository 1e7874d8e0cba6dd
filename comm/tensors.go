package comm

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/flight"
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

// locked runs fn, which enqueues operations of all ranks, while g enqueues nothing else. All
// ranks must be in this process.
func locked[R any](g *Group, op string, fn func() (R, error)) (r R, err error) {
	if err := g.checkWhole(op); err != nil {
		return r, err
	}
	g.issuing.Lock()
	defer g.issuing.Unlock()
	return fn()
}

// orZero returns *cfg, or the zero value if cfg is nil.
func orZero[C any](cfg *C) (c C) {
	if cfg != nil {
		c = *cfg
	}
	return c
}

// badArgument returns the error of an invalid argument.
func badArgument(op, format string, args ...any) error {
	return &argumentError{fmt.Errorf("comm: %s: "+format, append([]any{op}, args...)...)}
}

// asBadArgument makes the error of another package an error of an invalid argument.
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

// onePerDevice reports whether all tensors are contiguous, have the same type, and are on
// different devices of the group. Then NCCL can transfer them.
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

// recordStreams records that the group's streams use the tensors. Copies from the host do so
// themselves.
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

// transfer enqueues a copy of src, whose use is ordered by from, to dst, whose use is
// ordered by to. The stream of a host tensor is nil. The copy runs on the device whose
// tensor has strides, so that contiguous data goes over the link. Otherwise it runs on the
// source, as in torch, so that copies from one device follow each other without gaps.
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
	case flight.AllReduce:
		return nccl.AllReduce(m.on, m.stream, to, from, c.op)
	case flight.Reduce:
		return nccl.Reduce(m.on, m.stream, to, from, c.op, c.root)
	case flight.Broadcast:
		return nccl.Broadcast(m.on, m.stream, to, from, c.root)
	case flight.AllGather:
		return nccl.AllGather(m.on, m.stream, to, from)
	case flight.ReduceScatter:
		return nccl.ReduceScatter(m.on, m.stream, to, from, c.op)
	case flight.AllToAll:
		return nccl.AllToAll(m.on, m.stream, to, from)
	case flight.Gather:
		return nccl.Gather(m.on, m.stream, to, from, c.root)
	case flight.Scatter:
		return nccl.Scatter(m.on, m.stream, to, from, c.root)
	case flight.Send:
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
