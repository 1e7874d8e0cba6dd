package comm

import (
	"errors"
	"fmt"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/memory"
	"github.com/gochorus/chorus/nccl"
	"github.com/gochorus/chorus/stream"
	"github.com/gochorus/chorus/tensor"
)

// What torch.cuda.comm's functions have in common is in the package's
// documentation.

// checkWhole is check for functions that need all ranks.
func (g *Group) checkWhole(op string) error {
	if err := g.checkWait(op); err != nil {
		return err
	}
	if len(g.members) != g.size {
		return refuse(op, "%d of the group's %d ranks are in this process, and it needs all: use Local, or the collectives of slices",
			len(g.members), g.size)
	}
	return nil
}

// refuse is the error of a wrong argument.
func refuse(op, format string, args ...any) error {
	return &argumentError{fmt.Errorf("comm: %s: "+format, append([]any{op}, args...)...)}
}

// unfit makes a wrong argument of the error of another package.
func unfit(err error) error { return &argumentError{err} }

// rankOn returns the rank on a device, or -1.
func (g *Group) rankOn(d *device.Device) int {
	for i := range g.members {
		if g.members[i].comm.Device() == d {
			return i
		}
	}
	return -1
}

// streamOf returns the group's stream that orders the use of t, or nil for a tensor
// of the host.
func (g *Group) streamOf(t tensor.Tensor) *stream.Stream {
	if t.IsHost() {
		return nil
	}
	return g.members[g.rankOn(t.Device())].stream
}

// devices checks a list of devices; nil stands for all of the group by rank.
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
			return nil, refuse(op, "device %d of %d is %v, which no rank of the group is on", i, len(list), d)
		}
	}
	return list, nil
}

// source checks a tensor that is read, the ith of several or the only one: of a device
// of the group or of the host.
func (g *Group) source(op, what string, i int, t tensor.Tensor) error {
	if t.IsHost() || t.Device() != nil && g.rankOn(t.Device()) >= 0 {
		if t.Check(what, nil) != nil {
			return refuse(op, "%w", t.Check(nth(what, i), nil))
		}
		return nil
	}
	if t.Device() == nil {
		return refuse(op, "%s: no tensor given", nth(what, i))
	}
	return refuse(op, "%s is on %s, which no rank of the group is on", nth(what, i), t.Device())
}

// only is the index of what there is one of.
const only = -1

func nth(what string, i int) string {
	if i == only {
		return "the " + what
	}
	return fmt.Sprintf("%s at index %d", what, i)
}

// outs checks tensors of devices that are written.
func (g *Group) outs(op string, list []tensor.Tensor) error {
	for i, o := range list {
		if err := g.source(op, "output tensor", i, o); err != nil {
			return err
		}
		if o.IsHost() {
			return refuse(op, "expected all output tensors to be on devices, but output tensor at index %d is on the host", i)
		}
		for j, p := range list[:i] {
			if tensor.Overlaps(o, p) {
				return refuse(op, "the output tensors at indexes %d and %d share some memory", j, i)
			}
		}
	}
	return nil
}

// apart reports whether all tensors are contiguous, of one type and on devices of
// their own that are all of the group's: then NCCL takes them.
func (g *Group) apart(ts ...tensor.Tensor) bool {
	seen := make([]bool, g.size)
	for _, t := range ts {
		if t.IsHost() || !t.Contiguous() || t.DType() != ts[0].DType() || seen[g.rankOn(t.Device())] {
			return false
		}
		seen[g.rankOn(t.Device())] = true
	}
	return len(ts) == g.size
}

// byRank puts tensors of devices of their own in the order of the ranks.
func (g *Group) byRank(ts ...tensor.Tensor) []tensor.Tensor {
	list := make([]tensor.Tensor, g.size)
	for _, t := range ts {
		list[g.rankOn(t.Device())] = t
	}
	return list
}

// record tells that the group's streams use the tensors. Copies from the host do so
// themselves.
func (g *Group) record(ts ...tensor.Tensor) error {
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

// transfer enqueues the copy of src to dst, whose use from orders, and to. The one is
// nil for a tensor of the host. It runs where the strides are, so that what goes over the
// link goes in one piece, and otherwise at the source, as in torch: copies from one device
// then follow each other as fast as its links take them.
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
		// Nothing orders the copy with the end of the memory any more.
		return errors.Join(err, dst.RecordStream(by), src.RecordStream(by))
	}
	return nil
}

// atSource reports whether a copy between devices runs at the source: it does not where
// only the destination has strides.
func atSource(dst, src tensor.Tensor) bool { return !src.Contiguous() || dst.Contiguous() }

// closeAll closes what was made before an error.
func closeAll(ts []tensor.Tensor) {
	for _, t := range ts {
		_ = t.Close() // the error that is returned was first
	}
}

// A wire gives tensors of one type to NCCL.
type wire interface {
	// broadcast sends rank root's tensor to the others.
	broadcast(m *member, t tensor.Tensor, root int) error
	// add sums src of all ranks into dst of rank root.
	add(m *member, dst, src tensor.Tensor, root int) error
}

type wireOf[T memory.Element] struct{}

func (wireOf[T]) broadcast(m *member, t tensor.Tensor, root int) error {
	x, err := tensor.Slice[T](t)
	if err != nil {
		return err
	}
	return nccl.Broadcast(m.comm, m.stream, x, x, root)
}

func (wireOf[T]) add(m *member, dst, src tensor.Tensor, root int) error {
	x, err := tensor.Slice[T](src)
	if err != nil {
		return err
	}
	var sum memory.Slice[T]
	if m.comm.Rank() == root {
		if sum, err = tensor.Slice[T](dst); err != nil {
			return err
		}
	}
	return nccl.Reduce(m.comm, m.stream, sum, x, nccl.Sum, root)
}

var wires = map[memory.DType]wire{
	memory.Bool: wireOf[bool]{}, memory.Int8: wireOf[int8]{}, memory.Uint8: wireOf[uint8]{},
	memory.Int16: wireOf[int16]{}, memory.Uint16: wireOf[uint16]{}, memory.Int32: wireOf[int32]{},
	memory.Uint32: wireOf[uint32]{}, memory.Int64: wireOf[int64]{}, memory.Uint64: wireOf[uint64]{},
	memory.Float16T: wireOf[memory.Float16]{}, memory.BFloat16T: wireOf[memory.BFloat16]{},
	memory.Float32: wireOf[float32]{}, memory.Float64: wireOf[float64]{},
	memory.Float8E4M3T: wireOf[memory.Float8E4M3]{}, memory.Float8E5M2T: wireOf[memory.Float8E5M2]{},
}
