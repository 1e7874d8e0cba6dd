package comm

import (
	"fmt"
	"slices"

	"github.com/gochorus/chorus/device"
	"github.com/gochorus/chorus/internal/flight"
	"github.com/gochorus/chorus/internal/strided"
	"github.com/gochorus/chorus/tensor"
)

// BroadcastConfig are the options of Broadcast; nil means their zero values.
type BroadcastConfig struct {
	// Devices get the tensor; a device may occur several times. nil means the devices of
	// the group, by rank.
	Devices []*device.Device
	// Out are existing tensors to copy to, with the shape of the source. Out and Devices
	// exclude each other.
	Out []tensor.Tensor
}

// Broadcast enqueues copies of t, which is on a device of the group or on the host, to the
// devices (torch.cuda.comm.broadcast), and returns the copies in the order of the devices.
// The result for the device of t shares the memory of t. The other results are contiguous.
// With Out, whose strides and types may differ, the results share the memory of the
// tensors of Out. Each result owns a reference to its memory: the caller closes all
// results, and closing a result closes neither t nor a tensor of Out.
//
// For one other device, Broadcast enqueues a copy. For more devices it launches one kernel,
// or NCCL's broadcast if each device of the group has one contiguous tensor of the same
// type. Broadcast converts between types, which torch leaves to NCCL to refuse.
func Broadcast(g *Group, t tensor.Tensor, cfg *BroadcastConfig) ([]tensor.Tensor, error) {
	c := orZero(cfg)
	return locked(g, "broadcast", func() ([]tensor.Tensor, error) { return g.broadcastTo(t, &c) })
}

// broadcastTo is Broadcast while g is locked.
func (g *Group) broadcastTo(t tensor.Tensor, c *BroadcastConfig) ([]tensor.Tensor, error) {
	const op = "broadcast"
	if c.Devices != nil && c.Out != nil {
		return nil, badArgument(op, "exactly one of Devices and Out must be specified, but got %d devices and %d tensors", len(c.Devices), len(c.Out))
	}
	if err := g.checkSource(op, "tensor", only, t); err != nil {
		return nil, err
	}
	if c.Out != nil {
		if err := checkBroadcastOut(g, t, c.Out); err != nil {
			return nil, err
		}
		if err := g.copyToAll(t, c.Out); err != nil {
			return nil, err
		}
		return strided.RetainAll(c.Out), nil
	}
	devs, err := g.devices(op, c.Devices)
	if err != nil {
		return nil, err
	}
	return g.broadcast(t, devs)
}

func checkBroadcastOut(g *Group, t tensor.Tensor, out []tensor.Tensor) error {
	const op = "broadcast"
	if err := g.checkOuts(op, out); err != nil {
		return err
	}
	for i, o := range out {
		if !strided.SameShape(o, t) {
			return badArgument(op, "expected all output tensors to have the shape of the source tensor %v, but output tensor at index %d has shape %v", t.Shape(), i, o.Shape())
		}
		if err := strided.CheckCopy(fmt.Sprintf("comm: %s: output tensor at index %d", op, i), o, t); err != nil {
			return asBadArgument(err)
		}
	}
	return nil
}

// broadcast is Broadcast to devices.
func (g *Group) broadcast(t tensor.Tensor, devs []*device.Device) (results []tensor.Tensor, err error) {
	defer func() {
		if err != nil {
			closeAll(results)
			results = nil
		}
	}()
	results = make([]tensor.Tensor, 0, len(devs))
	fresh := make([]tensor.Tensor, 0, len(devs))
	for _, d := range devs {
		if d == t.Device() {
			results = append(results, t.Retain())
			continue
		}
		x, err := g.makeLikeOn(fresh, d, t)
		if err != nil {
			return results, err
		}
		results, fresh = append(results, x), append(fresh, x)
	}
	return results, g.copyToAll(t, fresh)
}

// makeLikeOn allocates one more contiguous tensor with the shape of t on a device.
func (g *Group) makeLikeOn(some []tensor.Tensor, d *device.Device, t tensor.Tensor) (tensor.Tensor, error) {
	s := g.members[g.rankOn(d)].stream
	if len(some) > 0 {
		return tensor.MakeLike(s, some[0], t.DType()) // shares the shape slice of some[0]
	}
	return tensor.Make(s, t.DType(), t.Shape()...)
}

// copyToAll copies t to tensors of its shape.
func (g *Group) copyToAll(t tensor.Tensor, to []tensor.Tensor) error {
	if len(to) == 0 || t.Len() == 0 {
		return nil
	}
	if err := g.recordStreams(t); err != nil {
		return err
	}
	if err := g.recordStreams(to...); err != nil {
		return err
	}
	from, same := g.streamOf(t), slices.Repeat([]tensor.Tensor{t}, len(to))
	switch alone, err := canCopyByKernel(from, to, same); {
	case err != nil:
		return err
	case alone:
		return copyByKernel(from, g.streamsOf(to), to, same)
	}
	if all := append([]tensor.Tensor{t}, to...); len(to) > 1 && g.onePerDevice(all...) {
		ranks, root := g.byRank(all...), g.rankOn(t.Device())
		call := &tensorCall{kind: flight.Broadcast, root: root}
		return g.enqueueAll(func(i int, m *member) error { return opsByType[t.DType()].issue(m, call, ranks[i], ranks[i]) })
	}
	for _, x := range to {
		if err := transfer(x, t, g.streamOf(x), from); err != nil {
			return err
		}
	}
	return nil
}
